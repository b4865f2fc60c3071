"""Sums over examples: in pieces as exact as in float64, and norms of long vectors."""

import pytest
import torch

from dpps.learning import squared_norms, sum_of_products, weighted_sum


@pytest.mark.parametrize("piece", [None, 0, 4, 7])
def test_weighted_sums_in_pieces_are_the_plain_ones(piece):
    torch.manual_seed(0)
    factors, rows = torch.rand(30), torch.randn(30, 5)
    found = weighted_sum(factors, rows, piece)
    assert found.dtype == (torch.float32 if piece is None else torch.float64)
    torch.testing.assert_close(found.double(), factors.double() @ rows.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("piece", [None, 0, 3])
@pytest.mark.parametrize("widths", [(2, 5), (5, 2), (100, 120)], ids=["wide", "high", "larger than a piece"])
def test_sums_of_products_keep_their_leading_axes(piece, widths):
    torch.manual_seed(0)
    left, right = (torch.randn(2, 10 * 3, width) for width in widths)
    found = sum_of_products(left, right, 3, piece)
    assert found.shape == (2, *widths)
    torch.testing.assert_close(found.double(), left.double().mT @ right.double(), rtol=1e-4, atol=1e-4)


def test_the_sum_of_no_examples_is_zero():
    assert not weighted_sum(torch.empty(0), torch.empty(0, 100), 4).any()


def test_what_float32_would_swallow_is_lost_within_a_piece_only():
    """A large part first, then many that are below its last digit: together 4.0, of which 15 share its piece."""
    rows = torch.full((1 << 14, 1), 2.0**-12)
    rows[0] = 2.0**12
    missing = float(rows.double().sum()) - float(weighted_sum(torch.ones(len(rows)), rows, 16))
    assert abs(missing) <= 15 * 2.0**-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_norms_are_in_float64(dtype):
    torch.manual_seed(0)
    rows = torch.randn(3, 20_000).to(dtype)
    found = squared_norms(rows)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, rows.double().square().sum(1), rtol=1e-5, atol=0)
