"""Runs between members, with the real Run objects on a simulated network."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import dpps
from dpps.errors import RunError, UsageError
from dpps.peers import LEARNING, Member, Peers
from dpps.peers.links import LEFT
from dpps.peers.messages import Presence
from dpps.privacy import LedgerFile
from tests.support.bare import HARD, SOFT
from tests.support.federation import EXAMPLES, NAMES, Federation, make_run
from tests.support.simulated import Network, SimulatedPost

pytestmark = pytest.mark.usefixtures("no_fsync")


def test_a_run_of_four_members(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    federation.network.run()
    models = federation.models()
    assert all(torch.allclose(model, models[0], atol=1e-5) for model in models)
    assert float((models[0] - models[0].mean()).norm()) > 0.1
    for k, name in enumerate(NAMES):
        run = federation.runs[name]
        ledger = LedgerFile.read(tmp_path / name / "ledger.jsonl")
        assert [round_ for round_, _ in ledger.history] == list(range(12))
        assert run.summary.privacy.epsilon < 20
        assert "Seen by" in run.privacy.statement
        assert run.summary.rounds == 12
        assert [path.name for path in (tmp_path / name / "models").iterdir()] == [f"node-{k}.safetensors"]


def test_the_first_round_waits_for_all_members(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    federation.network.at(0.0, lambda: federation.network.kill("m3"))
    federation.network.at(10 * HARD, lambda: federation.network.restart("m3"))
    federation.network.run()
    for name in NAMES:
        charged = [r for r, _ in LedgerFile.read(tmp_path / name / "ledger.jsonl").history]
        assert charged == list(range(12))


def test_the_first_round_waits_for_nobody_after_the_start_deadline(tmp_path: Path) -> None:
    federation = Federation(tmp_path, epochs=20, membership={"start_deadline": 2 * HARD})
    federation.network.at(0.0, lambda: federation.network.kill("m3"))
    federation.network.at(HARD, lambda: federation.network.kill("m2"))
    federation.network.at(2 * HARD + 0.1, lambda: federation.network.restart("m2"))
    federation.network.run()
    models = federation.models(["m0", "m1", "m2"])
    assert all(torch.allclose(model, models[0], atol=1e-4) for model in models)
    charged = [r for r, _ in LedgerFile.read(tmp_path / "m2" / "ledger.jsonl").history]
    assert charged, "those who come after the beginning wait no longer than the hard deadline"


def test_a_killed_member_goes_on_from_its_folder(tmp_path: Path) -> None:
    federation = Federation(tmp_path, epochs=5)
    network = federation.network
    network.at(0.5, lambda: network.kill("m1"))
    network.at(0.8, lambda: network.restart("m1"))
    network.run()
    models = federation.models()
    assert all(torch.allclose(model, models[0], atol=1e-4) for model in models)
    charged = [r for r, _ in LedgerFile.read(tmp_path / "m1" / "ledger.jsonl").history]
    assert charged == sorted(set(charged))
    assert len(charged) < 20
    assert federation.runs["m1"].summary.rounds <= len(charged)


def test_a_member_that_is_gone_for_good_stops_nobody(tmp_path: Path) -> None:
    federation = Federation(tmp_path, epochs=5)
    federation.network.at(0.5, lambda: federation.network.kill("m2"))
    federation.network.run()
    models = federation.models(["m0", "m1", "m3"])
    assert all(torch.allclose(model, models[0], atol=1e-4) for model in models)


def test_leaving_hands_over(tmp_path: Path) -> None:
    federation = Federation(tmp_path, epochs=5)

    def leave() -> None:
        where = federation.runs["m3"].deployment
        where.leave()

    federation.network.at(0.1, leave)
    federation.network.run()
    models = federation.models(["m0", "m1", "m2"])
    assert all(torch.allclose(model, models[0], atol=1e-4) for model in models)
    members = [federation.runs[name].deployment for name in ("m0", "m1", "m2")]
    masses = [where.fabric.take(LEARNING)[1] for where in members if isinstance(where, Member)]
    assert sum(masses) == pytest.approx(4, abs=1e-9)
    with pytest.raises(UsageError, match="left"):
        Network({"m3": federation._main(3)}).run()


def test_an_older_copy_of_the_folder_is_refused(tmp_path: Path) -> None:
    federation = Federation(tmp_path, epochs=5)
    network = federation.network
    network.at(0.3, lambda: network.kill("m1"))
    network.at(0.31, lambda: shutil.copytree(tmp_path / "m1", tmp_path / "copy"))
    network.at(0.35, lambda: network.restart("m1"))
    network.at(0.8, lambda: network.kill("m1"))
    network.at(0.81, lambda: shutil.rmtree(tmp_path / "m1"))
    network.at(0.82, lambda: (tmp_path / "copy").rename(tmp_path / "m1"))
    network.at(0.9, lambda: network.restart("m1"))
    with pytest.raises(RunError, match=r"m0 .*round \d+.*round \d+: ledger and outbox"):
        network.run()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"privacy": dpps.NodeSwap(epsilon=3)}, "node-swap"),
        ({"sync_every": 2}, "sync_every=0"),
        ({"declared_sizes": None}, "declared_sizes"),
        ({"overwrite": True}, "overwrite"),
        ({"folder": None}, "folder"),
    ],
)
def test_what_a_federation_cannot_do_is_refused(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    def main(post: SimulatedPost) -> None:
        make_run(post, 0, **({"folder": tmp_path / "x"} | more)).fit(1)

    with pytest.raises(UsageError, match=words):
        Network({"m0": main}).run()
    assert not (tmp_path / "x" / "ledger.jsonl").exists()


def test_members_of_different_sizes_pay_for_the_largest_sampling_rate(tmp_path: Path) -> None:
    federation = Federation(tmp_path, epochs=2, declared_sizes=[EXAMPLES, 2 * EXAMPLES, EXAMPLES, EXAMPLES])
    federation.network.run()
    assert len({federation.runs[name].privacy.epsilon for name in NAMES}) == 1
    assert federation.runs["m1"].plan.sampling == (0.25, 0.125, 0.25, 0.25)


def test_an_older_copy_waits_for_those_who_can_know(tmp_path: Path) -> None:
    """m0 answers and never got a row of m1; m2 and m3 did, and come back later: nothing is released before."""
    federation = Federation(tmp_path, epochs=40)
    network, copy = federation.network, tmp_path / "copy"

    def put_back() -> None:
        shutil.rmtree(tmp_path / "m1")
        shutil.copytree(copy, tmp_path / "m1")
        for other in ("m2", "m3"):
            network.cut("m1", other)

    def mend() -> None:
        for other in ("m2", "m3"):
            network.mend("m1", other)

    network.at(0.3, lambda: network.kill("m1"))
    network.at(0.31, lambda: shutil.copytree(tmp_path / "m1", copy))
    network.at(0.35, lambda: network.restart("m1"))
    network.at(0.8, lambda: network.kill("m1"))
    network.at(0.81, put_back)
    network.at(0.9, lambda: network.restart("m1"))
    network.at(0.9 + 4 * SOFT, mend)
    with pytest.raises(RunError, match=r"m2 .*round \d+.*round \d+: ledger and outbox"):
        network.run()
    before, after = (LedgerFile.read(each / "ledger.jsonl").history for each in (copy, tmp_path / "m1"))
    assert len(after) == len(before)


def test_who_waits_in_vain_is_told(tmp_path: Path) -> None:
    lines: list[str] = []

    def main(post: SimulatedPost) -> None:
        where = make_run(post, 0, tmp_path / "m0", membership={"min_members": 2}).deployment
        for left in (0, 1, 3):
            for node in range(1, left + 1):
                where.fabric.view.known[node] = Presence(1, 0, LEFT)
            lines.append(where._why_waiting(["m0"], 2))

    Network({"m0": main}).run()
    assert lines[0] == lines[1]
    assert all(shown in lines[0] for shown in ("1 of 4", "(m0)", " 2 "))
    assert lines[2].startswith(lines[0])
    assert "m1, m2, m3" in lines[2].removeprefix(lines[0])


def test_a_failed_run_shows_no_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hearts: list[Member] = []

    def main(post: SimulatedPost) -> None:
        run = make_run(post, 0, tmp_path / "m0")
        monkeypatch.setattr(Peers, "look", lambda fabric: None)
        run.deployment._shows_life = True
        run.start(1)
        assert run.deployment._heart.is_alive()
        run.close()
        assert not run.deployment._heart.is_alive()
        hearts.append(run.deployment)

    Network({"m0": main}).run()
    assert hearts


def test_a_torn_log_does_not_stop_later_starts(tmp_path: Path) -> None:
    federation = Federation(tmp_path, epochs=5)
    network, log = federation.network, tmp_path / "m1" / "outbox" / "rounds.jsonl"

    def tear() -> None:
        network.kill("m1")
        log.write_bytes(log.read_bytes()[:-7])

    for when in (0.3, 0.5):
        network.at(when, tear)
        network.at(when + 0.05, lambda: network.restart("m1"))
    network.run()
    rounds = [each.round for each in federation.runs["m1"].log]
    assert rounds == sorted(set(rounds))
    assert len(rounds) > 4


def test_gossip_is_clipped_around_the_row_that_was_taken_up(tmp_path: Path) -> None:
    federation = Federation(tmp_path, epochs=5)
    network, found = federation.network, []
    follow = Peers.follow

    def followed(fabric: Peers, y: torch.Tensor) -> None:
        follow(fabric, y)
        found.append((fabric.start_number, fabric._rows._own.clone()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Peers, "follow", followed)
        network.at(0.5, lambda: network.kill("m1"))
        network.at(0.55, lambda: network.restart("m1"))
        network.run()
    start, (_, again) = found[0][1], next(each for each in found if each[0] == 2)
    assert all(torch.equal(own, start) for number, own in found if number == 1)
    assert float((again - start).norm()) > 0.1


def test_a_member_that_was_killed_while_it_left_hands_over_at_its_next_start(tmp_path: Path) -> None:
    federation = Federation(tmp_path, epochs=10)
    network, left = federation.network, Peers._give

    def give(fabric: Peers, *given: Any) -> None:
        left(fabric, *given)
        if fabric.state == LEFT and fabric.start_number == 1:
            network.kill("m3")

    def leave() -> None:
        where = federation.runs["m3"].deployment
        network.isolate("m3", notice=10.0)  # it believes that it is connected, and nothing arrives
        where.leave()

    def start() -> None:
        network.rejoin("m3")
        network.restart("m3")

    network.at(0.2, leave)
    network.at(1.3, start)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Peers, "_give", give)
        network.run()
    members = [federation.runs[name].deployment for name in NAMES]
    masses = [where.fabric.take(LEARNING)[1] for where in members[:3] if isinstance(where, Member)]
    assert sum(masses) == pytest.approx(4, abs=1e-9)
    with pytest.raises(UsageError, match="left"):
        Network({"m3": federation._main(3)}).run()


def test_a_member_that_was_killed_before_its_results_writes_them_at_its_next_start(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    federation.network.run()
    folder, model = tmp_path / "m1", federation.runs["m1"].shared
    (folder / "summary.json").unlink()
    shutil.rmtree(folder / "models")
    sent: list[str] = []
    Network({"m1": federation._main(1)}, tap=lambda sender, to, data: sent.append(to)).run()
    assert sent == []
    assert torch.equal(federation.runs["m1"].shared, model)
    assert (folder / "summary.json").exists()
    assert (folder / "models" / "node-1.safetensors").exists()
    Network({"m1": federation._main(1)}).run()  # it stays for those who come late, and that is all
    assert torch.equal(federation.runs["m1"].shared, model)


def fabrics(federation: Federation) -> list[Peers]:
    wheres = [federation.runs[name].deployment for name in NAMES]
    return [where.fabric for where in wheres if isinstance(where, Member)]


def test_shares_have_the_topologys_weight_where_its_clock_restarts(tmp_path: Path) -> None:
    """Three rounds an epoch and a topology of period two: what a round's weights are does not follow from its number alone."""
    federation = Federation(tmp_path, epochs=3, learning={"lr_step": 1, "batch_size": 13})
    federation.network.run()
    assert all(run.rounds_per_epoch == 3 for run in federation.runs.values())
    for fabric in fabrics(federation):
        assert fabric.refused == {}
        assert [fabric._terms.clock(round_) for round_ in range(9)] == [0, 1, 2] * 3
    models = federation.models()
    assert all(torch.allclose(model, models[0], atol=1e-4) for model in models)


@pytest.mark.parametrize("optimizer", [None, dpps.Momentum(0.5), dpps.Adam(0.01)])
def test_the_bound_on_rows_follows_from_the_plan(optimizer: Any, tmp_path: Path) -> None:
    """Clip 1 of batches of 10 with rate 0.5, at most a step of 0.5 and noise of 0.05 a round."""
    learning = {} if optimizer is None else {"optimizer": optimizer}
    found: list[float] = []

    def main(post: SimulatedPost) -> None:
        run = make_run(post, 0, tmp_path / "m0", learning=learning)
        run.start(3)
        step, deviation = run.protocol.growth(run.state.shared, 1.0)
        reach = 12 * step + 12**0.5 * deviation * (run.state.shared.s.shape[1] ** 0.5 + 41)
        found.extend((run.deployment.fabric._rows.longest(1.0), float(run.state.shared.s.norm()), reach))
        run.close()

    Network({"m0": main}).run()
    longest, start, reach = found
    if isinstance(optimizer, dpps.Adam):
        assert longest == float("inf")
    else:
        assert longest == pytest.approx(2 * (start + reach * (1 if optimizer is None else 2)))
        assert reach < 100


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
