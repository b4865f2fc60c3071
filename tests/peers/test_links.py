"""Links: every share counts exactly once; who is here; and which rows an honest member can have."""

import json
import math

import pytest
import torch

from dpps.peers import DONE, LEARNING, FrameError, Share
from dpps.peers.links import HERE, LEFT, Outlet, Rows, View
from dpps.peers.messages import Claim, Presence


def _share(number: int) -> Share:
    return Share(Claim(0, number, "d", number, 0.5, 1.0, b"s"), b"")


def test_shares_are_kept_until_they_are_safe_at_the_receiver() -> None:
    outlet = Outlet()
    for round_ in (3, 4):
        outlet.add(0.5, (0, round_))
    outlet.hear(start=1, got=2, kept=0)
    assert [s.number for s in outlet.waiting] == [1, 2], "counted is not yet safe"
    outlet.hear(start=1, got=2, kept=1)
    assert [s.number for s in outlet.waiting] == [2]
    assert not outlet.due(100.0, first=1.0, longest=16.0), "the receiver has it"
    outlet.hear(start=2, got=1, kept=1)
    assert [s.number for s in outlet.due(100.0, first=1.0, longest=16.0)] == [2], (
        "it has forgotten it in a crash"
    )
    outlet.hear(start=1, got=2, kept=2)
    assert [s.number for s in outlet.waiting] == [2], "a frame from before the restart"


def test_what_a_receiver_may_show_as_the_latest() -> None:
    outlet = Outlet()
    for round_ in (3, 4, 6):
        outlet.add(0.5, (0, round_))
    assert outlet.letters() == {(0, 3), (0, 4), (0, 6)}
    outlet.hear(start=1, got=3, kept=2)
    assert outlet.safe == (0, 4)
    again = Outlet.from_json(json.loads(json.dumps(outlet.to_json())))
    assert again.letters() == outlet.letters() == {(0, 4), (0, 6)}
    assert again.safe == (0, 4)


def test_a_link_that_does_not_answer_swallows_little() -> None:
    outlet, given = Outlet(), 0
    for round_ in range(20):
        if outlet.ready(0, round_):
            outlet.add(0.5, (0, round_))
            given += 1
    assert given == 2
    outlet.hear(start=1, got=2, kept=0)
    assert outlet.ready(0, 20)


def test_what_is_not_heard_of_is_sent_again_more_and_more_rarely() -> None:
    outlet = Outlet()
    outlet.add(1.0, (0, 0))
    times = [t for t in range(60) if outlet.due(float(t), first=1.0, longest=16.0)]
    assert times == [0, 1, 3, 7, 15, 31, 47], "but a lossy link is never given up"


def test_a_share_that_came_out_of_order_is_sent_again_as_soon_as_the_one_before_has_arrived() -> None:
    outlet = Outlet()
    for round_ in (3, 4):
        outlet.add(0.5, (0, round_))
    for now in (0.0, 1.0, 3.0, 7.0):
        assert len(outlet.due(now, first=1.0, longest=16.0)) == 2
    outlet.hear(start=1, got=1, kept=0)
    assert [sent.number for sent in outlet.due(7.5, first=1.0, longest=16.0)] == [2]
    outlet.hear(start=1, got=1, kept=1)
    assert not outlet.due(7.6, first=1.0, longest=16.0), "the same word again changes nothing"
    outlet.add(0.5, (0, 5))
    assert [sent.number for sent in outlet.due(7.7, first=1.0, longest=16.0)] == [3]
    outlet.hear(start=1, got=2, kept=1)
    assert not outlet.due(7.8, first=1.0, longest=16.0), "it may well arrive yet"


def _told(*entries: tuple[int, int, int]) -> list[Presence]:
    return [Presence(*entry) for entry in entries]


def test_silence_makes_a_member_away_and_a_new_sign_brings_it_back() -> None:
    view = View(3, own=0, hard=10.0, start=1)
    assert view.here(0.0) == [0]
    view.hear(_told((0, 0, HERE), (5, 3, HERE), (7, 2, HERE)), now=1.0)
    assert view.here(5.0) == [0, 1, 2]
    view.hear(_told((0, 0, HERE), (6, 4, HERE), (7, 2, HERE)), now=9.0)
    assert view.here(12.0) == [0, 1], "the old sign of 2 came again"
    assert view.missing(10.0) == [2]
    view.hear(_told((0, 0, HERE), (7, 4, HERE), (8, 2, HERE)), now=13.0)
    assert view.here(13.0) == [0, 1, 2]
    view.hear(_told((0, 0, HERE), (8, 4, HERE), (9, 2, LEFT)), now=14.0)
    assert view.here(14.0) == [0, 1]


def test_the_newest_of_everybody_counts_whoever_tells_it() -> None:
    view = View(4, own=0, hard=10.0, start=1)
    view.hear(_told((0, 0, HERE), (1, 5, HERE), (1, 9, HERE), (1, 900, HERE)), now=1.0)
    assert [view.pushed(node) for node in (1, 2, 3)] == [5, 9, 900]
    assert view.rounds(1.0) == [5, 9, 900]
    view.hear(_told((7, 800, DONE), (1, 600, HERE), (2, 7, HERE), (0, 7, HERE)), now=2.0)
    assert view.known[0].pushed == -1, "of itself a member knows best"
    assert view.known[1].pushed == 5, "as many signs of life as before are not new"
    assert view.age(1, 2.0) == 1.0
    assert view.known[2].pushed == 7
    assert view.pushed(2) == 9, "what was sent is not forgotten"
    assert view.rounds(2.0) == [5, 9, 900]
    assert view.rounds(11.5) == [9]


def test_a_member_that_has_forgotten_rounds_is_told_of_them() -> None:
    view = View(3, own=0, hard=10.0, start=1)
    for beats, pushed in ((1, 7), (2, 3)):
        view.hear(_told((0, -1, HERE), (beats, pushed, HERE), (0, -1, HERE)), now=1.0)
    assert view.beat(0, HERE, to=1)[1] == Presence(1, 7, HERE)
    assert view.beat(0, HERE, to=2)[1] == Presence(2, 3, HERE)


def test_signs_of_life_are_signed_as_they_are_told() -> None:
    view = View(2, own=1, hard=10.0, start=1, sign=lambda each: each.message("run", "b"))
    told = view.beat(4, HERE)[1]
    assert told.signature == Presence(told.beats, 4, HERE).message("run", "b")


def test_who_was_expelled_counts_no_more() -> None:
    view = View(4, own=0, hard=10.0, start=1)
    view.hear(_told((0, 0, HERE), (5, 3, HERE), (5, 9, HERE), (5, 9, HERE)), now=1.0)
    assert view.here(7.0) == view.taking_part() == [0, 1, 2, 3]
    assert view.missing(7.0) == [1, 2, 3]
    assert view.rounds(7.0) == [3, 9, 9]
    view.ignored = frozenset({2, 3})
    view.hear(_told((0, 0, HERE), (6, 3, HERE), (6, 9, HERE), (6, 9, HERE)), now=7.0)  # it has not heard yet
    assert view.here(7.0) == view.taking_part() == [0, 1]
    assert view.missing(7.0) == []
    assert view.rounds(7.0) == [3]


def test_a_new_start_counts_as_new() -> None:
    first, second = View(2, 0, 1.0, start=1), View(2, 0, 1.0, start=2)
    for _ in range(1000):
        late = first.beat(0, HERE)[0]
    assert second.beat(0, HERE)[0].beats > late.beats


def share(rows: Rows, row: torch.Tensor, a: float = 1.0, round_: int = 0) -> Share:
    return Share(Claim(LEARNING, round_, "", 1, 0.5, a), rows.encode(row))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_what_is_encoded_comes_back_exactly(dtype: torch.dtype) -> None:
    rows = Rows(torch.ones(5, dtype=dtype), common=False)
    row = torch.randn(5).to(dtype)
    assert torch.equal(rows.narrow(rows.checked(share(rows, row))), row)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_finite_or_not_of_this_run_are_refused(bad: float) -> None:
    rows = Rows(torch.ones(5), common=False)
    with pytest.raises(FrameError, match=r"round 0 .*NaN"):
        rows.checked(share(rows, torch.full((5,), bad)))
    with pytest.raises(FrameError, match=r"16 .*20"):
        rows.checked(share(rows, torch.ones(4)))


def test_a_row_counts_as_long_as_the_contract_makes_possible_and_is_refused_beyond_twice_that() -> None:
    """The bound is there from the start, and no round that a sender names moves it."""
    rows = Rows(torch.ones(4), common=True)
    rows.reach = 8.0
    assert rows.longest(1.0) == 2 * (2.0 + 8.0)
    assert rows.longest(0.5) == pytest.approx(rows.longest(1.0) / 2)
    short, long = torch.full((4,), 9.9), torch.full((4,), 19.9)
    for round_ in (0, 7, 1 << 60):
        assert torch.equal(rows.checked(share(rows, short, round_=round_)), short.double())
        counted = rows.checked(share(rows, long, round_=round_))
        torch.testing.assert_close(counted, torch.full((4,), 10.0).double())
        with pytest.raises(FrameError):
            rows.checked(share(rows, torch.full((4,), 20.1), round_=round_))
    with pytest.raises(FrameError):
        rows.checked(share(rows, torch.ones(4), a=0.0))


def test_nothing_is_known_of_rows_that_start_apart_or_have_no_bound() -> None:
    apart, unbounded = Rows(torch.ones(4), common=False), Rows(torch.ones(4), common=True)
    apart.reach = 8.0
    for rows in (apart, unbounded):
        assert rows.longest(1.0) == math.inf
        far = torch.full((4,), 1e9)
        assert torch.equal(rows.checked(share(rows, far)), far.double())


def test_clipped_gossip_pulls_by_at_most_so_far() -> None:
    rows = Rows(torch.zeros(3), common=True)
    rows.follow(torch.tensor([1.0, 0.0, 0.0]))
    near, far = torch.tensor([1.5, 0.0, 0.0]).double(), torch.tensor([101.0, 0.0, 0.0]).double()
    assert torch.equal(rows.clipped(2 * near, 2.0, 1.0), 2 * near)
    torch.testing.assert_close(rows.clipped(2 * far, 2.0, 1.0), torch.tensor([4.0, 0.0, 0.0]).double())
    nowhere = rows.clipped(1e30 * far, 1e-300, 1.0)
    assert torch.isfinite(nowhere).all()


def test_how_far_neighbours_are_apart_counts_only_what_is_recent() -> None:
    rows, mean = Rows(torch.zeros(2), common=True), torch.tensor([3.0, 4.0])
    assert rows.apart(mean, 0) is None
    rows.saw(1, torch.tensor([6.0, 8.0]).double(), share(rows, mean, a=2.0, round_=5).claim)
    rows.saw(2, torch.tensor([3.0, 9.0]).double(), share(rows, mean, a=1.0, round_=2).claim)
    assert rows.told([1], since=5)
    assert not rows.told([1, 2], since=5)
    assert rows.apart(mean, since=5) == 0.0
    assert rows.apart(mean, since=0) == pytest.approx(1.0)
