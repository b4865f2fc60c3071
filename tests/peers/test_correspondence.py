"""What must not leave: a row that is not on disk, and anything after a neighbour has shown that the disk is an older copy."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dpps.errors import RunError
from dpps.peers import LEARNING, Frame, Peers, decode
from dpps.peers.messages import Claim
from dpps.topology import Complete
from tests.support.bare import HARD, WIDTH, membership_of, sign_as, terms_of, verify
from tests.support.simulated import Network, SimulatedPost

A, B = NAMES = ("a", "b")
ROW = torch.ones(WIDTH, dtype=torch.float64)


def started(post: SimulatedPost, own: int, **more: float) -> Peers:
    fabric = Peers(membership_of(NAMES, own, **more), post, post.clock)
    fabric.start(torch.zeros(1, WIDTH, dtype=torch.float64), common=True)
    fabric.agree(terms_of(Complete(2), 1000))
    return fabric


def listen(post: SimulatedPost) -> None:
    """Be there, take everything in, and give nothing."""
    fabric = started(post, 1)
    while post.clock() < 6 * HARD:
        fabric.wait(0.1)


def sent_by_a(main: Callable[[SimulatedPost], None]) -> list[Frame]:
    found: list[Frame] = []

    def tap(sender: str, to: str, data: bytes) -> None:
        if sender == A:
            found.append(decode(data, "run", 2, WIDTH * 8))

    Network({A: main, B: listen}, tap=tap).run()
    return found


def met(fabric: Peers) -> None:
    while not fabric.assembled(2, answers=True):
        fabric.wait(0.1)


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
        fabric = started(post, NAMES.index(post._process.name), soft=300.0, hard=3000.0)
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
        fabric = started(post, 0, soft=300.0, hard=3000.0)
        met(fabric)
        fabric._push(LEARNING, 0, {1: 0.5}, [], ROW, 1.0)
        while post.clock() < 200.0:
            fabric.wait(100.0)

    def takes(post: SimulatedPost) -> None:
        for start in (1, 2):
            fabric = started(post, 1, soft=300.0, hard=3000.0)
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
