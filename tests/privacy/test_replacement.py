"""Replacing an example by another one costs more than replacing it by one that teaches nothing, and both are stated."""

import numpy as np
import pytest
from scipy import stats

import dpps
from dpps.privacy import Charge, total
from dpps.privacy.accountant import replacement
from tests.privacy.test_neighbours import own_epsilon
from tests.support.learning import tiny, toy_data

SETTINGS = [(0.02, 1.0, 200, 1e-5), (0.3, 3.0, 20, 1e-3), (0.9, 2.0, 5, 1e-5), (1.0, 4.0, 3, 1e-5)]


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
    algorithm = dpps.PartPSP(tiny(), ["layer1"], batch_size=10)
    unit = dpps.Record(epsilon=1.0)
    run = dpps.Run(algorithm, toy_data(3), topology=dpps.Ring(3), privacy=unit, seed=0).fit(epochs=1)
    stated = run.privacy
    (charges,) = {tuple(charges) for charges in run.ledger.charges_by_row().values()}
    assert stated.epsilon_replacement == pytest.approx(replacement(charges, unit.delta).epsilon)
    assert stated.epsilon is not None
    assert stated.epsilon_replacement is not None
    assert stated.epsilon_replacement > 1.5 * stated.epsilon
    assert stated.to_json()["epsilon_replacement"] == stated.epsilon_replacement
    assert dpps.label(stated.epsilon_replacement) in stated.statement


def test_in_the_unit_contribution_replacement_is_what_is_promised() -> None:
    algorithm = dpps.PartPSP(tiny(), ["layer1"], batch_size=10)
    unit = dpps.Contribution(clip=1.0, round_epsilon=0.25, delta=0)
    run = dpps.Run(algorithm, toy_data(3), topology=dpps.Ring(3), privacy=unit, seed=0).fit(epochs=1)
    assert run.privacy.epsilon_replacement == run.privacy.epsilon


def test_a_run_that_ends_early_states_that_of_all_planned_rounds() -> None:
    def train(**options: object) -> dpps.Run:
        algorithm = dpps.PartPSP(tiny(), ["layer1"], batch_size=10)
        unit = dpps.Record(epsilon=1.0)
        run = dpps.Run(algorithm, toy_data(3), topology=dpps.Ring(3), privacy=unit, seed=0, **options)  # type: ignore[arg-type]
        return run.fit(epochs=2)

    whole, ended = train().privacy, train(callbacks=[lambda run, log: True]).privacy
    assert ended.epsilon_replacement == pytest.approx(whole.epsilon_replacement, rel=1e-3)
