"""Lies about the end: who says that it has finished, and what it hands over as the final average to a member that comes back late."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dpps.peers import AVERAGING, DONE, FINAL, LEARNING, Frame, Peers, Share
from dpps.peers.links import HERE, NEAR, STARTS
from dpps.peers.messages import Claim, Presence
from dpps.topology import Complete, Topology
from tests.support.bare import HARD, WIDTH, Bare, membership_of, one_other, sign_as, terms_of
from tests.support.simulated import Network, SimulatedPost

pytestmark = pytest.mark.usefixtures("no_fsync")

LIAR, LATE = 2, 1
UNTIL = 60.0


class FalseHeir(Peers):
    """Takes part as everybody does, and hands over something else in the end."""

    poison: Tensor

    def _hand_on_average(self, mean: Tensor) -> None:
        super()._hand_on_average(self.poison)


class Poisoner(Bare):
    poison = torch.full((WIDTH,), 20.0, dtype=torch.float64)

    def make(self, post: SimulatedPost) -> Peers:
        fabric = FalseHeir(self.membership, post, post.clock)
        fabric.poison = self.poison
        return fabric


def members(
    folder: Path, topology: Topology, rounds: int, liar: type[Bare] = Poisoner, **more: Any
) -> list[Bare]:
    return one_other(folder, topology, rounds, LIAR, liar, **more)


def finished_early(topology: Topology, rounds: int) -> Callable[[SimulatedPost], None]:
    """A member that says from the start that it has finished, and hands its own row to everybody."""
    names = tuple(f"m{k}" for k in range(topology.nodes))

    def main(post: SimulatedPost) -> None:
        fabric = Peers(membership_of(names, LIAR, topology), post, post.clock)
        fabric.start(torch.zeros(1, WIDTH, dtype=torch.float64), common=True)
        fabric.agree(terms_of(topology, rounds))
        fabric.state, fabric.pushed = DONE, rounds
        while True:
            fabric._hand_on_average(torch.full((WIDTH,), 20.0, dtype=torch.float64))
            fabric.wait(0.05)

    return main


def test_one_members_word_ends_no_run(tmp_path: Path) -> None:
    """A member that can reach nobody but the liar waits for the others, sends nothing, and goes on with them."""
    rounds, topology = 60, Complete(4)
    found = members(tmp_path, topology, rounds, liar=Bare)
    victim, seen = found[LATE], list[tuple[int, int]]()
    mains: dict[str, Any] = {member.membership.name: member for member in found}
    network = Network(mains | {f"m{LIAR}": finished_early(topology, rounds)})
    for other in ("m0", "m3"):
        network.at(0.5, lambda other=other: network.cut("m1", other))
        network.at(0.5 + 3 * HARD, lambda other=other: network.mend("m1", other))

    def look() -> None:
        assert victim.fabric._finals.keys() == {LIAR}
        seen.append((victim.fabric.pushed, victim.skipped))

    network.at(1.5, look)
    network.at(0.4 + 3 * HARD, look)
    network.run(until=UNTIL)
    assert seen[0] == seen[1]
    assert seen[0][0] < rounds / 2
    assert seen[0][1] == 0
    for other in (found[0], found[3]):
        torch.testing.assert_close(victim.result, other.result, rtol=0, atol=1e-4)
    assert not victim.fabric.late


def late(
    found: list[Bare], again: tuple[int, ...] = (), after: float = 0.2, who: tuple[int, ...] = (LATE,)
) -> None:
    """Some are killed in the middle, and come back when all others have finished: while these stay, or with those who join once more."""
    network = Network({member.membership.name: member for member in found})
    for k in who:
        network.at(0.4, lambda k=k: network.kill(f"m{k}"))

    def look() -> None:
        if any(member.result is None for k, member in enumerate(found) if k not in who):
            if network.now < UNTIL:
                network.at(network.now + 0.1, look)
            return
        for k in (*who, *again):
            network.at(network.now + after, lambda k=k: network.restart(f"m{k}"))

    network.at(1.0, look)
    network.run(until=UNTIL)


@pytest.mark.parametrize("poison", [20.0, -300.0, 1e30, float("nan")])
def test_a_liar_among_those_who_hand_over_moves_nothing(poison: float, tmp_path: Path) -> None:
    """What a latecomer gets lies between what the honest ones have."""
    found = members(tmp_path, Complete(5), 12)
    found[LIAR].poison = torch.full((WIDTH,), poison, dtype=torch.float64)  # type: ignore[attr-defined]
    late(found)
    victim = found[LATE]
    honest = torch.stack([m.result for k, m in enumerate(found) if k not in (LIAR, LATE)])  # type: ignore[misc]
    assert victim.fabric.late
    assert (victim.result >= honest.min(0).values - 1e-9).all()
    assert (victim.result <= honest.max(0).values + 1e-9).all()
    assert set(victim.fabric.refused) == ({LIAR} if math.isnan(poison) or abs(poison) > 20 else set())


@pytest.mark.parametrize("clip", [0.0, 0.25])
def test_a_liar_that_is_the_only_one_there_is_bounded(clip: float, tmp_path: Path) -> None:
    """That others have finished is true, and the liar can show it; what they have agreed on it makes up, within the bound of every row."""
    found = members(tmp_path, Complete(5), 12, gossip_clip=clip)
    late(found, (LIAR,), after=3 * HARD)
    victim = found[LATE]
    assert victim.fabric.late
    assert float(victim.result.norm()) <= victim.fabric._rows.longest(1.0)
    if clip:
        assert float((victim.result - victim.fabric._rows._own).norm()) <= clip + 1e-9


def test_an_honest_one_that_joins_once_more_shows_that_others_have_finished_too(tmp_path: Path) -> None:
    """What they have signed is on its disk: for a latecomer its own word alone would not be enough."""
    found = members(tmp_path, Complete(4), 12, liar=Bare)
    late(found, (3,), after=3 * HARD)
    assert found[LATE].fabric.late
    torch.testing.assert_close(found[LATE].result, found[3].result)


def test_two_that_come_back_late_both_get_the_final_average(tmp_path: Path) -> None:
    """They are there for each other, and have nothing to average."""
    found = members(tmp_path, Complete(5), 30, liar=Bare)
    late(found, who=(1, 4))
    for k in (1, 4):
        fabric = found[k].fabric
        assert fabric.late
        torch.testing.assert_close(found[k].result, found[0].result, rtol=0, atol=1e-4)


# What a single frame may say

NAMES = ("m0", "m1", "m2")
ROUNDS = 4
ROW = torch.ones(WIDTH, dtype=torch.float64)


def told(claim: Claim, state: int = DONE, beats: int = 1, row: Tensor = ROW) -> Frame:
    """A frame of m2 to m0 with a share, signed as it is told."""
    data = row.numpy().tobytes()
    claim = replace(claim, digest=hashlib.sha256(data).hexdigest())
    claim = replace(claim, signature=sign_as("m2")(claim.message("run", "m2", "m0")))
    presence = Presence(STARTS + beats, ROUNDS, state)
    presence = replace(presence, signature=sign_as("m2")(presence.message("run", "m2")))
    nobody = Presence(0, -1, HERE)
    return Frame("run", 1, False, 1, 0, 0, (nobody, nobody, presence), Share(claim, data))


def _absent(post: SimulatedPost) -> None:
    """It is not started."""


def hearing(*frames: Frame) -> Peers:
    """m0, when m2 has told it this."""
    found: list[Peers] = []

    def main(post: SimulatedPost) -> None:
        fabric = Peers(membership_of(NAMES, 0), post, post.clock)
        fabric.start(torch.zeros(1, WIDTH, dtype=torch.float64), common=True)
        fabric.agree(terms_of(Complete(3), ROUNDS))
        for frame in frames:
            fabric._handle("m2", frame.encode())
        found.append(fabric)

    Network({"m0": main, "m1": _absent, "m2": _absent}).run()
    return found[0]


RIGHT = Claim(FINAL, ROUNDS, "", 1, 1.0, 1.0)
LEARNT = Claim(LEARNING, 0, "", 1, 1 / 3, 1.0)


def test_a_final_average_is_kept_apart_while_a_member_still_learns() -> None:
    """Nothing of it goes into what is held, whatever its sender says."""
    fabric = hearing(told(RIGHT))
    assert fabric.refused == {}
    assert fabric._finals.keys() == {2}
    assert [a for _, a in fabric._home.values()] == [0.0, 0.0]
    assert not fabric.over()
    assert fabric._final() == {}


@pytest.mark.parametrize(
    "frames",
    [
        [told(replace(RIGHT, weight=0.5))],
        [told(replace(RIGHT, a=3.0))],
        [told(replace(RIGHT, a=0.0))],
        [told(replace(RIGHT, round=1 << 60))],
        [told(RIGHT, row=1e9 * ROW)],
        [told(RIGHT, row=float("nan") * ROW)],
        [told(RIGHT), told(replace(RIGHT, number=2), beats=2)],
        [told(RIGHT), told(replace(RIGHT, number=2, round=ROUNDS + 1), beats=2, row=2 * ROW)],
        [told(RIGHT), told(replace(LEARNT, number=2, round=1), beats=2)],
        [told(RIGHT), told(replace(LEARNT, number=2, phase=AVERAGING, round=ROUNDS + 1), beats=2)],
    ],
)
def test_lies_in_a_final_average_get_their_sender_refused_with_its_signature(frames: list[Frame]) -> None:
    fabric = hearing(*frames)
    assert set(fabric.refused) == set(fabric.evidence) == {2}
    assert fabric._final() == {}


@pytest.mark.parametrize("state", [HERE, NEAR])
def test_who_has_not_finished_hands_nothing_over(state: int) -> None:
    fabric = hearing(told(RIGHT, state=state))
    assert set(fabric.refused) == {2}
    assert not fabric._finals


def test_a_final_average_that_its_sender_has_not_signed_is_refused() -> None:
    frame = told(RIGHT)
    forged = replace(frame.share, claim=replace(frame.share.claim, signature=b"mine"))
    assert set(hearing(replace(frame, share=forged)).refused) == {2}


def test_the_final_averages_of_others_outlive_a_restart() -> None:
    fabric = hearing(told(RIGHT))
    again = hearing()
    again.load(fabric.tensors(), fabric.meta())
    assert torch.equal(again._finals[2], ROW)
    assert again.view.known[2].state == DONE
    assert not again.view.is_here(2, 0.0)
