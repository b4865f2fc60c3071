"""The paper's unit: b / gamma_n a round, a sum that is called a sum."""

import pytest

from dpps.privacy import Charge, NodeSwap, Plan
from dpps.sensitivity import Paper

PLAN = Plan(((1.0, 4), (0.1, 4)), lr_shared=0.5, batch_size=10, declared_sizes=(100, 50))


def test_a_wanted_sum_is_spread_over_rounds_whose_noise_decays() -> None:
    unit = NodeSwap(epsilon=2.0, noise_rate=1e-3)
    budget = unit.noise(PLAN)
    assert sum(count * budget / (1e-3 * rate) for rate, count in PLAN.rounds) == pytest.approx(2.0)
    assert NodeSwap().noise(PLAN) == 5.0


def test_no_total_is_promised_whatever_the_delta() -> None:
    unit = NodeSwap(budget=1.0)
    total = unit.total([Charge.laplace(1.0, count=100)])
    assert total.accountant == "sum"
    assert total.epsilon == pytest.approx(100)
    assert "100 rounds" in unit.promise(total, 100)
    assert len(NodeSwap(sensitivity=Paper(0.8, 0.5)).limits()) > len(unit.limits()), "it is not proven"
