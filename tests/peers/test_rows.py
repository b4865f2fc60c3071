"""Rows on the wire: what an honest one can be, and how far a single member may pull."""

import math

import pytest
import torch

from dpps.peers import LEARNING, Claim, FrameError, Rows, Share


def share(rows: Rows, row: torch.Tensor, a: float = 1.0, round_: int = 0) -> Share:
    return Share(1, 0.5, a, Claim(LEARNING, round_, "", b""), rows.encode(row))


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


def test_a_row_longer_than_clip_and_noise_allow_is_refused_once_they_are_known() -> None:
    rows = Rows(torch.ones(4), common=True)
    far = share(rows, torch.full((4,), 1e9))
    rows.checked(far)  # nothing is known before the first round
    rows.grow(step=0.5, deviation=0.1)
    with pytest.raises(FrameError, match=r"round 0 .*2e\+09"):
        rows.checked(far)
    rows.checked(share(rows, torch.ones(4)))
    assert rows.longest(1.0, 100) > rows.longest(1.0, 1)
    assert rows.longest(0.5, 1) == pytest.approx(rows.longest(1.0, 1) / 2)


def test_what_is_known_goes_to_disk_and_comes_back() -> None:
    rows, again = (Rows(torch.ones(4), common=True) for _ in range(2))
    again.load(rows.meta())
    assert again.longest(1.0, 1) == math.inf
    rows.grow(0.5, 0.1)
    rows.grow(0.2, 0.3)  # the largest of each counts
    again.load(rows.meta())
    assert again.meta() == {"step": 0.5, "deviation": 0.3}
    assert again.longest(1.0, 7) == rows.longest(1.0, 7)


def test_clipped_gossip_pulls_by_at_most_so_far() -> None:
    rows = Rows(torch.zeros(3), common=True)
    rows.follow(torch.tensor([1.0, 0.0, 0.0]))
    near, far = torch.tensor([1.5, 0.0, 0.0]).double(), torch.tensor([101.0, 0.0, 0.0]).double()
    assert torch.equal(rows.clipped(2 * near, 2.0, 1.0), 2 * near)
    torch.testing.assert_close(rows.clipped(2 * far, 2.0, 1.0), torch.tensor([4.0, 0.0, 0.0]).double())


def test_how_far_neighbours_are_apart_counts_only_what_is_recent() -> None:
    rows, mean = Rows(torch.zeros(2), common=True), torch.tensor([3.0, 4.0])
    assert rows.apart(mean, 0) is None
    rows.saw(1, torch.tensor([6.0, 8.0]).double(), share(rows, mean, a=2.0, round_=5))
    rows.saw(2, torch.tensor([3.0, 9.0]).double(), share(rows, mean, a=1.0, round_=2))
    assert rows.told([1], since=5)
    assert not rows.told([1, 2], since=5)
    assert rows.apart(mean, since=5) == 0.0
    assert rows.apart(mean, since=0) == pytest.approx(1.0)
