"""Costs by hand. What every registered mechanism keeps is in tests/contracts."""

import math

import pytest

from dpps.noise import Gaussian, Laplace, NoNoise


def test_costs_by_hand() -> None:
    laplace = Laplace(0.5)
    scale = laplace.scale(3.0)
    assert laplace.epsilon(3.0, scale) == pytest.approx(0.5)
    assert laplace.epsilon(6.0, scale) == pytest.approx(1.0)
    assert Gaussian(2.0).scale(3.0) == 6.0
    assert Gaussian(2.0).epsilon(3.0, 6.0) == math.inf
    assert NoNoise().cost(1.0, 0.0).unprotected
