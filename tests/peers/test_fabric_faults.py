"""Random failures: whatever happens to frames and processes, mass is neither lost nor made, the ledger says what was released, no round
is sent twice with different contents, and who is there at the end agrees."""

import os
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from dpps.privacy import LedgerFile
from dpps.topology import Complete, DOut, Exponential, Ring, Topology
from tests.support.bare import HARD, WIDTH, Bare, Tap, mass, membership_of
from tests.support.simulated import Network

FAST, ALL = range(6), range(6, 40)


class Schedule:
    """A network with failures drawn by a seed."""

    def __init__(self, seed: int, folder: Path, rounds: int) -> None:
        draw = self.draw = random.Random(seed)
        n = draw.randint(4, 7)
        self.names = tuple(f"m{k}" for k in range(n))
        kinds: list[Topology] = [Exponential(n), Ring(n), DOut(n, 2), Complete(n)]
        topology = draw.choice(kinds)
        self.members = []
        for k, name in enumerate(self.names):
            (folder / name).mkdir()
            membership = membership_of(self.names, k, topology, min_members=n // 2 + 1)
            pace = draw.choice([0.02, 0.05, 0.05, 0.1])
            self.members.append(Bare(membership, topology, folder / name, rounds, pace))
        self.tap, slowest = Tap(n), draw.choice([0.02, 0.05, 0.3])
        self.network = Network(
            {member.membership.name: member for member in self.members},
            seed,
            loss=draw.choice([0.0, 0.05, 0.2]),
            duplicate=draw.choice([0.0, 0.1]),
            delay=(0.01, slowest),
            tap=self.tap,
        )
        self.length = rounds * 0.1
        for member in self.members:
            member.quiet = 5 * self.length + HARD
        self.gone: set[str] = set()
        self.disturbed: set[str] = set()
        for _ in range(draw.randint(3, 8)):
            draw.choice([self._cut, self._isolate, self._restart, self._die_at_the_disk])()
        if draw.random() < 0.4:
            self._kill_for_good()
        elif draw.random() < 0.5:
            self._leave()

    def _when(self) -> tuple[float, float]:
        begin = self.draw.uniform(0.2, self.length)
        return begin, begin + self.draw.choice([0.1, 0.5, HARD + 1.0])

    def _cut(self) -> None:
        (one, other), (begin, end) = self.draw.sample(self.names, 2), self._when()
        notice = self.draw.choice([0.0, 1.0])
        self.network.at(begin, lambda: self.network.cut(one, other, notice))
        self.network.at(end, lambda: self.network.mend(one, other))

    def _isolate(self) -> None:
        name, (begin, end) = self.draw.choice(self.names), self._when()
        self.disturbed.add(name)
        self.network.at(begin, lambda: self.network.isolate(name, 0.5))
        self.network.at(end, lambda: self.network.rejoin(name))

    def _restart(self) -> None:
        name, (begin, end) = self.draw.choice(self.names), self._when()
        self.disturbed.add(name)
        self.network.at(begin, lambda: self.network.kill(name))
        self.network.at(end, lambda: self._start_again(name))

    def _die_at_the_disk(self) -> None:
        member = self.draw.choice(self.members)
        self.disturbed.add(member.membership.name)
        round_ = self.draw.randrange(member.rounds)
        member.die_at.add((round_, self.draw.choice(["before", "after"])))
        for k in range(1, 20):
            self.network.at(k * self.length / 4, lambda: self._start_again(member.membership.name))

    def _start_again(self, name: str) -> None:
        if name not in self.gone:
            self.network.restart(name)

    def _kill_for_good(self) -> None:
        name, (begin, _) = self.draw.choice(self.names), self._when()
        self.disturbed.add(name)
        self.gone.add(name)
        self.network.at(begin, lambda: self.network.kill(name))

    def _leave(self) -> None:
        member = self.draw.choice(self.members)
        self.disturbed.add(member.membership.name)
        member.leave_at = self.draw.randrange(2, member.rounds)
        self.gone.add(member.membership.name)


def _check(seed: int, folder: Path, rounds: int) -> None:
    schedule = Schedule(seed, folder, rounds)
    schedule.network.run(until=200.0)
    members = schedule.members
    assert mass(members, schedule.network) == pytest.approx(len(members), abs=1e-9)
    for member in members:
        charged = Counter(r for r, _ in LedgerFile.read(member.folder / "ledger.jsonl").history)
        assert set(charged.values()) <= {1}
        left = schedule.tap.released(member.membership.name) - {member.handed_over}
        assert left <= set(charged) <= set(member.kept)
        assert len(set(member.kept) - set(charged)) <= (member.membership.name in schedule.disturbed), (
            "a process that ends between the two files has not sent anything yet, and its next start completes the ledger"
        )
        for r in left & set(member.kept):
            assert schedule.tap.digests[member.membership.name, 0, r] == member.kept[r]
    ends = [m.result for m in members if m.result is not None]
    assert len(ends) >= len(members) - len(schedule.gone)
    middle = torch.stack(ends).mean(0)
    assert all(float((end - middle).norm()) <= 1e-5 * float(middle.norm()) for end in ends), ends
    assert middle.shape == (WIDTH,)


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes die here, machines do not."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.mark.parametrize("seed", FAST)
def test_random_failures(seed: int, tmp_path: Path) -> None:
    _check(seed, tmp_path, rounds=25)


@pytest.mark.slow
@pytest.mark.parametrize("seed", ALL)
def test_more_random_failures(seed: int, tmp_path: Path) -> None:
    _check(seed, tmp_path, rounds=100)
