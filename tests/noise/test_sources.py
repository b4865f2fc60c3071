"""Sources of noise: the right distribution, keyed streams, whole numbers on a grid, and noise calibrated to that grid."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

import dpps
from dpps.errors import RunError, UsageError
from dpps.noise import STEPS, Gaussian, Keystream, Laplace, Outgoing, SecureNoise, calibrate
from dpps.noise.source import _BLOCK, DROPOUT, LOCAL_NOISE, NOISE, SAMPLING, Streams, key, whole_steps
from tests.support.protocol import Scripted, Wire

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


def test_laplace_is_finite_at_the_ends_of_the_uniform_generator():
    for dtype, step in ((torch.float32, 2.0**-24), (torch.float64, 2.0**-53)):
        ends = torch.tensor([[0.0, 1 - step, 0.5]], dtype=dtype)
        noise = dpps.Laplace(1.0).shape(ends.clone())[0]
        assert bool(torch.isfinite(noise).all())
        assert float(noise[0]) == -float(noise[1])


# Secure noise


@pytest.mark.parametrize("scale", [1e-6, 0.3, 1.0, 1.7, 5e4])
def test_grid_is_a_power_of_two_below_the_scale(scale):
    step = SecureNoise().grid(scale)
    assert math.log2(step) == round(math.log2(step))
    assert STEPS <= scale / step <= 2 * STEPS


def test_the_secure_charge_covers_discrete_noise():
    protocol = dpps.DPPS(dpps.Ring(3), dpps.Laplace(1.0), dpps.Bounded(2.0, clip=1.0), noise=SecureNoise())
    state = protocol.start(torch.zeros(3, 5))
    record = protocol.step(state)
    step = SecureNoise().grid(record.scale)
    assert record.used > record.estimated == 2.0
    shift, t = 2.0 / step, record.scale / step
    assert record.epsilon >= shift / t + 1 / (4 * t * t)
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


def test_a_long_row_has_the_noise_of_its_stream_whatever_the_pieces():
    """Rows longer than a block are drawn piece by piece: the same numbers as in one go."""
    d = 2 * _BLOCK + 77
    noise, norms = draw(dpps.Seeded(3), dpps.Gaussian(0.5), n=2, d=d, sensitivity=2.0)
    whole = Streams(3, NOISE).at(1, 0).standard_normal(d, dtype=np.float32)
    np.testing.assert_array_equal(noise[1].numpy(), whole)
    torch.testing.assert_close(norms, noise.double().abs().sum(1), rtol=1e-5, atol=0)


def test_a_source_without_noise_for_local_parameters_says_so():
    with pytest.raises(UsageError, match=r"Scripted .*Seeded or SecureNoise"):
        Scripted([]).for_local_part()
    seeded = dpps.Seeded(1)
    a, _ = draw(seeded, dpps.Laplace(1.0), n=2, d=50)
    b, _ = draw(seeded.for_local_part(), dpps.Laplace(1.0), n=2, d=50)
    assert not bool((a == b).any())


# Whole numbers on a grid: the step, rounding, and values that do not fit


@pytest.mark.parametrize("mechanism", [Laplace(1.0), Gaussian(1.0)], ids=str)
@pytest.mark.parametrize("public", [True, False])
def test_messages_are_whole_steps_beside_what_is_public(mechanism, public: bool) -> None:
    source = SecureNoise(Keystream(bytes(32)))
    s, eps = torch.randn(2, 50, dtype=torch.float64), torch.randn(2, 50, dtype=torch.float64)
    out = Outgoing(s, eps, s + eps, range(2), 0, base_is_public=public)
    norms = source.release(mechanism, 1.0, out)
    step = source.grid(1.0)
    noised = (out.half - s if public else out.half).numpy() / step
    if not public:  # the sum of a row and a multiple of the step is rounded to a double
        assert np.array_equal(noised, np.rint(noised))
    hidden = eps if public else s + eps
    assert float((out.half - (s if public else 0) - hidden).abs().mean()) < 3
    assert (norms > 10).all()


def test_values_beyond_the_grid_are_refused_and_rounding_is_toward_zero_where_a_clip_counts() -> None:
    assert whole_steps(np.array([1.9, -1.9]), 1.0, toward_zero=True).tolist() == [1, -1]
    assert whole_steps(np.array([1.9, -1.9]), 1.0, toward_zero=False).tolist() == [2, -2]
    with pytest.raises(RunError, match=r"1e\+20 .*grid of 1\b"):
        whole_steps(np.array([1e20]), 1.0, toward_zero=True)


# Streams are what they are keyed by, and a seed means the same numbers on every machine


PURPOSES = (NOISE, SAMPLING, LOCAL_NOISE, DROPOUT)


def test_stream_keys_never_collide():
    seen = {
        key(s, p, n, r)
        for s in (0, 1)
        for p in (NOISE, SAMPLING)
        for n in (0, 1, (1 << 26) - 1)
        for r in (0, 1, (1 << 34) - 1)
    }
    assert len(seen) == 2 * 2 * 3 * 3
    with pytest.raises(OverflowError):
        key(0, NOISE, 1 << 26, 0)


def test_a_moved_generator_equals_a_fresh_one():
    streams = Streams(3, NOISE)
    streams.at(1, 1).random(3, dtype=np.float32)  # leaves half a word in the buffer
    np.testing.assert_array_equal(
        streams.at(4, 9).random(5, dtype=np.float32), Streams(3, NOISE).at(4, 9).random(5, dtype=np.float32)
    )


def test_streams_of_neighbouring_keys_are_unrelated():
    streams = Streams(0, NOISE)
    rows = np.stack([streams.at(node, round_).random(4000) for node in range(8) for round_ in range(8)])
    correlation = np.corrcoef(rows) - np.eye(64)
    assert np.abs(correlation).max() < 6 / math.sqrt(4000)
    assert stats.kstest(rows[:, 0], "uniform").pvalue > 1e-3  # the first number of each stream, too


def _sfc64(a, b, c, counter, count):
    """Chris Doty-Humphrey's generator in whole numbers."""
    words, full = [], (1 << 64) - 1
    for _ in range(count):
        word, counter = (a + b + counter) & full, counter + 1
        a, b = b ^ (b >> 11), (c + (c << 3)) & full
        c = (((c << 24) | (c >> 40)) + word) & full
        words.append(word)
    return words


@pytest.mark.parametrize("purpose", range(len(PURPOSES)))
def test_a_seed_means_the_same_whole_numbers_everywhere(purpose):
    """Runs of an older version can be repeated: the purposes keep their numbers, the keys their layout."""
    seed, node, round_ = 0x1234_5678_9ABC_DEF0, 7, 1_000_003
    words = _sfc64(seed, (purpose << 60) | (round_ << 26) | node, 0x9E3779B97F4A7C15, 1, 12 + 20)
    stream = Streams(seed, PURPOSES[purpose]).at(node, round_)
    assert stream.bit_generator.random_raw(20).tolist() == words[12:]


# The noise of a message: what it is calibrated to covers the very grid that the message lies on


def grid_of(values: torch.Tensor) -> float:
    """The largest power of two that divides all of these numbers."""
    fractions = values.double().numpy().ravel()
    smallest = 2.0**-300
    exponents = [math.frexp(v)[1] - 53 for v in fractions if v]
    unit = max(smallest, 2.0 ** min(exponents))
    whole = [int(v / unit) for v in fractions if v]
    return unit * math.gcd(*whole)


@pytest.mark.parametrize("ratio", [1e3, 1e8, 1e9, 1e10, 1e13])
def test_the_surcharge_covers_the_grid_that_messages_lie_on(ratio):
    """Also where rounding costs more than the estimate itself, d / epsilon above 5e8: 11,000,000 parameters at 1/720 say."""
    d, wire = 1000, Wire(3)
    protocol = dpps.DPPS(
        dpps.Ring(3), dpps.Laplace(d / ratio), dpps.Certified(), noise=SecureNoise(), fabric=wire
    )
    state = protocol.start(torch.zeros(3, d, dtype=torch.float64))
    eps = torch.zeros(3, d, dtype=torch.float64)
    eps[0, 0] = 1.0
    record = protocol.step(state, eps)
    step = grid_of(wire.sent[0])
    assert record.used >= record.estimated + d * step
    assert record.scale / step >= STEPS
    assert record.epsilon == pytest.approx(d / ratio)


def test_the_grid_is_fixed_before_the_surcharge_and_the_scale_after_it():
    mechanism, noise = dpps.Laplace(1.0), SecureNoise()
    level = calibrate(mechanism, noise, 2.0, lambda step: 5e9 * step)
    assert level.step == noise.grid(2.0)
    assert level.sensitivity >= 2.0 + 5e9 * level.step
    assert level.scale == mechanism.scale(level.sensitivity)
    assert noise.grid(level.scale) > level.step  # chosen again, it would be coarser than what was charged
    seeded = calibrate(mechanism, dpps.Seeded(0), 2.0, lambda step: 5e9 * step, rate=0.5)
    assert (seeded.sensitivity, seeded.scale, seeded.step) == (2.0, 1.0, 0.0)


@pytest.mark.parametrize("lr_local", [0.11, 1.0, 1.9])
def test_shared_and_local_part_together_are_covered_on_their_two_grids(lr_local, monkeypatch):
    """One example's share can lie in both parts at any angle, and rounding moves every coordinate by a step more."""
    released = []
    monkeypatch.setattr(
        SecureNoise,
        "release",
        lambda self, mechanism, scale, out: released.append((scale, out)) or torch.zeros(len(out.nodes)),
    )
    model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 2))
    multiplier, clip, batch = 3e4, 1.0, 4
    learner = dpps.Run(
        dpps.PartPSP(model, ["0"], lr_shared=1.0, lr_local=lr_local, batch_size=batch),
        [TensorDataset(torch.randn(8, 40), torch.randint(0, 2, (8,)))] * 2,
        topology=dpps.Ring(2),
        privacy=dpps.Record(noise_multiplier=multiplier, clip=clip),
        noise=SecureNoise(),
    ).start(epochs=1)
    learner.step()
    (local_scale, local), (shared_scale, shared) = released
    worst = 0.0
    for angle in np.linspace(0, math.pi / 2, 91):
        moved = [
            rate * clip / batch * part + math.sqrt(out.half.shape[1]) * out.step
            for rate, part, out in ((1.0, math.cos(angle), shared), (lr_local, math.sin(angle), local))
        ]
        worst = max(worst, math.hypot(moved[0] / shared_scale, moved[1] / local_scale))
    assert worst <= 1 / multiplier
