"""Recurrent layers: gradients of all their weights."""

import pytest
import torch

from dpps.learning import Recurrent
from tests.support.rules import check_rule, make_call, randn

GATES = {torch.lstm: 4, torch.gru: 3, torch.rnn_tanh: 1, torch.rnn_relu: 1}
STEPS, EXAMPLES, INPUTS, WIDTH = 5, 3, 2, 3


def arguments(function, layers=1, *, bias=True, both_ways=False, batch_first=True):
    torch.manual_seed(1)
    directions, rows = 2 if both_ways else 1, GATES[function] * WIDTH
    weights = []
    for k in range(layers):
        width = INPUTS if k == 0 else WIDTH * directions
        for _ in range(directions):
            weights += [randn(rows, width), randn(rows, WIDTH), *([randn(rows), randn(rows)] if bias else [])]
    state = randn(layers * directions, EXAMPLES, WIDTH)
    states = (state, torch.randn_like(state)) if function is torch.lstm else state
    x = randn(EXAMPLES, STEPS, INPUTS) if batch_first else randn(STEPS, EXAMPLES, INPUTS)
    return [x, states, weights, bias, layers, 0.0, False, both_ways, batch_first]


def outputs(function, first):
    return (first, 1, 1) if function is torch.lstm else (first, 1)


@pytest.mark.parametrize("function", GATES)
@pytest.mark.parametrize(
    ("layers", "bias", "both_ways", "batch_first"),
    [(1, True, False, True), (2, True, True, True), (2, False, False, False)],
)
def test_all_weights(function, layers, bias, both_ways, batch_first):
    given = arguments(function, layers, bias=bias, both_ways=both_ways, batch_first=batch_first)
    first = 0 if batch_first else 1
    keys = {("params", k) for k in range(len(given[2]))}
    check_rule(Recurrent(), function, given, keys, {"input": first}, outputs(function, first))


def test_a_trained_first_state_is_left_to_the_general_way():
    given = arguments(torch.gru)
    call = make_call(Recurrent(), torch.gru, given, {("hx", -1)}, {"input": 0}, (0, 1))
    assert not Recurrent().suits(call)
