"""Neighbours in the unit record: with declared sizes one example more changes nothing else, and the usual accounting holds."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

import dpps
from dpps.noise import gaussian, sampled
from dpps.privacy import Charge, total

_STEP = 2e-5
_SIZE = 1 << 21


def own_epsilon(p: np.ndarray, q: np.ndarray, rounds: int, delta: float) -> float:
    """Epsilon of `rounds` observations of densities p against q on one grid, by a privacy loss distribution of our own."""
    loss = np.log(p) - np.log(q)
    counts = np.zeros(_SIZE)
    np.add.at(counts, np.round(loss / _STEP).astype(int) % _SIZE, p / p.sum())
    composed = np.fft.irfft(np.fft.rfft(counts) ** rounds, _SIZE)
    losses = np.fft.fftfreq(_SIZE, 1 / _SIZE) * _STEP
    low, high = 0.0, 20.0
    for _ in range(50):
        epsilon = (low + high) / 2
        above = losses > epsilon
        spent = float((composed[above] * -np.expm1(epsilon - losses[above])).sum())
        low, high = (epsilon, high) if spent > delta else (low, epsilon)
    return low


def output(others: int, rate: float, own: float, own_rate: float, sigma: float) -> np.ndarray:
    """Density of a node's sum: examples that add 1 each with chance `rate`, one that adds `own`, and Gaussian noise."""
    x = np.linspace(-12 * sigma, 14 * sigma, 6001)
    counts = np.arange(others + 1)
    chances = stats.binom.pmf(counts, others, rate)
    kept = chances > 1e-30

    def shifted(by: float) -> np.ndarray:
        return chances[kept] @ stats.norm.pdf(x[None], (counts[kept] + by)[:, None], sigma)

    return (1 - own_rate) * shifted(0.0) + own_rate * shifted(own)


@pytest.mark.parametrize(
    ("n", "batch", "sigma", "rounds", "delta", "charged", "literal"),
    [(200, 20, 20.0, 2000, 1e-5, 0.82, 1.61), (90, 30, 4.04, 20, 1e-3, 1.0, 1.34)],
)
def test_rates_from_actual_sizes_would_cost_more_than_is_charged(
    n, batch, sigma, rounds, delta, charged, literal
):
    """All others add +1 and the example in question -1; it is added to n others."""
    rate, changed = batch / n, batch / (n + 1)
    spent = total([Charge(sampled(rate, gaussian(sigma)), rounds)], delta).epsilon
    assert spent == pytest.approx(charged, abs=0.01)
    without = output(n, rate, -1.0, 0.0, sigma)
    declared = output(n, rate, -1.0, rate, sigma)
    actual = output(n, changed, -1.0, changed, sigma)
    for p, q in ((without, declared), (declared, without)):
        assert own_epsilon(p, q, rounds, delta) <= spent * 1.001
    worst = max(own_epsilon(without, actual, rounds, delta), own_epsilon(actual, without, rounds, delta))
    assert worst >= literal - 0.01


def nodes(sizes: list[int], **options: object):
    data = [TensorDataset(torch.randn(n, 4), torch.randint(0, 2, (n,))) for n in sizes]
    algorithm = dpps.PartPSP(nn.Linear(4, 2), "all", batch_size=20)
    run = dpps.Run(
        algorithm, data, topology=dpps.Ring(2), privacy=dpps.Record(epsilon=3.0), seed=0, **options
    )
    return run.start(epochs=2).nodes


def test_one_example_more_changes_neither_rates_nor_rounds_nor_noise():
    with_it, without = (nodes([n, 300], declared_sizes=[200, 300]) for n in (201, 200))
    assert with_it.plan == without.plan
    assert with_it.calibration == without.calibration
    assert with_it.plan.sampling == with_it.updates.sampler.rates == (0.1, 20 / 300)
    assert nodes([201, 300]).plan != without.plan  # what is found at the first start is declared by default
