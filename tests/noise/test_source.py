"""Noise: the right distribution is accepted and 10 % off is rejected."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

import dpps
from dpps.errors import RunError, UsageError
from dpps.noise import NOISE, STEPS, Keystream, Outgoing, SecureNoise, Streams
from dpps.sensitivity import Unclipped
from tests.support.protocol import Scripted

DISTRIBUTIONS = {
    "laplace": (dpps.Laplace(budget=2.0), lambda scale: stats.laplace(scale=scale)),
    "gaussian": (dpps.Gaussian(0.5), lambda scale: stats.norm(scale=scale)),
}


def draw(source, mechanism, n=40, d=1000, sensitivity=3.0, dtype=torch.float32, round_=0):
    zeros = torch.zeros(n, d, dtype=dtype)
    out = Outgoing(zeros.clone(), zeros.clone(), zeros.clone(), range(n), round_, base_is_public=True)
    norms = source.release(mechanism, mechanism.scale(sensitivity), out)
    return out.half, norms


SOURCES = {"seeded": lambda: dpps.Seeded(11), "secure": lambda: SecureNoise(Keystream(bytes(range(32))))}


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_right_scale_accepted_and_ten_percent_off_rejected(kind, source, dtype):
    mechanism, law = DISTRIBUTIONS[kind]
    noise, _ = draw(SOURCES[source](), mechanism, dtype=dtype)
    sample, scale = noise.double().numpy().ravel(), mechanism.scale(3.0)
    assert scale == 1.5
    assert stats.kstest(sample, law(scale).cdf).pvalue > 1e-3
    assert stats.kstest(sample, law(scale * 1.1).cdf).pvalue < 1e-6
    assert stats.kstest(sample, law(scale * 0.9).cdf).pvalue < 1e-6


@pytest.mark.parametrize("source", SOURCES)
def test_norms_are_those_of_the_noise(source):
    noise, norms = draw(SOURCES[source](), dpps.Laplace(1.0))
    torch.testing.assert_close(norms, noise.double().abs().sum(1), rtol=1e-4, atol=0)


def test_rows_and_rounds_are_independent():
    source, mechanism = dpps.Seeded(0), dpps.Gaussian(1.0)
    a, _ = draw(source, mechanism, n=30, d=2000)
    b, _ = draw(source, mechanism, n=30, d=2000, round_=1)
    together = torch.cat([a, b]).numpy()
    correlation = np.corrcoef(together) - np.eye(60)
    assert np.abs(correlation).max() < 6 / math.sqrt(2000)


def test_a_seed_gives_the_same_noise_whatever_rows_are_held_here():
    mechanism = dpps.Laplace(1.0)
    whole, _ = draw(dpps.Seeded(5), mechanism, n=10, d=70)
    zeros = torch.zeros(3, 70)
    out = Outgoing(zeros, zeros, zeros.clone(), [4, 7, 9], 0, base_is_public=True)
    dpps.Seeded(5).release(mechanism, mechanism.scale(3.0), out)
    assert torch.equal(out.half, whole[[4, 7, 9]])


def test_large_rows_are_drawn_whole():
    noise, _ = draw(dpps.Seeded(5), dpps.Laplace(1.0), n=2, d=200_000)
    assert bool((noise != 0).all())
    assert stats.kstest(noise[1].numpy(), stats.laplace(scale=3.0).cdf).pvalue > 1e-3


def test_laplace_is_finite_at_the_ends_of_the_uniform_generator():
    for dtype, step in ((torch.float32, 2.0**-24), (torch.float64, 2.0**-53)):
        ends = torch.tensor([[0.0, 1 - step, 0.5]], dtype=dtype)
        noise = dpps.Laplace(1.0).shape(ends.clone())[0]
        assert bool(torch.isfinite(noise).all())
        assert float(noise[0]) == -float(noise[1])


# Secure noise


def test_secure_messages_hide_whole_numbers_of_grid_steps():
    mechanism, source = dpps.Laplace(1.0), SecureNoise()
    base, eps = torch.zeros(3, 500, dtype=torch.float64), torch.randn(3, 500, dtype=torch.float64)
    out = Outgoing(base, eps, base + eps, range(3), 0, base_is_public=True)
    source.release(mechanism, 1.0, out)
    step = source.grid(1.0)
    assert STEPS <= 1.0 / step <= 2 * STEPS
    assert bool((out.half / step == (out.half / step).round()).all())


@pytest.mark.parametrize("scale", [1e-6, 0.3, 1.0, 1.7, 5e4])
def test_grid_is_a_power_of_two_below_the_scale(scale):
    step = SecureNoise().grid(scale)
    assert math.log2(step) == round(math.log2(step))
    assert STEPS <= scale / step <= 2 * STEPS


def test_rounding_is_charged_where_it_costs():
    """Node-swap: every coordinate; record: every coordinate of a sum; contribution: rounding toward zero is free."""
    d, step = 100, 0.5
    assert dpps.Paper(1, 0.5).rounding(d, step, 1) == d * step
    assert Unclipped(1.0).rounding(d, step, 2) == math.sqrt(d) * step
    assert dpps.Bounded(1.0, clip=0.5).rounding(d, step, 1) == 0


def test_rounding_toward_zero_never_lengthens_but_a_sum_can_move_a_step_more_than_its_part():
    step, rng = 0.25, np.random.default_rng(0)
    x = rng.normal(size=1000)
    assert np.abs(np.trunc(x / step) * step).sum() <= np.abs(x).sum()
    rest, part = 0.2, 0.06  # together they cross a step: 0.25 apart though the part is 0.06
    assert np.trunc((rest + part) / step) * step - np.trunc(rest / step) * step == step


def test_the_secure_charge_covers_discrete_noise():
    from dpps.noise import discrete_laplace_epsilon

    protocol = dpps.DPPS(dpps.Ring(3), dpps.Laplace(1.0), dpps.Bounded(2.0, clip=1.0), noise=SecureNoise())
    state = protocol.start(torch.zeros(3, 5))
    record = protocol.step(state)
    step = SecureNoise().grid(record.scale)
    assert record.used > record.estimated == 2.0
    assert record.epsilon >= discrete_laplace_epsilon(2.0 / step, record.scale / step)
    assert record.epsilon == pytest.approx(1.0, rel=1e-12)


def test_secure_noise_refuses_what_does_not_fit():
    big = torch.full((1, 2), 1e30, dtype=torch.float64)
    out = Outgoing(torch.zeros_like(big), big, big, [0], 0, base_is_public=True)
    with pytest.raises(RunError, match=r"1e\+30 .*grid"):
        SecureNoise().release(dpps.Laplace(1.0), 1.0, out)

    class Odd(dpps.Laplace):
        draw_whole = dpps.Mechanism.draw_whole

    with pytest.raises(UsageError, match=r"Odd .*draw_whole"):
        SecureNoise().release(Odd(1.0), 1.0, out)


def test_two_secure_sources_differ():
    a, _ = draw(SecureNoise(), dpps.Laplace(1.0))
    b, _ = draw(SecureNoise(), dpps.Laplace(1.0))
    assert not torch.equal(a, b)


def test_a_long_row_has_the_noise_of_its_stream_whatever_the_pieces():
    """Rows longer than a block are drawn piece by piece: the same numbers as in one go."""
    from dpps.noise.source import _BLOCK

    d = 2 * _BLOCK + 77
    noise, norms = draw(dpps.Seeded(3), dpps.Gaussian(0.5), n=2, d=d, sensitivity=2.0)
    whole = Streams(3, NOISE).at(1, 0).standard_normal(d, dtype=np.float32)
    np.testing.assert_array_equal(noise[1].numpy(), whole)
    torch.testing.assert_close(norms, noise.double().abs().sum(1), rtol=1e-5, atol=0)


def test_a_private_start_row_is_rounded_to_the_grid_like_everything_private():
    """Its residue modulo the step would give it away; the rounding is charged."""
    sent = []

    class Watched(dpps.Stacked):
        def mix(self, weights, *xs):
            sent.append(xs[0].clone())
            return super().mix(weights, *xs)

    bound = dpps.Bounded(distance=0, clip=0, start_distance=1.0)
    protocol = dpps.DPPS(dpps.Ring(3), dpps.Laplace(1.0), bound, noise=SecureNoise(), fabric=Watched(3))
    record = protocol.step(protocol.start(torch.tensor([[0.1], [0.2], [0.7]], dtype=torch.float64)))
    steps = sent[0] / SecureNoise().grid(record.scale)
    assert bool((steps == steps.round()).all())
    assert record.used >= 1.0 + SecureNoise().grid(record.scale)


def test_a_source_without_noise_for_local_parameters_says_so():
    with pytest.raises(UsageError, match=r"Scripted .*Seeded or SecureNoise"):
        Scripted([]).for_local_part()
    seeded = dpps.Seeded(1)
    a, _ = draw(seeded, dpps.Laplace(1.0), n=2, d=50)
    b, _ = draw(seeded.for_local_part(), dpps.Laplace(1.0), n=2, d=50)
    assert not bool((a == b).any())


def test_the_clip_holds_in_half_precision_too():
    rows = torch.randn(20, 3000).half()
    bound = dpps.Bounded(2.0, clip=1.0)
    admitted, _ = bound.admit(rows, rows.double().abs().sum(1), 1.0)
    assert float(admitted.double().abs().sum(1).max()) <= 1.0
