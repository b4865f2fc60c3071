"""What every registered mechanism keeps: its scale, its two samplers and its cost belong together."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

import dpps
from dpps.noise import MECHANISMS, Keystream, Mechanism, SecureNoise, Seeded
from dpps.privacy import Charge, total
from tests.support.protocol import Wire

STEPS = 2.0**20

pytestmark = pytest.mark.parametrize("name", MECHANISMS.names())


def seeded(mechanism: Mechanism, size: int, seed: int = 1) -> np.ndarray:
    """Noise of scale 1 for simulations."""
    drawn = np.empty(size, np.float32)
    mechanism.draw(np.random.Generator(np.random.SFC64(seed)), drawn)
    return mechanism.shape(torch.from_numpy(drawn)[None])[0].double().numpy()


def secure(mechanism: Mechanism, size: int) -> np.ndarray:
    """Noise of scale 1 for messages that really leave."""
    return mechanism.draw_whole(Keystream(bytes(32)), STEPS, size) / STEPS


def test_it_is_made_by_name_and_cannot_be_changed(name: str) -> None:
    mechanism = MECHANISMS[name].of(0.5)
    assert mechanism.name == name
    assert mechanism.norm in (1, 2)
    assert mechanism == MECHANISMS[name].of(0.5) != MECHANISMS[name].of(0.6)
    with pytest.raises(AttributeError):
        mechanism.norm = 1 if mechanism.norm == 2 else 2


def test_the_scale_is_proportional_to_the_sensitivity(name: str) -> None:
    mechanism = MECHANISMS[name].of(0.5)
    assert mechanism.scale(0.0) == 0.0
    assert 0 < mechanism.scale(1.0) < math.inf
    assert mechanism.scale(3.0) == pytest.approx(3 * mechanism.scale(1.0))


def test_both_samplers_draw_the_same_distribution_and_thirty_percent_off_is_rejected(name: str) -> None:
    mechanism = MECHANISMS[name].of(1.0)
    one, other = seeded(mechanism, 20_000), secure(mechanism, 20_000)
    assert stats.ks_2samp(one, other).pvalue > 1e-3
    assert stats.ks_2samp(one, 1.3 * other).pvalue < 1e-6
    assert stats.ks_2samp(one, -one).pvalue > 1e-3, "symmetric"
    assert mechanism.standard_deviation(2.0) == pytest.approx(2 * one.std(), rel=0.05)
    np.testing.assert_array_equal(one, seeded(mechanism, 20_000))
    assert not (one == seeded(mechanism, 20_000, seed=2)).any()


def test_the_cost_follows_from_scale_over_sensitivity(name: str) -> None:
    mechanism = MECHANISMS[name].of(0.5)
    assert mechanism.cost(0.0, 1.0).free
    assert mechanism.cost(1.0, 0.0).unprotected
    assert mechanism.cost(2.0, 6.0) == mechanism.cost(1.0, 3.0)
    assert (mechanism.epsilon(1.0, 4.0) < math.inf) == mechanism.pure
    spent = [total([Charge(mechanism.cost(1.0, scale))], 1e-5).epsilon for scale in (1.0, 2.0, 8.0)]
    assert spent == sorted(spent, reverse=True)
    assert 0 < spent[-1] < spent[0]


def test_what_is_asked_for_by_name_is_what_is_charged(name: str) -> None:
    mechanism = MECHANISMS[name].of(0.7)
    scale = mechanism.scale(3.0)
    if mechanism.pure:
        assert mechanism.epsilon(3.0, scale) == pytest.approx(0.7)
    else:
        assert scale == pytest.approx(0.7 * 3.0)


def test_the_charge_covers_the_noise_and_not_that_of_a_twin_with_a_third_less(name: str) -> None:
    """The best threshold test between two values at the distance that was charged for, from samples."""
    mechanism = MECHANISMS[name].of(1.0)
    scale, delta = mechanism.scale(1.0), 1e-2
    epsilon = total([Charge(mechanism.cost(1.0, scale))], delta).epsilon

    def found(part: float) -> float:
        x = np.sort(part * scale * secure(mechanism, 400_000))
        thresholds = np.linspace(-6 * scale, 6 * scale, 400)
        above, shifted = (1 - np.searchsorted(x, thresholds - shift) / x.size for shift in (1.0, 0.0))
        return float((above - math.exp(epsilon) * shifted).max())

    assert found(1.0) <= delta + 0.005
    assert found(2 / 3) > delta + 0.02


def test_the_exact_sampler_is_as_good_as_what_is_charged(name: str) -> None:
    assert 0 <= MECHANISMS[name].of(1.0).sampler_distance(2.0**30, 10**6, 10**3) < 1e-12


@pytest.mark.parametrize(
    "source", [Seeded(3), SecureNoise(Keystream(bytes(32)))], ids=lambda s: type(s).__name__
)
def test_a_round_charges_it_and_adds_it(name: str, source: dpps.NoiseSource) -> None:
    mechanism, wire = MECHANISMS[name].of(0.5), Wire(4)
    protocol = dpps.DPPS(dpps.Ring(4), mechanism, dpps.Bounded(clip=1.0), noise=source, fabric=wire)
    record = protocol.step(protocol.start(torch.zeros(4, 5000)))
    assert record.used is not None
    [(round_, charge)] = protocol.ledger.history
    assert (round_, charge.event) == (0, mechanism.cost(record.used, record.scale))
    expected = mechanism.standard_deviation(record.scale)
    assert float(wire.sent[0].std()) == pytest.approx(expected, rel=0.05)
    assert 0 < protocol.privacy(1e-5).epsilon < math.inf
