"""The accountants one by one: Gaussian rounds in closed form, groups, and many scales."""

import math

import pytest

from dpps.privacy import Charge, attempt, pld, rdp


def test_many_gaussian_rounds_are_one_of_less_noise() -> None:
    many = pld([Charge.gaussian(4.0, count=16)], 1, math.inf)(1e-5)
    one = pld([Charge.gaussian(1.0)], 1, math.inf)(1e-5)
    assert many == pytest.approx(one, rel=1e-9)
    assert rdp([Charge.gaussian(4.0, count=16)], 1)(1e-5) > many


def test_a_group_of_two_sees_half_the_noise() -> None:
    pair = pld([Charge.gaussian(4.0)], 2, math.inf)(1e-5)
    assert pair == pytest.approx(pld([Charge.gaussian(2.0)], 1, math.inf)(1e-5), rel=1e-9)
    sampled = rdp([Charge.gaussian(2.0, sampling=0.1, count=4)], 2)(1e-5)
    assert sampled > rdp([Charge.gaussian(2.0, sampling=0.1, count=4)], 1)(1e-5)


def test_many_laplace_scales_are_charged_at_no_less_than_each() -> None:
    kinds = [Charge.laplace(0.01 * (1 + k / 1000)) for k in range(60)]
    found = pld(kinds, 1, 1.0)(1e-6)
    assert found <= sum(0.01 * (1 + k / 1000) for k in range(60)) + 1e-3
    assert found >= pld([Charge.laplace(0.01, count=60)], 1, 1.0)(1e-6) - 1e-3


def test_an_accountant_that_fails_leaves_no_bound() -> None:
    bounds: dict[str, float] = {}

    def broken() -> float:
        raise ArithmeticError

    attempt(bounds, "broken", broken)
    attempt(bounds, "nonsense", lambda: math.nan)
    attempt(bounds, "negative", lambda: -1.0)
    attempt(bounds, "good", lambda: 2.0)
    assert bounds == {"good": 2.0}
