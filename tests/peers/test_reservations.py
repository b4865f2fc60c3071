"""Reservations: what is said of a lost member is never below a round that it has released, whoever lies and whatever is lost."""

import random
from itertools import product

import pytest

from dpps.errors import RunError, UsageError
from dpps.peers.contract import quorum
from dpps.peers.links import AHEAD, Reservations

CASES = [(3, 0, 1), (4, 1, 1), (5, 1, 1), (6, 1, 2), (8, 2, 1), (8, 2, 2)]


def test_the_quorum_lets_members_go_on_without_the_lost_and_those_who_are_left_decide() -> None:
    for members, colluders, absentees in product(range(3, 12), range(5), range(1, 5)):
        if colluders + 2 * absentees > members - 1:
            with pytest.raises(UsageError):
                quorum(members, colluders, absentees)
            continue
        found = quorum(members, colluders, absentees)
        assert 1 <= found <= members - 1 - absentees
        assert members - found + colluders <= members - absentees
        # any quorum of the others of a lost member, and those who decide about it, have an honest member in common
        assert found + (members - found + colluders) - (members - 1) == colluders + 1


class Net:
    """Members whose signs of life travel, are lost and overtake each other; colluders say what they like."""

    def __init__(self, case: tuple[int, int, int], seed: int, *, sound: bool = True) -> None:
        self.n, self.c, self.a = case
        self.random = random.Random(seed)
        self.liars = set(range(1, 1 + self.c))
        self.each = [Reservations(self.n, k, self.c, self.a) for k in range(self.n)]
        self.released = [-1] * self.n
        self.expelled: dict[int, int] = {}
        self.adopted = [1] * self.n
        self.sound = sound
        """False: reservations are signed before they are on disk."""
        self.disk = [each.to_json() for each in self.each]
        self.in_flight: list[tuple[int, int, tuple[int, ...]]] = []

    def sign(self, k: int) -> None:
        each = self.each[k]
        if k in self.liars:
            many = tuple(self.random.choice((-1, 10**6)) for _ in range(self.n))
            self.in_flight.append((k, self.random.randint(1, 9), many))
        else:
            kept = each.kept if self.sound else tuple(each.known)
            revision = each.kept_revision if self.sound else each.revision
            self.in_flight.append((k, revision, kept))

    def deliver(self) -> None:
        if not self.in_flight:
            return
        k = self.random.choice(self.in_flight)[0]
        to = self.random.randrange(self.n)
        # an honest member's newest sign of life is the one that counts: signs are numbered
        newest = [each for each in self.in_flight if each[0] == k][-1]
        if to != k and to not in self.liars:
            self.each[to].hear(*newest)

    def write(self, k: int) -> None:
        self.disk[k] = self.each[k].to_json()
        self.each[k].note()

    def crash(self, k: int) -> None:
        again = Reservations(self.n, k, self.c, self.a)
        again.adopt(self.adopted[k], {g for g, r in self.expelled.items() if r <= self.adopted[k]})
        again.load(self.disk[k])
        self.each[k] = again

    def adopt(self, k: int) -> None:
        newest = 1 + len(self.expelled)
        self.adopted[k] = self.random.randint(self.adopted[k], newest)
        self.each[k].adopt(self.adopted[k], {g for g, r in self.expelled.items() if r <= self.adopted[k]})

    def release(self, k: int) -> None:
        each = self.each[k]
        wanted = self.released[k] + self.random.choice((1, 1, 1, 7))
        if each.allowed >= wanted:
            self.released[k] = wanted
        each.reserve(wanted + AHEAD)

    def step(self) -> None:
        k = self.random.randrange(self.n)
        honest = k not in self.liars
        what = self.random.random()
        if what < 0.35:
            for _ in range(3):
                self.deliver()
        elif what < 0.55:
            self.sign(k)
        elif what < 0.7 and honest:
            self.write(k)
        elif what < 0.85 and honest:  # an expelled member may not know it, and goes on
            self.release(k)
        elif what < 0.93 and honest:
            self.adopt(k)
        elif what < 0.98 and honest:
            self.crash(k)
        elif len(self.expelled) < self.a and self.random.random() < 0.3:
            lost = self.random.choice([m for m in range(self.n) if m not in self.liars])
            if lost not in self.expelled and self.released[lost] >= 3:
                self.expelled[lost] = 2 + len(self.expelled)

    def decided(self) -> list[tuple[int, int]]:
        """(lost member, round after which nothing was released) as any honest member that is left says."""
        return [
            (lost, last)
            for lost, removed_in in self.expelled.items()
            for k, each in enumerate(self.each)
            if k not in self.liars and k not in self.expelled
            if self.adopted[k] >= removed_in and (last := each.last(lost, removed_in)) is not None
        ]


@pytest.mark.parametrize("case", CASES)
def test_a_lost_member_has_released_nothing_after_the_round_that_is_said(case: tuple[int, int, int]) -> None:
    decisions = 0
    for seed in range(5):
        net = Net(case, seed)
        said: dict[int, int] = {}
        for _ in range(4000):
            net.step()
            for lost, last in net.decided():
                said[lost] = min(last, said.get(lost, last))
                decisions += 1
            for lost, last in said.items():
                assert net.released[lost] <= last
        assert max(net.released) > 5
    assert decisions


def test_signing_before_the_disk_has_it_is_caught() -> None:
    """The twin: what is forgotten in a crash may have let a member release."""
    broken = False
    for seed in range(60):
        net, said = Net((4, 1, 1), seed, sound=False), {}
        for _ in range(3000):
            net.step()
            for lost, last in net.decided():
                said[lost] = min(last, said.get(lost, last))
            broken = broken or any(net.released[lost] > last for lost, last in said.items())
        if broken:
            break
    assert broken


def test_an_older_contract_than_the_one_adopted_is_refused() -> None:
    found = Reservations(4, 0, 1, 1)
    with pytest.raises(RunError, match="revision 3"):
        found.load({"known": [0] * 4, "revision": 3})
