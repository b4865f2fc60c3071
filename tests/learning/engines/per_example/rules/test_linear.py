"""Linear layers and matrix products."""

import pytest
import torch
import torch.nn.functional as F

from dpps.learning import AddedProduct, Linear, RightProduct
from tests.support.rules import check_rule, make_call, randn

WEIGHT, BIAS, PRODUCT = ("weight", -1), ("bias", -1), ("mat2", -1)


@pytest.mark.parametrize(("shape", "dim"), [((3, 4), 0), ((3, 5, 4), 0), ((5, 3, 4), 1), ((3, 2, 5, 4), 0)])
def test_linear_layers_on_any_number_of_positions(shape, dim):
    check_rule(
        Linear(), F.linear, [randn(*shape), randn(2, 4), randn(2)], {WEIGHT, BIAS}, {"input": dim}, (dim,)
    )


def test_only_the_trained_weights_get_a_gradient():
    check_rule(Linear(), F.linear, [randn(3, 4), randn(2, 4), randn(2)], {BIAS}, {"input": 0})


def test_products_from_the_right_with_and_without_a_bias():
    check_rule(RightProduct(), torch.matmul, [randn(3, 5, 4), randn(4, 2)], {PRODUCT}, {"input": 0})
    check_rule(
        AddedProduct(), torch.addmm, [randn(2), randn(3, 4), randn(4, 2)], {BIAS, PRODUCT}, {"mat1": 0}
    )


@pytest.mark.parametrize(
    ("rule", "function", "arguments", "weights", "dims", "more"),
    [
        (Linear(), F.linear, [randn(2, 4), randn(3, 4)], {("input", -1)}, {"weight": 0}, {}),
        (Linear(), F.linear, [randn(2, 3), randn(2, 3)], {WEIGHT}, {"input": 1}, {}),
        (
            AddedProduct(),
            torch.addmm,
            [randn(2), randn(3, 4), randn(4, 2)],
            {PRODUCT},
            {"mat1": 0},
            {"beta": 2},
        ),
    ],
    ids=["a weight from the left", "examples along the summed axis", "a scaled bias"],
)
def test_other_uses_are_left_to_the_general_way(rule, function, arguments, weights, dims, more):
    assert not rule.suits(make_call(rule, function, arguments, weights, dims, more=more))
