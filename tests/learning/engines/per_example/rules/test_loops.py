"""The loops over time: forward as torch has them, backward as finite differences say."""

import pytest
import torch

from dpps.learning import gru, lstm, plain
from tests.support.rules import randn

STEPS, EXAMPLES, WIDTH = 4, 2, 3


def start(gates):
    """Inputs of all gates, the recurrent weights, a bias and the first state."""
    torch.manual_seed(0)
    return (
        randn(STEPS, EXAMPLES, gates * WIDTH).requires_grad_(),
        0.5 * randn(gates * WIDTH, WIDTH),
        randn(gates * WIDTH),
        randn(EXAMPLES, WIDTH).requires_grad_(),
    )


def test_lstm():
    gates, weight, _, h = start(4)
    c = randn(EXAMPLES, WIDTH).requires_grad_()
    hidden, cell = lstm(gates, weight, h, c)
    expected = torch.lstm(
        gates,
        (h[None], c[None]),
        [torch.eye(4 * WIDTH, dtype=torch.float64), weight],
        False,
        1,
        0.0,
        False,
        False,
        False,
    )
    torch.testing.assert_close(hidden[1:], expected[0])
    torch.testing.assert_close(cell, expected[2][0])
    assert torch.equal(hidden[0], h)
    assert torch.autograd.gradcheck(lambda *x: lstm(x[0], weight, *x[1:]), (gates, h, c))


@pytest.mark.parametrize("has_bias", [True, False])
def test_gru(has_bias):
    gates, weight, bias, h = start(3)
    bias = bias if has_bias else None
    hidden, reset = gru(gates, weight, bias, h)
    own = [torch.eye(3 * WIDTH, dtype=torch.float64), weight]
    own += [torch.zeros_like(bias), bias] if has_bias else []
    expected = torch.gru(gates, h[None], own, has_bias, 1, 0.0, False, False, False)
    torch.testing.assert_close(hidden[1:], expected[0])
    assert reset.shape == (STEPS, EXAMPLES, WIDTH)
    assert torch.autograd.gradcheck(lambda x, y: gru(x, weight, bias, y)[0], (gates, h))


@pytest.mark.parametrize(("relu", "reference"), [(False, torch.rnn_tanh), (True, torch.rnn_relu)])
def test_plain(relu, reference):
    gates, weight, bias, h = start(1)
    hidden = plain(gates, weight, bias, h, relu=relu)
    own = [torch.eye(WIDTH, dtype=torch.float64), weight, torch.zeros_like(bias), bias]
    expected = reference(gates, h[None], own, True, 1, 0.0, False, False, False)
    torch.testing.assert_close(hidden[1:], expected[0])
    assert torch.autograd.gradcheck(lambda x, y: plain(x, weight, bias, y, relu=relu), (gates, h))
