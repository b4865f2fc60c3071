"""A mechanism's scale, samplers and cost belong together."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from dpps.errors import UsageError
from dpps.noise import MECHANISMS, Gaussian, Keystream, Laplace, Mechanism, NoNoise

LAWS = {"laplace": stats.laplace, "gaussian": stats.norm}


@pytest.mark.parametrize("name", LAWS)
def test_both_samplers_draw_what_the_name_says(name: str) -> None:
    mechanism = MECHANISMS[name].of(1.0)
    drawn = np.empty(4000, np.float32)
    mechanism.draw(np.random.Generator(np.random.SFC64(1)), drawn)
    unit = mechanism.shape(torch.from_numpy(drawn)[None])[0].numpy()
    assert stats.kstest(unit, LAWS[name].cdf).pvalue > 1e-3
    assert stats.kstest(unit, LAWS[name](scale=1.3).cdf).pvalue < 1e-3
    whole = mechanism.draw_whole(Keystream(bytes(32)), 2.0**20, 4000) / 2.0**20
    assert stats.kstest(whole, LAWS[name].cdf).pvalue > 1e-3
    assert mechanism.deviation(2.0) == pytest.approx(2 * LAWS[name].std())


def test_costs_follow_from_scale_over_sensitivity() -> None:
    laplace = Laplace(0.5)
    scale = laplace.scale(3.0)
    assert laplace.epsilon(3.0, scale) == pytest.approx(0.5)
    assert laplace.epsilon(6.0, scale) == pytest.approx(1.0)
    assert laplace.cost(0.0, scale).free
    assert laplace.cost(3.0, 0.0).unprotected
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
