"""Neighbours in the unit record: adding an example to declared sizes, and replacing it by one that teaches nothing or by another.

Accounted for by a privacy loss distribution of our own."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

import dpps
from dpps.noise import gaussian, sampled
from dpps.privacy import Charge, Total, total
from tests.support.runs import make

_STEP = 2e-5
_SIZE = 1 << 21


def own_epsilon(p: np.ndarray, q: np.ndarray, rounds: int, delta: float) -> float:
    """Epsilon of `rounds` observations of densities p against q on one grid, by a privacy loss distribution of our own."""
    loss = np.log(p) - np.log(q)
    counts = np.zeros(_SIZE)
    np.add.at(counts, np.round(loss / _STEP).astype(int) % _SIZE, p / p.sum())
    composed = np.fft.irfft(np.fft.rfft(counts) ** rounds, _SIZE)
    losses = np.arange(_SIZE // 2) * _STEP  # negative ones, the other half, cost nothing
    above, weighted = (
        np.cumsum(values[::-1])[::-1] - values  # of all larger losses
        for values in (composed[: _SIZE // 2], composed[: _SIZE // 2] * np.exp(-losses))
    )
    return float(losses[np.argmax(above - np.exp(losses) * weighted <= delta)])


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


# Replacing an example by another one costs more than replacing it by one that teaches nothing, and both are stated.

SETTINGS = [(0.02, 1.0, 200, 1e-5), (0.3, 3.0, 20, 1e-3), (0.9, 2.0, 5, 1e-5), (1.0, 4.0, 3, 1e-5)]


def replacement(charges: list[Charge], delta: float, group: int = 1) -> Total:
    return total(charges, delta, group, replaced=True)


def mixture(x: np.ndarray, q: float, shift: float, sigma: float) -> np.ndarray:
    """Density of a round in which the example's share `shift` is drawn with chance q."""
    drawn: np.ndarray = (1 - q) * stats.norm.pdf(x, 0, sigma) + q * stats.norm.pdf(x, shift, sigma)
    return drawn


@pytest.mark.parametrize(("q", "sigma", "rounds", "delta"), SETTINGS)
def test_it_covers_an_example_whose_share_turns_around(
    q: float, sigma: float, rounds: int, delta: float
) -> None:
    """The worst replacement: +1 becomes -1. Computed by a privacy loss distribution of our own."""
    x = np.linspace(-14 * sigma - 1, 14 * sigma + 1, 20001)
    real = own_epsilon(mixture(x, q, 1.0, sigma), mixture(x, q, -1.0, sigma), rounds, delta)
    charges = [Charge.gaussian(sigma, sampling=q, count=rounds)]
    stated, nothing = replacement(charges, delta).epsilon, total(charges, delta).epsilon
    assert nothing < real <= stated * (1 + 1e-3)
    assert stated <= 3 * nothing


def test_without_sampling_it_is_exact() -> None:
    """Two clipped examples are at most two clips apart."""
    charges = [Charge.gaussian(4.0, count=10)]
    assert replacement(charges, 1e-5).epsilon == total([Charge.gaussian(2.0, count=10)], 1e-5).epsilon
    assert replacement([Charge.laplace(0.1, count=3)], 0.0).epsilon == pytest.approx(0.6)


def test_with_sampling_it_is_two_steps_by_the_generic_conversion() -> None:
    """(e, d) twice is (2 e, (1 + exp(e)) d): no theorem about groups is needed."""
    charges, delta = [Charge.gaussian(1.2, sampling=0.05, count=100)], 1e-5
    found = replacement(charges, delta).epsilon
    half = found / 2
    assert total(charges, delta / (1 + np.exp(half))).epsilon == pytest.approx(half, rel=2e-3)


def test_a_person_with_several_records_pays_for_all_of_them() -> None:
    charges = [Charge.gaussian(3.0, sampling=0.05, count=50)]
    assert replacement(charges, 1e-5, 2).epsilon > replacement(charges, 1e-5).epsilon
    assert replacement(charges, 1e-5, 2).epsilon > total(charges, 1e-5, 2).epsilon


def test_a_run_in_the_unit_record_states_both() -> None:
    unit = dpps.Record(epsilon=1.0)
    run = make(unit=unit).fit(epochs=1)
    stated = run.privacy
    (charges,) = {tuple(charges) for charges in run.ledger.charges_by_row().values()}
    assert stated.epsilon_replacement == pytest.approx(replacement(charges, unit.delta).epsilon)
    assert stated.epsilon is not None
    assert stated.epsilon_replacement is not None
    assert stated.epsilon_replacement > 1.5 * stated.epsilon
    assert stated.to_json()["epsilon_replacement"] == stated.epsilon_replacement
    assert dpps.label(stated.epsilon_replacement) in stated.statement


def test_in_the_unit_contribution_replacement_is_what_is_promised() -> None:
    run = make(unit=dpps.Contribution(clip=1.0, round_epsilon=0.25, delta=0)).fit(epochs=1)
    assert run.privacy.epsilon_replacement == run.privacy.epsilon


def test_a_run_that_ends_early_states_that_of_all_planned_rounds() -> None:
    unit = dpps.Record(epsilon=1.0)
    whole = make(unit=unit).fit(epochs=2).privacy
    ended = make(unit=unit, callbacks=[lambda run, log: True]).fit(epochs=2).privacy
    assert ended.epsilon_replacement == pytest.approx(whole.epsilon_replacement, rel=1e-3)
