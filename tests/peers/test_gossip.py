"""Rounds without a barrier: what must not leave, and what holds whatever happens to frames and processes."""

import gc
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dpps.errors import RunError
from dpps.peers import LEARNING, Frame, Peers, averaging_rounds, decode
from dpps.peers.gossip import TOLERANCE
from dpps.peers.messages import Claim
from dpps.privacy import LedgerFile
from dpps.topology import Complete, DOut, Exponential, Ring, Topology
from tests.support.bare import (
    HARD,
    ROW,
    SOFT,
    WIDTH,
    A,
    B,
    Bare,
    Tap,
    listen,
    mass,
    membership_of,
    met,
    sign_as,
    started,
    verify,
)
from tests.support.processes import needs_proc, open_files
from tests.support.simulated import Network, SimulatedPost

pytestmark = pytest.mark.usefixtures("no_fsync")


def sent_by_a(main: Callable[[SimulatedPost], None]) -> list[Frame]:
    found: list[Frame] = []

    def tap(sender: str, to: str, data: bytes) -> None:
        if sender == A:
            found.append(decode(data, "run", 2, WIDTH * 8))

    Network({A: main, B: listen}, tap=tap).run()
    return found


@pytest.mark.parametrize("error", [RunError("no space left"), KeyboardInterrupt()])
def test_a_row_that_is_not_on_disk_is_never_sent(error: BaseException) -> None:
    failed: list[int] = []

    def keep(phase: int) -> None:
        failed.append(phase)
        raise error

    def main(post: SimulatedPost) -> None:
        fabric = started(post, 0)
        met(fabric)
        fabric.keep = keep
        with pytest.raises(type(error)), fabric.lock:
            fabric._push(LEARNING, 0, {1: 0.5}, [1], ROW, 1.0)
        for _ in range(40):  # as the thread does that shows signs of life
            fabric.look()
            fabric.wait(0.1)
        with pytest.raises(RunError, match="round 0 "):
            fabric._push(LEARNING, 1, {1: 0.5}, [1], ROW, 1.0)

    frames = sent_by_a(main)
    assert failed == [LEARNING]
    assert frames
    assert all(frame.share is None and frame.view[0].pushed == -1 for frame in frames)


def test_who_is_newly_connected_is_greeted_soon_however_long_the_deadlines(tmp_path: Path) -> None:
    greeted: list[float] = []

    def main(post: SimulatedPost) -> None:
        fabric = started(post, (A, B).index(post._process.name), soft_deadline=300.0, hard_deadline=3000.0)
        while not fabric.assembled(2, answers=True):
            fabric.wait(100.0)
        greeted.append(post.clock())

    network = Network({A: main, B: main})
    network.isolate(A)
    network.at(10.1, lambda: network.rejoin(A))
    network.run(until=1000.0)
    assert len(greeted) == 2
    assert max(greeted) < 12.0


def test_a_member_that_is_back_at_once_gets_at_once_what_it_has_forgotten() -> None:
    """Before anybody has noticed that it was away."""
    got: list[float] = []

    def gives(post: SimulatedPost) -> None:
        fabric = started(post, 0, soft_deadline=300.0, hard_deadline=3000.0)
        met(fabric)
        fabric._push(LEARNING, 0, {1: 0.5}, [], ROW, 1.0)
        while post.clock() < 200.0:
            fabric.wait(100.0)

    def takes(post: SimulatedPost) -> None:
        for start in (1, 2):
            fabric = started(post, 1, soft_deadline=300.0, hard_deadline=3000.0)
            fabric.begin(start)
            met(fabric)
            while not fabric.take(LEARNING)[1]:
                fabric.wait(0.1)
            got.append(post.clock())

    Network({A: gives, B: takes}).run()
    assert len(got) == 2
    assert got[1] < 1.0


def shown(fabric: Peers, round_: int, digest: str) -> None:
    """B shows A's own signature."""
    claim = Claim(LEARNING, round_, digest, round_ + 1, 0.5, 1.0)
    claim = replace(claim, signature=sign_as(A)(claim.message("run", A, B)))
    receipt = sign_as(B)(claim.receipt("run", A, B))
    assert verify(B, receipt, claim.receipt("run", A, B))
    fabric._check_seen(1, claim, receipt)


@pytest.mark.parametrize(("round_", "words"), [(0, "of round 0,"), (101, "of round 101,.*round 100:")])
def test_evidence_of_any_round_silences(round_: int, words: str) -> None:
    """Whoever finds it: the thread that takes in frames may, while the next round is computed."""

    def main(post: SimulatedPost) -> None:
        fabric = started(post, 0)
        met(fabric)
        for r in range(101):
            with fabric.lock:
                fabric._push(LEARNING, r, {} if r else {1: 0.5}, [], ROW, 1.0)
        shown(fabric, 0, fabric._digests[LEARNING, 0])
        assert set(fabric._digests) == {(LEARNING, 0), (LEARNING, 100)}, (
            "of what nobody can show nothing is kept"
        )
        with pytest.raises(RunError, match=words):
            shown(fabric, round_, "0" * 64)
        kept: list[int] = []
        fabric.keep = kept.append
        with pytest.raises(RunError, match=words):
            fabric._push(LEARNING, 101, {1: 0.5}, [1], ROW, 1.0)
        assert kept == []
        fabric.wait(2 * HARD)

    assert all(frame.share is None or frame.share.claim.round == 0 for frame in sent_by_a(main))


def test_an_overtaken_frame_is_no_evidence() -> None:
    """Digests of rows before the one that a neighbour has on its disk are forgotten, so an old frame must not be taken for proof."""

    def main(post: SimulatedPost) -> None:
        fabric = started(post, 0)
        met(fabric)
        for r in range(3):
            with fabric.lock:
                fabric._push(LEARNING, r, {1: 0.5}, [], ROW, 1.0)
            fabric.wait(0.1)
            fabric._outlets[1].hear(1, r + 1, r + 1)
        assert fabric._outlets[1].safe == (LEARNING, 2)
        shown(fabric, 0, "0" * 64)
        assert fabric.silenced is None
        with pytest.raises(RunError, match="of round 2,"):
            shown(fabric, 2, "0" * 64)

    sent_by_a(main)


def test_a_round_once_told_of_is_not_forgotten(tmp_path: Path) -> None:
    """A member that was put back hears from those who got nothing of it that there was more."""

    def main(post: SimulatedPost) -> None:
        fabric = started(post, 0)
        met(fabric)
        fabric._push(LEARNING, 7, {}, [], ROW, 1.0)
        fabric.wait(0.1)
        again = started(post, 0)
        again.begin(2)
        met(again)
        assert again._said_of_own == 7
        assert not again.doubtful(), "all neighbours have answered, and none has a signature"
        again._greeted.clear()
        assert again.doubtful()

    sent_by_a(main)


def test_differences_have_shrunk_after_so_many_rounds() -> None:
    kinds: list[Topology] = [Complete(5), Exponential(8), Ring(9), DOut(6, 2)]
    for topology in kinds:
        n = topology.nodes
        linked = np.eye(n)
        for t in range(topology.examined):
            w = topology.weights(t)
            linked[w.receivers, w.senders] = linked[w.senders, w.receivers] = 1
        mix = np.linalg.matrix_power(linked / linked.sum(0), averaging_rounds(topology))
        rows = np.random.default_rng(0).normal(size=(n, 3))
        estimates = mix @ rows / (mix @ np.ones(n))[:, None]
        assert np.abs(estimates - estimates.mean(0)).max() < 10 * TOLERANCE


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


@pytest.mark.parametrize("seed", FAST)
def test_random_failures(seed: int, tmp_path: Path) -> None:
    _check(seed, tmp_path, rounds=25)


@pytest.mark.slow
@pytest.mark.parametrize("seed", ALL)
def test_more_random_failures(seed: int, tmp_path: Path) -> None:
    _check(seed, tmp_path, rounds=100)


def _soak(folder: Path, rounds: int) -> None:
    topology, draw = Exponential(8), random.Random(1)
    names = tuple(f"m{k}" for k in range(8))
    members = []
    for k, name in enumerate(names):
        (folder / name).mkdir()
        members.append(
            Bare(membership_of(names, k, topology, min_members=4), topology, folder / name, rounds)
        )
    network = Network({member.membership.name: member for member in members}, loss=0.02, delay=(0.01, 0.02))
    begun, end = 0.0, rounds * 0.08
    for member in members:
        member.quiet = end + 10.0  # who is away when all others have ended cannot average with them
    while begun < end:
        begun += draw.expovariate(0.5)
        name, long = draw.choice(names), draw.uniform(0.1, 4.0)
        network.at(begun, lambda name=name: network.isolate(name, 0.3))  # type: ignore[misc]
        network.at(begun + long, lambda name=name: network.rejoin(name))  # type: ignore[misc]
    seen: list[tuple[int, int, int, int, int]] = []

    def look() -> None:
        gc.collect()
        fabrics = [member.fabric for member in members if member.fabric is not None]
        letters = max(len(fabric._letters) for fabric in fabrics)
        waiting = max(len(outlet.waiting) for fabric in fabrics for outlet in fabric._outlets.values())
        digests = max(len(fabric._digests) for fabric in fabrics)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        seen.append((open_files(), letters, waiting, digests, pages))

    for part in range(1, 10):
        network.at(part * end / 10, look)
    network.run(until=3 * end + 60)
    handles, letters, waiting, digests, pages = zip(*seen, strict=True)
    assert max(handles) <= handles[0] + 8, handles  # what earlier tests have left open may go
    assert max(letters) <= 3 * 8, letters
    assert max(digests) <= 4 * 8, digests
    megabytes = [count * os.sysconf("SC_PAGE_SIZE") / 1e6 for count in pages]
    assert megabytes[-1] <= megabytes[len(megabytes) // 2] + 20, megabytes
    assert max(waiting) <= 4, waiting
    print("handles", handles, "letters", letters, "shares", waiting, "digests", digests, "MB", megabytes)
    sizes = [sum(f.stat().st_size for f in (folder / name / "outbox").iterdir()) for name in names]
    assert max(sizes) < 100_000, "the outbox holds the newest state, not the history"
    assert mass(members, network) == pytest.approx(8, abs=1e-9)
    assert all(member.result is not None for member in members)


@needs_proc
def test_a_short_soak(tmp_path: Path) -> None:
    _soak(tmp_path, 60)


@needs_proc
@pytest.mark.slow
def test_a_long_soak(tmp_path: Path) -> None:
    _soak(tmp_path, 2000)


def test_a_killed_neighbour_is_shown_as_away_soon(tmp_path: Path) -> None:
    """Its connection is gone; whether rounds wait for it is another matter."""
    shown: list[str] = []

    def main(post: SimulatedPost) -> None:
        fabric = started(post, 0, hard_deadline=3000.0)
        met(fabric)
        shown.append(fabric.status()[1].state)
        network.kill(B)
        until = post.clock() + 3 * SOFT + 1.0
        while post.clock() < until:
            fabric.wait(0.1)
        shown.append(fabric.status()[1].state)

    network = Network({A: main, B: listen})
    network.run()
    assert shown == ["here", "away"]
