"""The same command once more: with other data or beside itself it is refused, and who was killed is not shown as here."""

import shutil
from pathlib import Path

import pytest

from dpps.errors import RunError, UsageError
from dpps.peers import Key, Participation, Request, convene
from dpps.peers.join import accept
from tests.peers.test_correspondence import A, B, listen, met, started
from tests.peers.test_join import three  # noqa: F401 - a fixture
from tests.peers.test_member import make_run
from tests.support.bare import SOFT
from tests.support.peers import NAMES as THREE
from tests.support.peers import PLAN, Organisations
from tests.support.simulated import Network, SimulatedPost


def _taking_part(made: Organisations, data: Path) -> Participation:
    files = made.folder / "federation.toml", made.folder / THREE[0], made.folder / "run"
    return Participation(*files, node_data=data)


def test_another_members_data_is_refused(three: Organisations) -> None:  # noqa: F811
    own, other = (three.folder / f"data-{name}" for name in THREE[:2])
    with _taking_part(three, own) as first:
        first.prepare()
    with _taking_part(three, other) as wrong, pytest.raises(UsageError, match=str(other)) as told:
        wrong.prepare()
    assert "\n" not in str(told.value)
    shutil.copytree(own, three.folder / "moved")
    with _taking_part(three, three.folder / "moved") as again:
        assert again.prepare().run.resumed


@pytest.mark.parametrize("noise", [True, False])
def test_a_folder_has_one_process_at_a_time(noise: bool, tmp_path: Path) -> None:
    more = {} if noise else {"privacy": None}
    opened: list[bool] = []

    def main(post: SimulatedPost) -> None:
        first = make_run(post, 0, tmp_path / "m0", **more).start(1)
        with pytest.raises(RunError, match=str(tmp_path)):
            make_run(post, 0, tmp_path / "m0", **more).start(1)
        first.close()
        make_run(post, 0, tmp_path / "m0", **more).start(1).close()
        opened.append(True)

    Network({"m0": main}).run()
    assert opened


def test_a_killed_neighbour_is_shown_as_away_soon(tmp_path: Path) -> None:
    """Its connection is gone; whether rounds wait for it is another matter."""
    shown: list[str] = []

    def main(post: SimulatedPost) -> None:
        fabric = started(post, 0, hard=3000.0)
        met(fabric)
        shown.append(fabric.status()[1]["state"])
        network.kill(B)
        until = post.clock() + 3 * SOFT + 1.0
        while post.clock() < until:
            fabric.wait(0.1)
        shown.append(fabric.status()[1]["state"])

    network = Network({A: main, B: listen})
    network.run()
    assert shown == ["here", "away"]


def test_a_convener_makes_a_second_contract_with_the_same_key(tmp_path: Path) -> None:
    """Members see no other convener."""
    made = Organisations(tmp_path, (7441, 7442))
    requests = [Request(m.name, m.address, m.key) for m in made.federation.members]
    first, second = tmp_path / "1.toml", tmp_path / "2.toml"
    first.write_text(made.federation.to_toml())
    second.write_text(convene(PLAN, requests, made.convener).to_toml())
    own = made.identities[THREE[0]]
    assert accept(own, first).id != accept(own, second).id
    other = Key.make(tmp_path / "other" / "convener.key")
    second.write_text(convene(PLAN, requests, other).to_toml())
    with pytest.raises(UsageError):
        accept(own, second)
