"""Bare parameters that meet examples by broadcasting or repetition."""

import pytest
import torch

from dpps.learning import Broadcast, Repeated
from tests.support.rules import check_rule, make_call, randn

A, B = {("a", -1)}, {("b", -1)}


@pytest.mark.parametrize("function", [torch.add, torch.mul, torch.sub, torch.div, torch.maximum])
@pytest.mark.parametrize("shape", [(4,), (5, 1), (1, 5, 4)])
def test_a_small_weight_beside_examples(function, shape):
    check_rule(Broadcast(), function, [randn(3, 5, 4), randn(*shape)], B, {"a": 0})
    check_rule(Broadcast(), function, [randn(*shape), randn(3, 5, 4)], A, {"b": 0})


def test_examples_on_another_axis():
    check_rule(Broadcast(), torch.mul, [randn(5, 3, 4), randn(4)], B, {"a": 1}, (1,))


def test_a_choice_between_examples_and_a_weight():
    chosen = torch.rand(3, 4) < 0.5
    check_rule(Broadcast(), torch.where, [chosen, randn(4), randn(3, 4)], B, {"a": 0, "c": 0})


def test_a_token_in_front_of_every_sequence():
    check_rule(Repeated(), torch.Tensor.expand, [randn(1, 2, 4), 3, -1, -1], {("input", -1)}, {})


def test_a_weight_with_a_row_for_every_example_is_left_to_the_general_way():
    call = make_call(Broadcast(), torch.mul, [randn(3, 4), randn(3, 4)], B, {"a": 0})
    assert not Broadcast().suits(call)


def test_a_weight_repeated_more_often_than_there_are_examples_is_left_to_the_general_way():
    call = make_call(Repeated(), torch.Tensor.expand, [randn(1, 4), 6, -1], {("input", -1)}, {})
    assert not Repeated().suits(call)
