"""One member that lies about one thing: what the others believe, whom they refuse, and how long they wait for it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dpps.peers import AVERAGING, LEARNING, Peers
from dpps.peers.gossip import JUMP
from dpps.peers.links import HERE, LEFT
from dpps.peers.messages import Presence
from dpps.topology import Complete, Exponential, Ring, Topology
from tests.support.bare import HARD, SOFT, WIDTH, Bare, membership_of, one_other
from tests.support.simulated import Network, SimulatedPost

pytestmark = pytest.mark.usefixtures("no_fsync")

LIAR = 2
LONG = 1 << 60


class LyingPeers(Peers):
    """Gives something else than it has."""

    lie: Callable[..., tuple[int, Tensor, float, Mapping[int, float]]]

    def _give(
        self, phase: int, round_: int, row: Tensor, a: float, parts: Mapping[int, float], rest: float
    ) -> None:
        said, sent, mass, weights = self.lie(phase, round_, row, a, parts)
        super()._give(phase, said, sent, mass, weights, 0.0)
        if rest:
            self.hold(phase, rest * row, rest * a)  # for itself it keeps what is right
        self.pushed = round_


class Liar(Bare):
    """A member whose shares are not what they should be."""

    lie: Callable[..., tuple[int, Tensor, float, Mapping[int, float]]]

    def make(self, post: SimulatedPost) -> Peers:
        fabric = LyingPeers(self.membership, post, post.clock)
        fabric.lie = self.lie
        return fabric


class Beating(Bare):
    """A member that hangs after its first round: its heart goes on."""

    hangs: float = 0.0

    def _live(self, post: SimulatedPost, protocol: Any, state: Any, fabric: Peers) -> None:
        self._assemble()
        protocol.step(state, torch.zeros(1, WIDTH))
        while post.clock() < self.hangs:
            fabric.wait(0.1)
        state.a = torch.zeros(1)


def members(
    folder: Path, topology: Topology, rounds: int, liar: type[Bare] = Liar, **more: Any
) -> list[Bare]:
    return one_other(folder, topology, rounds, LIAR, liar, **more)


def run(found: list[Bare], until: float = 120.0) -> float:
    network = Network({member.membership.name: member for member in found})
    network.run(until=until)
    return network.now


def honest(found: list[Bare]) -> list[Bare]:
    return [member for k, member in enumerate(found) if k != LIAR]


def refusals(found: list[Bare]) -> set[int]:
    return {node for member in honest(found) if member.fabric is not None for node in member.fabric.refused}


@pytest.mark.parametrize("phase", [LEARNING, AVERAGING])
def test_a_round_that_no_plan_has_makes_no_row_longer(phase: int, tmp_path: Path) -> None:
    """The sender's own word never says how long its row may be, and nobody is refused for having believed it."""

    def lie(at: int, round_: int, row: Tensor, a: float, parts: Mapping[int, float]) -> Any:
        if at != phase:
            return round_, row, a, parts
        return LONG + round_, row + 1e11, a, parts

    found = members(tmp_path, Ring(6), 10)
    found[LIAR].lie = lie  # type: ignore[attr-defined]
    run(found)
    assert refusals(found) == {LIAR}
    for member in honest(found):
        assert float(member.result.norm()) < 1e3


@pytest.mark.parametrize("weight", [None, 1.0])
def test_mass_that_is_made_up_frames_nobody(weight: float | None, tmp_path: Path) -> None:
    """A share must have the topology's weight; and whoever got too much mass is not the one to blame."""
    n = 6

    def lie(at: int, round_: int, row: Tensor, a: float, parts: Mapping[int, float]) -> Any:
        return round_, row * (n / a), float(n), parts if weight is None else dict.fromkeys(parts, weight)

    found = members(tmp_path, Ring(n), 20)
    found[LIAR].lie = lie  # type: ignore[attr-defined]
    run(found)
    assert refusals(found) == (set() if weight is None else {LIAR})
    assert all(member.result is not None for member in honest(found))
    for member in honest(found):
        assert member.fabric._home[LEARNING][1] <= n


def test_rows_are_bounded_before_ones_own_first_round(tmp_path: Path) -> None:
    """While a member still waits for others, what arrives counts already."""
    found = members(tmp_path, Complete(4), 5, min_members=3)
    victim, seen = found[0], []

    def lie(at: int, round_: int, row: Tensor, a: float, parts: Mapping[int, float]) -> Any:
        return round_, torch.full_like(row, 1e30), a, parts

    found[LIAR].lie = lie  # type: ignore[attr-defined]
    found[LIAR].membership = membership_of(found[0].membership.names, LIAR, Complete(4), min_members=2)
    network = Network({member.membership.name: member for member in found[:1] + found[LIAR : LIAR + 1]})

    def look() -> None:
        seen.append((victim.fabric.pushed, float(victim.fabric._home[LEARNING][0].norm())))
        seen.append((set(victim.fabric.refused), 0.0))

    network.at(3.0, look)
    network.run(until=4.0)
    assert seen[0][0] == -1
    assert seen[0][1] < 1e3
    assert seen[1][0] == {LIAR}


def test_a_presence_that_its_owner_has_not_signed_moves_nobody(tmp_path: Path) -> None:
    """And nothing of it is left when the liar is expelled."""
    found = members(tmp_path, Complete(4), 10, liar=Bare)
    victim = found[0]
    states: list[list[int]] = []

    class Poisoned(Peers):
        def _send(self, node: int, sent: Any = None) -> None:
            self.view.known[1] = Presence(LONG, 3, LEFT)
            super()._send(node, sent)

    found[LIAR].kind = Poisoned
    network = Network({member.membership.name: member for member in found})
    network.at(0.0, lambda: network.cut("m0", "m1"))

    def look() -> None:
        states.append([each.state for each in victim.fabric.view.known])
        expelled = victim.membership.active - {"m2"}
        for member in honest(found):
            member.fabric.adopt(
                membership_of(member.membership.names, member.membership.own, Complete(4), active=expelled)
            )

    network.at(0.5, look)
    network.run(until=120.0)
    assert states[0][1] == HERE
    assert victim.fabric.view.known[1].state != LEFT
    assert all(member.result is not None for member in honest(found))


def test_a_hung_member_that_still_beats_is_waited_for_once(tmp_path: Path) -> None:
    """It is forgiven when its rounds go on, not when its heart beats."""
    rounds = 60
    found = members(tmp_path, Complete(4), rounds, liar=Beating, hard_deadline=6.0)
    found[LIAR].hangs = 300.0  # type: ignore[attr-defined]
    ends: list[float] = []
    network = Network({member.membership.name: member for member in found})

    def look() -> None:
        if all(m.fabric is not None and m.fabric.pushed >= rounds - 1 for m in honest(found)):
            ends.append(network.now)

    for k in range(1, 130):
        network.at(k * 0.1, look)
    network.run(until=13.0)
    assert ends[0] < rounds * 0.05 + rounds * 0.1 + 4 * SOFT, (
        "a soft deadline for every round would be 18 seconds"
    )


def test_one_members_word_takes_nobody_to_the_end(tmp_path: Path) -> None:
    """Also where it is the only one in touch: a member goes on with few rounds at a time."""
    rounds = 400
    found = members(tmp_path, Ring(4), rounds, liar=Bare)
    victim = found[1]

    class Ahead(Peers):
        def _send(self, node: int, sent: Any = None) -> None:
            before, self.pushed = self.pushed, rounds - 1
            try:
                super()._send(node, sent)
            finally:
                self.pushed = before

    found[LIAR].kind = Ahead
    network = Network({member.membership.name: member for member in found})
    network.at(0.0, lambda: network.cut("m1", "m0"))
    network.run(until=4.0)
    assert victim.skipped <= 2 * JUMP
    for member in honest(found):
        assert member.fabric.pushed < rounds / 4, "as far as the fastest honest member is, and no farther"


@pytest.mark.parametrize("late", [False, True])
def test_one_member_does_not_hold_the_average_open(late: bool, tmp_path: Path) -> None:
    """Neither by never agreeing nor by being late in every round."""
    found = members(tmp_path, Complete(5), 3, liar=Bare, soft_deadline=3.0, hard_deadline=30.0)

    class Open(Peers):
        def _agrees(self, position: int) -> bool:
            return False

        def _collect(self, seconds: float | None = None) -> frozenset[int]:
            if late and self.pushed >= 3:
                until = self.clock() + 0.9 * self.rules.soft_deadline
                while self.clock() < until:
                    self.wait(until - self.clock())
            return super()._collect(seconds)

    found[LIAR].kind = Open
    ends: dict[str, float] = {}

    def ending(member: Bare) -> Callable[[SimulatedPost], None]:
        def main(post: SimulatedPost) -> None:
            member(post)
            ends[member.membership.name] = post.clock()

        return main

    Network({member.membership.name: ending(member) for member in found}).run(until=3000.0)
    assert max(ends[member.membership.name] for member in honest(found)) < 4 * 30.0
    assert HARD < 30.0


def test_a_refusal_for_something_that_is_never_sent_again_outlives_a_restart_and_is_told(
    tmp_path: Path,
) -> None:
    """Nothing but the disk can tell the new process of it; the one that is refused hears why."""
    found = members(tmp_path, Complete(4), 40, liar=Bare)
    network = Network({member.membership.name: member for member in found})
    before: list[dict[int, str]] = []

    def garbage() -> None:
        found[LIAR].fabric.post.send("m0", b"garbage")

    def kill() -> None:
        before.append(dict(found[0].fabric.refused))
        network.kill("m0")

    network.at(0.5, garbage)
    network.at(1.5, kill)
    network.at(1.6, lambda: network.restart("m0"))
    network.run(until=60.0)
    assert set(before[0]) == {LIAR}
    assert found[0].fabric.start_number == 2
    assert found[0].fabric.refused == before[0]
    assert found[LIAR].fabric.refused_by == {0: before[0][LIAR]}


def _error(found: list[Bare]) -> float:
    """How far honest members are from where they would meet without the liar, on average."""
    others = honest(found)
    goal = torch.arange(WIDTH) + sum(m.membership.own for m in others) / len(others)
    ends = torch.stack([m.result for m in others if m.result is not None])
    assert len(ends) == len(others)
    return float((ends - goal).norm(dim=1).mean())


def _changed(folder: Path, change: Callable[[Tensor], Tensor], rounds: int, **more: Any) -> list[Bare]:
    found = members(folder, Exponential(6), rounds, **more)
    found[LIAR].lie = lambda at, round_, row, a, parts: (round_, change(row), a, parts)  # type: ignore[attr-defined]
    run(found, until=60.0)
    return found


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e9])
def test_rows_that_cannot_be_are_refused_and_the_member_is_named(
    value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpps.peers.gossip.LONGEST", 0)  # nobody waits for what a liar never grants
    found = _changed(tmp_path, lambda row: row + value, rounds=8)
    assert refusals(found) == {LIAR}
    for k in (3, 4):
        fabric = found[k].fabric
        assert "of round" in fabric.refused[LIAR]
    assert _error(found) < 3.0  # they are on their way, from 4.9


def test_clipped_gossip_limits_what_one_member_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpps.peers.gossip.LONGEST", 0)
    error = {}
    for clip in (0.0, 1.0):
        (tmp_path / str(clip)).mkdir()
        found = _changed(tmp_path / str(clip), lambda row: -10 * row, rounds=30, gossip_clip=clip)
        error[clip] = _error(found)
    assert error[1.0] < 0.7 * error[0.0], error
