"""What whole-number noise costs beside continuous noise: next to nothing on a fine grid, and refused on a coarse one."""

import math

import numpy as np
import pytest

from dpps.errors import UsageError
from dpps.noise import discrete_gaussian_multiplier, discrete_gaussian_slack, discrete_laplace_epsilon


def test_the_charge_covers_the_pure_epsilon_and_hardly_more_on_a_fine_grid() -> None:
    assert discrete_laplace_epsilon(3.0, 2.0) > 1.5
    assert discrete_laplace_epsilon(3e9, 2e9) == pytest.approx(1.5, rel=1e-9)
    assert discrete_gaussian_multiplier(1e6, 1e6) == pytest.approx(1.0, rel=1e-9)
    assert discrete_gaussian_multiplier(64.0, 64.0) < 1.0


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
