"""Rows on the wire: what an honest one can be, and how far a single member may pull."""

import math

import pytest
import torch

from dpps.peers import LEARNING, FrameError, Share
from dpps.peers.links import Rows
from dpps.peers.messages import Claim


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
