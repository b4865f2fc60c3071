"""Two thousand rounds with members that come and go: nothing piles up in memory, on disk or in handles."""

import gc
import os
import random
from pathlib import Path

import pytest

from dpps.topology import Exponential
from tests.support.bare import Bare, mass, membership_of
from tests.support.processes import needs_proc, open_files
from tests.support.simulated import Network

N = 8
NAMES = tuple(f"m{k}" for k in range(N))


def _soak(folder: Path, rounds: int) -> None:
    topology, draw = Exponential(N), random.Random(1)
    members = []
    for k, name in enumerate(NAMES):
        (folder / name).mkdir()
        members.append(
            Bare(membership_of(NAMES, k, topology, min_members=4), topology, folder / name, rounds)
        )
    network = Network({member.membership.name: member for member in members}, loss=0.02, delay=(0.01, 0.02))
    begun, end = 0.0, rounds * 0.08
    for member in members:
        member.quiet = end + 10.0  # who is away when all others have ended cannot average with them
    while begun < end:
        begun += draw.expovariate(0.5)
        name, long = draw.choice(NAMES), draw.uniform(0.1, 4.0)
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
    assert max(handles) <= handles[0] + N, handles  # what earlier tests have left open may go
    assert max(letters) <= 3 * N, letters
    assert max(digests) <= 4 * N, digests
    megabytes = [count * os.sysconf("SC_PAGE_SIZE") / 1e6 for count in pages]
    assert megabytes[-1] <= megabytes[len(megabytes) // 2] + 20, megabytes
    assert max(waiting) <= 4, waiting
    print("handles", handles, "letters", letters, "shares", waiting, "digests", digests, "MB", megabytes)
    sizes = [sum(f.stat().st_size for f in (folder / name / "outbox").iterdir()) for name in NAMES]
    assert max(sizes) < 100_000, "the outbox holds the newest state, not the history"
    assert mass(members, network) == pytest.approx(N, abs=1e-9)
    assert all(member.result is not None for member in members)


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@needs_proc
def test_a_short_soak(tmp_path: Path) -> None:
    _soak(tmp_path, 60)


@needs_proc
@pytest.mark.slow
def test_a_long_soak(tmp_path: Path) -> None:
    _soak(tmp_path, 2000)
