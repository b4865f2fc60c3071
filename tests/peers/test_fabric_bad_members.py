"""Members that send nonsense: they are named and refused, or pull no farther than the contract allows."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dpps.peers import Peers
from dpps.topology import Exponential
from tests.support.bare import WIDTH, Bare, membership_of
from tests.support.simulated import Network, SimulatedPost

N, BAD = 6, 2
NAMES = tuple(f"m{k}" for k in range(N))
Change = Callable[[torch.Tensor], torch.Tensor]


class Attacker(Bare):
    """Keeps an honest row for itself, and sends something else."""

    change: Change

    def __call__(self, post: SimulatedPost) -> None:
        honest = Peers._give

        def give(fabric: Peers, phase, round_, row, a, parts, rest) -> None:  # type: ignore[no-untyped-def]
            if fabric.membership.own != BAD:
                honest(fabric, phase, round_, row, a, parts, rest)
                return
            sent = self.change(row)
            honest(fabric, phase, round_, sent, a, parts, rest)
            if rest:
                fabric.hold(phase, rest * (row - sent).nan_to_num(0.0, 0.0, 0.0), 0.0)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Peers, "_give", give)
            super().__call__(post)


def _run(folder: Path, change: Change, gossip_clip: float = 0.0, rounds: int = 30) -> list[Bare]:
    topology, members = Exponential(N), []
    for k, name in enumerate(NAMES):
        (folder / name).mkdir()
        membership = membership_of(NAMES, k, topology, gossip_clip=gossip_clip)
        kind = Attacker if k == BAD else Bare
        members.append(kind(membership, topology, folder / name, rounds))
    attacker = members[BAD]
    assert isinstance(attacker, Attacker)
    attacker.change = change
    Network({member.membership.name: member for member in members}).run(until=60.0)
    return members


def _honest_error(members: list[Bare]) -> float:
    """How far honest members are from where they would meet without the attacker, on average."""
    honest = [m for k, m in enumerate(members) if k != BAD]
    goal = torch.arange(WIDTH) + sum(m.membership.own for m in honest) / len(honest)
    found = torch.stack([m.result for m in honest if m.result is not None])
    assert len(found) == len(honest)
    return float((found - goal).norm(dim=1).mean())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e9])
def test_rows_that_cannot_be_are_refused_and_the_member_is_named(value: float, tmp_path: Path) -> None:
    members = _run(tmp_path, lambda row: row + value, rounds=8)
    for k, member in enumerate(members):
        assert member.fabric is not None
        assert set(member.fabric.refused) <= {BAD}
        if k in (3, 4):
            assert "of round" in member.fabric.refused[BAD]
    assert _honest_error(members) < 3.0  # they are on their way, from 4.9


def test_clipped_gossip_limits_what_one_member_does(tmp_path: Path) -> None:
    for name in ("open", "clipped"):
        (tmp_path / name).mkdir()
    without = _honest_error(_run(tmp_path / "open", lambda row: -10 * row))
    with_clip = _honest_error(_run(tmp_path / "clipped", lambda row: -10 * row, gossip_clip=1.0))
    assert with_clip < 0.7 * without, (with_clip, without)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the disk, nor for an agreement that an attacker never grants."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.setattr("dpps.peers.gossip.LONGEST", 0)
