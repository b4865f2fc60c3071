"""Whole numbers on a grid: the step, rounding, and values that do not fit."""

import numpy as np
import pytest
import torch

from dpps.errors import RunError
from dpps.noise import (
    STEPS,
    Gaussian,
    Keystream,
    Laplace,
    Outgoing,
    SecureNoise,
    power_of_two_below,
    whole_steps,
)


@pytest.mark.parametrize("value", [1.0, 0.75, 3.0, 2.0**-40, 1e-300])
def test_the_power_of_two_below(value: float) -> None:
    found = power_of_two_below(value)
    assert found <= value < 2 * found
    assert np.frexp(found)[0] == 0.5


def test_the_noise_is_many_steps_wide() -> None:
    source = SecureNoise()
    for scale in (1e-6, 1.0, 3e8):
        assert STEPS <= scale / source.grid(scale) < 2 * STEPS
    assert source.grid(0.0) == 0.0
    assert source.private


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
