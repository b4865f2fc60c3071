"""The keystream and its samplers: exact probabilities, no repetition, and the slow path equal to the quick one."""

import math
import os
from collections.abc import Callable
from decimal import Decimal, localcontext

import numpy as np
import pytest
from scipy import stats

from dpps.errors import UsageError
from dpps.noise import Keystream, sampler
from dpps.noise.sampler import discrete_gaussian_slack, exact_acceptance, exact_geometric

KEY = bytes(range(32))


def laplace_pmf(scale: float, k: np.ndarray) -> np.ndarray:
    return np.tanh(1 / (2 * scale)) * np.exp(-np.abs(k) / scale)


def gaussian_pmf(sigma: float, k: np.ndarray) -> np.ndarray:
    support = np.arange(-int(40 * sigma) - 40, int(40 * sigma) + 41)
    return np.exp(-(k**2) / (2 * sigma**2)) / np.exp(-(support**2) / (2 * sigma**2)).sum()


def chi_square(samples: np.ndarray, pmf: Callable[[float, np.ndarray], np.ndarray], scale: float) -> float:
    """p-value of samples against a pmf; values are their own bins down to 10 expected, the rest are two tails."""
    k = np.arange(-int(12 * scale) - 12, int(12 * scale) + 13)
    expected = samples.size * pmf(scale, k)
    inside = k[expected >= 10]
    edge = int(inside.max())
    counts = np.bincount(np.clip(samples, -edge - 1, edge + 1) + edge + 1, minlength=2 * edge + 3)
    body = samples.size * pmf(scale, np.arange(-edge, edge + 1))
    tail = (samples.size - body.sum()) / 2
    return float(stats.chisquare(counts, np.concatenate([[tail], body, [tail]])).pvalue)


def test_words_do_not_repeat_and_streams_differ() -> None:
    one, two = Keystream(), Keystream()
    first, second, other = one.words(1000), one.words(1000), two.words(1000)
    assert np.unique(np.concatenate([first, second, other])).size == 3000


def test_fixed_key_repeats_in_any_portions() -> None:
    whole = Keystream(KEY).words(100_000)
    parts = Keystream(KEY)
    assert np.array_equal(whole, np.concatenate([parts.words(n) for n in (1, 70_000, 0, 29_999)]))
    assert not np.array_equal(whole[:10], Keystream(bytes(32)).words(10))


def test_words_are_aes_256_in_counter_mode() -> None:
    """The first block is the well-known AES-256 encryption of zeros under the key of zeros."""
    assert Keystream(bytes(32)).words(2).tobytes().hex() == "dc95c078a2408989ad48a21492842087"


def test_words_are_uniform() -> None:
    words = Keystream(KEY).words(1 << 16)
    for shift in (0, 8, 56):
        counts = np.bincount(((words >> np.uint64(shift)) & np.uint64(255)).astype(int), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-3


def test_further_bits_come_from_another_stream() -> None:
    stream = Keystream(KEY)
    further = {stream.more() for _ in range(1000)}
    assert len(further) == 1000
    assert further.isdisjoint(stream.words(100_000).tolist())


def test_a_forked_process_takes_a_fresh_key(monkeypatch: pytest.MonkeyPatch) -> None:
    parent, child = Keystream(KEY), Keystream(KEY)
    process = os.getpid()
    monkeypatch.setattr("os.getpid", lambda: process + 1)
    forked = child.words(10)
    monkeypatch.undo()
    assert not np.array_equal(forked, parent.words(10))


def test_a_fork_is_noticed_where_process_numbers_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grandchild can have the number of its forebear: comparing numbers alone would give both the same noise."""
    process = os.getpid()
    monkeypatch.setattr("os.getpid", lambda: process)
    stream = Keystream(KEY)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, stream.words(10).tobytes() + stream.more().to_bytes(8, "little"))
        os._exit(0)
    os.waitpid(child, 0)
    forked = os.read(read, 100)
    os.close(read)
    os.close(write)
    assert len(forked) == 88
    assert forked[:80] != stream.words(10).tobytes()
    assert forked[80:] != stream.more().to_bytes(8, "little")
    assert Keystream(KEY).words(10).tobytes() != forked[:80]


@pytest.mark.parametrize("p", [0.0, 1 / 60, 0.5, 0.9, 1.0])
def test_bernoulli(p: float) -> None:
    hits = int(Keystream(KEY).bernoulli(p, 100_000).sum())
    assert stats.binomtest(hits, 100_000, p).pvalue > 1e-3


def test_bernoulli_ties_look_at_more_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    p = 2.0**-30 + 2.0**-66  # whole words: 2^34, then a quarter
    monkeypatch.setattr(Keystream, "words", lambda self, n: np.full(n, 1 << 34, dtype=np.uint64))
    hits = int(Keystream(KEY).bernoulli(p, 4000).sum())
    assert stats.binomtest(hits, 4000, 0.25).pvalue > 1e-3
    assert not Keystream(KEY).bernoulli(2.0**-30, 10).any()  # U < p is false where U = p so far and no rest


@pytest.mark.parametrize("scale", [0.3, 0.5, 1.0, 3.7, 40.0])
@pytest.mark.parametrize(
    ("draw", "pmf"), [(Keystream.discrete_laplace, laplace_pmf), (Keystream.discrete_gaussian, gaussian_pmf)]
)
def test_discrete_noise_has_its_pmf_and_no_other(
    draw: Callable[..., np.ndarray], pmf: Callable[[float, np.ndarray], np.ndarray], scale: float
) -> None:
    samples = draw(Keystream(KEY), scale, 200_000)
    assert chi_square(samples, pmf, scale) > 1e-3
    for wrong in (0.9, 1.1):
        assert chi_square(samples, pmf, scale * wrong) < 1e-9


@pytest.mark.parametrize("scale", [2.0**20, 2.0**30 + 0.5])
def test_wide_samples_have_the_continuous_shape(scale: float) -> None:
    stream = Keystream(KEY)
    cases = [
        (stream.discrete_laplace(scale, 100_000), stats.laplace, math.sqrt(2) * scale),
        (stream.discrete_gaussian(scale, 100_000), stats.norm, scale),
    ]
    for samples, law, deviation in cases:
        assert stats.kstest(samples / scale, law.cdf).pvalue > 1e-3
        assert stats.kstest(samples / (1.1 * scale), law.cdf).pvalue < 1e-9
        assert abs(samples.mean()) < 4 * deviation / math.sqrt(100_000)
        assert samples.std() == pytest.approx(deviation, rel=0.02)
        assert stats.binomtest(int((samples > 0).sum()), 100_000).pvalue > 1e-3
        # the lowest bits are fair: nothing was rounded
        assert stats.chisquare(np.bincount(samples & 15, minlength=16)).pvalue > 1e-3


@pytest.mark.parametrize("size", [0, 1, 5, (1 << 14) + 3])
def test_sizes(size: int) -> None:
    stream = Keystream(KEY)
    for samples in (stream.discrete_laplace(2.0, size), stream.discrete_gaussian(2.0, size)):
        assert samples.shape == (size,)
        assert samples.dtype == np.int64


@pytest.mark.parametrize("scale", [0.4, 7.3, 2.0**30])
def test_slow_path_agrees_with_the_quick_one(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With useless error bounds every sample is decided in multiprecision: the samples stay the same."""
    quick = Keystream(KEY)
    expected = quick.discrete_laplace(scale, 500), quick.discrete_gaussian(scale, 500)
    calls = []
    monkeypatch.setattr(sampler, "_RELATIVE", 1.0)
    monkeypatch.setattr(sampler, "_ABSOLUTE", 1.0)
    monkeypatch.setattr(sampler, "exact_geometric", lambda *a: calls.append(1) or exact_geometric(*a))
    monkeypatch.setattr(sampler, "exact_acceptance", lambda *a: calls.append(2) or exact_acceptance(*a))
    slow = Keystream(KEY)
    assert np.array_equal(slow.discrete_laplace(scale, 500), expected[0])
    assert np.array_equal(slow.discrete_gaussian(scale, 500), expected[1])
    assert calls.count(1) > 1000
    assert calls.count(2) > 500


def test_undecided_samples_take_more_bits() -> None:
    """From 2 bits of U, each path has to ask for more, and the probabilities stay exact."""
    stream = Keystream(KEY)
    asked = 0

    def more() -> int:
        nonlocal asked
        asked += 1
        return stream.more()

    starts = (stream.words(4000) % 4).tolist()
    geometric = np.array([exact_geometric(3.0, start, 2, more) for start in starts])
    assert asked > 1000
    r = math.exp(-1 / 3)
    counts = np.bincount(geometric.clip(0, 12), minlength=13)
    pmf = np.append((1 - r) * r ** np.arange(12), r**12)
    assert stats.chisquare(counts, 4000 * pmf).pvalue > 1e-3
    asked = 0
    hits = sum(exact_acceptance(3.0, 5, start, 2, more) for start in starts)
    assert asked > 500
    assert stats.binomtest(hits, 4000, math.exp(-((5 / 3 - 1) ** 2) / 2)).pvalue > 1e-3


def test_exact_paths_at_their_ends() -> None:
    assert exact_geometric(3.0, (1 << 53) - 1, 53, lambda: (1 << 64) - 1) == 0
    assert exact_acceptance(3.0, 3, (1 << 53) - 1, 53, lambda: (1 << 64) - 1)  # probability 1
    words = iter([0, 0, 1 << 63])
    smallest = exact_geometric(1.0, 0, 53, lambda: next(words))  # U = 2^-182
    assert smallest == math.floor(182 * math.log(2))


def test_extreme_words_go_to_the_exact_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Keystream, "words", lambda self, n: np.zeros(n, dtype=np.uint64))
    assert Keystream(KEY).discrete_laplace(5.0, 3).min() >= math.floor(5 * 53 * math.log(2))
    monkeypatch.setattr(Keystream, "words", lambda self, n: np.full(n, (1 << 64) - 2, dtype=np.uint64))
    assert Keystream(KEY).discrete_laplace(5.0, 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize("function", ["log", "exp"])
def test_numpy_is_as_accurate_as_the_bounds_assume(function: str) -> None:
    x = Keystream(KEY).words(3000).astype(np.float64) * 2.0**-64
    x = np.concatenate([x, 1 - x * 2.0**-30, x * 2.0**-40])
    got = np.log(x) if function == "log" else np.exp(-20 * x)
    with localcontext() as context:
        context.prec = 40
        for value, y in zip(x.tolist(), got.tolist(), strict=True):
            true = Decimal(value).ln() if function == "log" else Decimal(-20 * value).exp()
            assert abs(Decimal(y) - true) <= abs(true) * Decimal(2) ** -50


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 2.0**45])
def test_senseless_scales_are_refused(scale: float) -> None:
    for draw in (Keystream(KEY).discrete_laplace, Keystream(KEY).discrete_gaussian):
        with pytest.raises(UsageError, match="grid units"):
            draw(scale, 1)


def test_other_senseless_arguments_are_refused() -> None:
    for call in (lambda: Keystream(b"short"), lambda: Keystream(KEY).bernoulli(1.5, 1)):
        with pytest.raises(UsageError):
            call()


# What whole-number noise costs beside continuous noise: next to nothing on a fine grid, and refused on a coarse one


@pytest.mark.parametrize("sigma", [64.0, 100.0])
def test_the_slack_bounds_the_distance_to_rounded_continuous_noise(sigma: float) -> None:
    k = np.arange(-int(20 * sigma), int(20 * sigma) + 1)
    discrete = np.exp(-(k.astype(float) ** 2) / (2 * sigma**2))
    discrete /= discrete.sum()
    s = math.sqrt(sigma**2 - 1 / 12)
    edges = np.array([math.erf(x / (s * math.sqrt(2))) for x in np.append(k - 0.5, k[-1] + 0.5)])
    distance = np.abs(discrete - np.diff(edges) / 2).sum() / 2
    assert distance <= discrete_gaussian_slack(sigma, 1, 1) < 1e-4
    assert discrete_gaussian_slack(sigma, 10, 3) == pytest.approx(30 * discrete_gaussian_slack(sigma, 1, 1))


def test_a_coarse_grid_is_refused() -> None:
    with pytest.raises(UsageError):
        discrete_gaussian_slack(1.0, 1, 1)
