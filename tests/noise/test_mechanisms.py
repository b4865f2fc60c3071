"""Costs by hand, and noise that states none. What every registered mechanism keeps is in tests/contracts."""

import math

import numpy as np
import pytest

from dpps.errors import UsageError
from dpps.noise import Gaussian, Laplace, Mechanism, NoNoise


def test_costs_by_hand() -> None:
    laplace = Laplace(0.5)
    scale = laplace.scale(3.0)
    assert laplace.epsilon(3.0, scale) == pytest.approx(0.5)
    assert laplace.epsilon(6.0, scale) == pytest.approx(1.0)
    assert Gaussian(2.0).scale(3.0) == 6.0
    assert Gaussian(2.0).epsilon(3.0, 6.0) == math.inf
    assert NoNoise().cost(1.0, 0.0).unprotected


def test_noise_that_states_no_cost_is_refused() -> None:
    class Silent(Mechanism):
        name, norm = "silent", 1

        def scale(self, sensitivity: float) -> float:
            return sensitivity

        def draw(self, stream: np.random.Generator, out: np.ndarray) -> None:
            out[:] = 0

    with pytest.raises(UsageError, match=r"Silent.*event\(self, noise_multiplier\)"):
        Silent().cost(1.0, 1.0)
    with pytest.raises(UsageError, match=r"Silent.*of\(cls, noise\)"):
        Silent.of(1.0)
