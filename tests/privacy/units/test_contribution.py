"""The unit contribution: everything of a node may change, so the noise covers twice the clip."""

import pytest

from dpps.errors import UsageError
from dpps.privacy import Contribution, Pairs, Plan

PLAN = Plan(((1.0, 4),), lr_shared=0.5, batch_size=10, declared_sizes=(100, 50))


def test_the_noise_covers_two_opposite_updates() -> None:
    found = Contribution(3.0, round_epsilon=0.25).calibrate(PLAN)
    assert found.sensitivity.distance == pytest.approx(2 * 0.5 * 3.0)
    assert found.mechanism.epsilon(3.0, found.mechanism.scale(3.0)) == pytest.approx(0.25)


def test_a_total_is_spread_over_the_rounds() -> None:
    found = Contribution(3.0, epsilon=1.0, delta=0.0).noise(PLAN)
    assert found == pytest.approx(0.25, rel=1e-3)


def test_the_clip_follows_the_norm_and_only_gaussian_noise_is_shared() -> None:
    assert Contribution(epsilon=1.0).clip == 30.0
    assert Contribution(epsilon=1.0, mechanism="gaussian").clip == 1.0
    with pytest.raises(UsageError, match=r"round_epsilon.*Laplace.*noise_multiplier.*Gaussian"):
        Contribution(1.0, mechanism="gaussian", round_epsilon=1.0)
    with pytest.raises(UsageError, match=r"pairs.*laplace.*gaussian"):
        Contribution(1.0, epsilon=1.0, trust=Pairs(1))
