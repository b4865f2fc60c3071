"""Norms and weighted sums without writing the gradients are those of the gradients themselves."""

import pytest
import torch

from dpps.learning.gradients.layers.contributions import (
    Explicit,
    Outer,
    Rows,
    cautious,
    combine,
    squared_norms,
    sum_of_products,
    weighted_sum,
)

FACTORS = torch.tensor([0.5, 1.0, 0.25], dtype=torch.float64)


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def squares(contribution):
    """Every example's squared norm."""
    return contribution.norms().double().square().sum(1)


def outer(positions=1, m=6, n=7, groups=1):
    return Outer(randn(3, groups, positions, m), randn(3, groups, positions, n), torch.Size((groups * m, n)))


def rows(positions=3, table=6, width=7):
    read = torch.randint(0, table, (3, positions))
    return Rows(read, randn(3, positions, width), torch.Size((table, width)))


CASES = {
    "explicit": lambda: Explicit(randn(3, 4, 5)),
    "one position": outer,
    "many positions": lambda: outer(positions=9),
    "few positions of a large layer": lambda: outer(positions=2, m=60, n=70),
    "groups": lambda: outer(positions=4, groups=2),
    "rows of a small table": lambda: rows(positions=8),
    "rows of a large table": lambda: rows(table=50),
    "one row": lambda: rows(positions=1),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("piece", [None, 0, 2])
def test_norms_and_sums_are_those_of_the_gradients(name, piece):
    torch.manual_seed(0)
    contribution = CASES[name]()
    gradients, total = contribution.explicit().clone(), contribution.total(FACTORS, piece)
    assert gradients.shape == (3, *contribution.shape)
    # norms by Gram matrices are enlarged by what their rounding may have taken
    torch.testing.assert_close(squares(contribution), gradients.flatten(1).square().sum(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(total, torch.tensordot(FACTORS, gradients, 1))
    assert contribution.numbers > 0


def test_gram_matrices_are_used_where_they_are_cheaper():
    assert outer(positions=2, m=60, n=70).gram
    assert not outer(positions=9).gram


def test_parts_that_cancel_never_seem_shorter_than_they_are():
    """Two opposite outer products: float32 may round their sum to something, never to less than the norm that is stated."""
    torch.manual_seed(0)
    left, right = torch.randn(3, 1, 2, 60), torch.randn(3, 1, 1, 70).repeat(1, 1, 2, 1)
    left[:, :, 1] = -left[:, :, 0] * (1 + 1e-7)
    opposite = Outer(left, right, torch.Size((60, 70)))
    assert opposite.gram
    written = opposite.explicit().double().flatten(1).norm(dim=1)
    stated = squares(opposite).sqrt()
    assert bool((stated >= written).all())


@pytest.mark.parametrize("size", [1e3, 1e9, 1e15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_left_of_parts_that_cancel_is_neither_understated_nor_blurred(size, dtype):
    """The squares of the parts have no digits left for the rest, in float64 either; the sum must be right all the same."""
    torch.manual_seed(0)
    left, right = torch.randn(20, 1, 2, 60, dtype=dtype), torch.randn(20, 1, 1, 70, dtype=dtype)
    left[:, :, 0] += size * left[:, :, 1]
    left[:, :, 1] *= -size
    opposite = Outer(left, right.repeat(1, 1, 2, 1), torch.Size((60, 70)))
    assert opposite.gram
    rest = left.double().sum(2)[:, 0]
    written = rest[:, :, None] * right.double()[:, 0]
    stated = squares(opposite).sqrt()
    assert bool((stated >= written.flatten(1).norm(dim=1)).all())
    factors = (1 / stated).to(dtype)
    exact = torch.tensordot(factors.double(), written, 1)
    assert float((opposite.total(factors) - exact).norm()) <= 1e-6


@pytest.mark.parametrize("table", [3, 50], ids=["fewer rows than positions", "more"])
@pytest.mark.parametrize("piece", [None, 0, 2])
def test_a_row_that_is_read_several_times_counts_once_and_wipes_out_nobody(table, piece):
    """Read with factors of 1e9 and -1e9, which leave 1: other examples' gradients of that row stand to the last digit."""
    back = torch.ones(5, 4, 7)
    back[2] = torch.tensor([1e9, -1e9, 1.0, 0.0])[:, None]
    contribution = Rows(torch.tensor([1, 1, 1, 2]).repeat(5, 1), back, torch.Size((table, 7)))
    assert float(contribution.norms()[2].double().square().sum().sqrt()) == pytest.approx(7**0.5, rel=1e-6)
    total = contribution.total(torch.ones(5), piece)
    assert total[:3].tolist() == [[0.0] * 7, [13.0] * 7, [4.0] * 7]
    assert contribution.explicit()[:, 1].tolist() == [[3.0] * 7 if k != 2 else [1.0] * 7 for k in range(5)]


def test_caution_vanishes_beside_norms_that_do_not_cancel():
    square, length = torch.tensor([4.0], dtype=torch.float64), torch.tensor([2.0], dtype=torch.float64)
    stated = cautious(square, length, 100)
    assert 2.0 < float(stated) < 2.0 * (1 + 1e-5)


@pytest.mark.parametrize(
    ("uses", "kind"),
    [
        (lambda: [rows(table=60, width=70), outer(1, 60, 70)], Explicit),
        (lambda: [rows(), outer(positions=3)], Explicit),
        (lambda: [outer(), Explicit(randn(3, 6, 7))], Explicit),
        (lambda: [outer()], Outer),
    ],
    ids=["large table", "small table", "one is explicit", "one use"],
)
def test_all_uses_of_a_weight_add_up_before_the_norm_is_taken(uses, kind):
    torch.manual_seed(0)
    parts = uses()
    together = combine(parts)
    assert isinstance(together, kind)
    gradients = torch.stack([part.explicit() for part in parts]).sum(0)
    torch.testing.assert_close(squares(together), gradients.flatten(1).square().sum(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(together.total(FACTORS), torch.tensordot(FACTORS, gradients, 1))


# Sums over examples: in pieces as exact as in float64, and norms of long vectors


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


@pytest.mark.parametrize("d", [5, 8192, 1_000_000, 11_000_000])
@pytest.mark.parametrize("kind", ["constant", "random"])
def test_norms_of_millions_of_numbers_are_right_to_a_tenth_of_the_margin(d, kind):
    g = torch.full((1, 1, d), 0.0123) if kind == "constant" else torch.randn(1, 1, d)
    exact = float(torch.linalg.vector_norm(g, dtype=torch.float64))
    assert float(squared_norms(g).sqrt()) == pytest.approx(exact, rel=1e-5)
