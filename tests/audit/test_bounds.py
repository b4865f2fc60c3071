"""The statistics of an audit: exact intervals, and bounds that are too high as rarely as promised."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest

from dpps.audit import certifiable, clopper_pearson, epsilon_lower


@pytest.mark.parametrize(("hits", "trials"), [(0, 50), (1, 50), (17, 50), (50, 50), (25_000, 100_000)])
def test_clopper_pearson_is_the_exact_interval(hits: int, trials: int) -> None:
    exact = binomtest(hits, trials).proportion_ci(0.98, method="exact")
    assert clopper_pearson(hits, trials, 0.01) == pytest.approx((exact.low, exact.high), rel=1e-9, abs=1e-12)


def test_epsilon_lower_by_hand() -> None:
    low, high = clopper_pearson(300, 1000, 5e-4)[0], clopper_pearson(100, 1000, 5e-4)[1]
    assert epsilon_lower(300, 100, 1000, 0.05, 1e-3) == pytest.approx(math.log((low - 0.05) / high))
    assert epsilon_lower(100, 300, 1000) == 0
    assert epsilon_lower(30, 0, 1000, delta=0.05) == 0
    assert certifiable(100_000) == pytest.approx(math.log(1e5 / math.log(2000)), abs=0.01)


def test_bound_of_textbook_laplace_is_below_and_near_its_epsilon() -> None:
    rng, n = np.random.default_rng(3), 100_000
    zero, one = (int((x + rng.laplace(size=n) >= 1).sum()) for x in (1.0, 0.0))
    assert 0.95 < epsilon_lower(zero, one, n) < 1


def test_bounds_are_too_high_as_rarely_as_promised() -> None:
    rng, n = np.random.default_rng(4), 2_000
    zero, one = rng.binomial(n, 0.5, 2_000), rng.binomial(n, 0.5 / math.e, 2_000)
    too_high = sum(epsilon_lower(int(a), int(b), n, alpha=0.1) > 1 for a, b in zip(zero, one, strict=True))
    assert too_high / 2_000 < 0.1
