"""Convolutions with every option."""

import pytest
import torch

from dpps.learning import Conv, ConvTransposed, each
from tests.support.rules import check_rule, make_call, randn

BOTH = {("weight", -1), ("bias", -1)}


@pytest.mark.parametrize(
    "options",
    [
        (1, 0, 1, 1),
        (2, 1, 1, 1),
        ((2, 1), (0, 2), (1, 2), 1),
        (1, "same", 2, 1),
        (1, "valid", 1, 1),
        (1, 1, 1, 2),
    ],
)
def test_two_dimensions(options):
    groups = options[-1]
    check_rule(
        Conv(),
        torch.conv2d,
        [randn(3, 4, 7, 6), randn(6, 4 // groups, 3, 2), randn(6), *options],
        BOTH,
        {"input": 0},
    )


@pytest.mark.parametrize(("function", "axes"), [(torch.conv1d, 1), (torch.conv3d, 3)])
def test_one_and_three_dimensions(function, axes):
    x, weight = randn(3, 2, *[5] * axes), randn(4, 2, *[2] * axes)
    check_rule(Conv(), function, [x, weight, randn(4), 2, 1], BOTH, {"input": 0})


@pytest.mark.parametrize("options", [(1, 0, 0, 1, 1), (2, 1, 1, 1, 1), ((2, 3), (1, 0), (1, 2), 2, (1, 2))])
def test_transposed(options):
    groups = options[3]
    check_rule(
        ConvTransposed(),
        torch.conv_transpose2d,
        [randn(3, 4, 4, 3), randn(4, 6 // groups, 3, 2), randn(6), *options],
        BOTH,
        {"input": 0},
    )


def test_memory_with_channels_last_changes_nothing():
    call = make_call(Conv(), torch.conv2d, [randn(3, 2, 5, 5), randn(4, 2, 3, 3)], BOTH, {"input": 0})
    usual = Conv().run(call).detach()
    call.fast_formats = True
    torch.testing.assert_close(Conv().run(call).detach(), usual)


def test_an_image_without_an_axis_of_examples_is_left_to_the_general_way():
    call = make_call(Conv(), torch.conv2d, [randn(2, 5, 5), randn(3, 2, 2, 2)], BOTH, {"input": None})
    assert not Conv().suits(call)


def test_an_option_is_for_every_axis():
    assert each(None, 2, 7) == [7, 7]
    assert each(3, 2, 1) == each((3,), 2, 1) == [3, 3]
    assert each((3, 4), 2, 1) == [3, 4]
