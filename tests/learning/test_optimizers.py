"""Optimizers of released updates, compared with torch.optim, and with what the released values alone determine."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpps
from dpps.errors import UsageError
from dpps.learning import Adam, Averaging, Momentum, kept_for


def run(optimizer, updates):
    rows = torch.zeros_like(updates[0])
    state = optimizer.start(rows)
    for update in updates:
        change, state = optimizer.step(state, update)
        rows = rows + change
    return rows, state


@pytest.fixture
def gradients():
    return torch.randn(12, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def reference(make, gradients):
    parameter = torch.nn.Parameter(torch.zeros_like(gradients[0]))
    optimizer = make([parameter])
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def test_momentum_is_that_of_torch(gradients):
    rows, _ = run(Momentum(0.9), [-0.1 * g for g in gradients])
    torch.testing.assert_close(rows, reference(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), gradients))


def test_momentum_zero_is_the_released_update(gradients):
    change, _ = Momentum(0.0).step(Momentum(0.0).start(gradients[0]), gradients[1])
    assert torch.equal(change, gradients[1])


@pytest.mark.parametrize("rate", [1.0, 0.01])
def test_adam_is_that_of_torch_whatever_the_rate_of_the_updates(gradients, rate):
    rows, _ = run(Adam(0.1, epsilon=1e-12), [-rate * g for g in gradients])
    torch.testing.assert_close(rows, reference(lambda p: torch.optim.Adam(p, 0.1, eps=1e-12), gradients))


@pytest.mark.parametrize("optimizer", [Momentum(0.5), Adam(0.1)])
def test_arguments_are_not_changed(optimizer, gradients):
    state = optimizer.start(gradients[0])
    before = {name: t.clone() for name, t in state.items()}
    update = gradients[1].clone()
    optimizer.step(state, update)
    assert all(torch.equal(before[name], state[name]) for name in before)
    assert torch.equal(update, gradients[1])


def test_rows_that_are_away_keep_their_state(gradients):
    optimizer = Adam(0.1)
    _, old = optimizer.step(optimizer.start(gradients[0]), gradients[0])
    _, new = optimizer.step(old, gradients[1])
    kept = kept_for(torch.tensor([False, True, False]), old, new)
    assert torch.equal(kept["first"][1], old["first"][1])
    assert torch.equal(kept["second"][0], new["second"][0])
    assert kept["steps"].tolist() == [2, 1, 2]


def test_averaging_is_the_mean_of_the_last_part():
    rows = torch.arange(10.0)[:, None, None].expand(10, 2, 3)
    averaging = Averaging(0.5)
    state = averaging.start(rows[0])
    for t in range(10):
        state = averaging.step(state, rows[t], t, 10)
        if t < 5:
            assert torch.equal(state["mean"], rows[t])
    torch.testing.assert_close(state["mean"], torch.full((2, 3), 7.0))


def test_averaging_of_very_little_is_the_last_row():
    rows = torch.arange(3.0)[:, None, None]
    state = Averaging(0.01).start(rows[0])
    for t in range(3):
        state = Averaging(0.01).step(state, rows[t], t, 3)
    assert torch.equal(state["mean"], rows[2])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Momentum(1.0), "momentum is 1.0"),
        (lambda: Momentum(-0.1), r"-0\.1.*\[0, 1\)"),
        (lambda: Adam(0.0), "rate is 0.0"),
        (lambda: Adam(0.1, beta2=1.0), "beta2 is 1.0"),
        (lambda: Averaging(0.0), "averaging is 0:"),
        (lambda: Averaging(1.5), "averaging is 1.5"),
    ],
)
def test_bad_values_are_refused(make, says):
    with pytest.raises(UsageError, match=says):
        make()


def test_an_optimizer_that_is_not_linear_is_refused_with_noise_that_cancels():
    unit = dpps.Record(epsilon=1, trust=dpps.Pairs(colluders=0))
    sets = [TensorDataset(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))] * 3
    for optimizer, refused in ((Adam(), True), (Momentum(), False)):
        algorithm = dpps.PartPSP(nn.Linear(2, 2), optimizer=optimizer)
        with pytest.raises(UsageError, match="not linear") if refused else nullcontext():
            dpps.Run(algorithm, sets, topology=dpps.Ring(3), privacy=unit)
