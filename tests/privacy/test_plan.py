"""What a plan will cost, before anything is sent."""

import pytest

from dpps.privacy import Contribution, NodeSwap, Plan, outlook, planned_charges
from dpps.topology import Exponential

PLAN = Plan(
    ((1.0, 4), (0.1, 4)), lr_shared=1.0, batch_size=2, sampling=(0.5, 0.5), spare=2, declared_sizes=(4, 4)
)


def test_charges_of_a_unit_whose_noise_does_not_decay_count_spare_rounds() -> None:
    (charge,) = planned_charges(Contribution(1.0, round_epsilon=0.1).calibrate(PLAN), PLAN)
    assert charge.count == 10
    assert charge.event.pure_epsilon == pytest.approx(0.1)


def test_in_node_swap_the_epsilon_of_a_round_grows_when_rates_decay() -> None:
    early, late = planned_charges(NodeSwap(budget=1e-3).calibrate(PLAN), PLAN)
    assert (early.count, late.count) == (4, 4)
    assert late.event.pure_epsilon == pytest.approx(10 * early.event.pure_epsilon)


def test_an_outlook_says_what_to_expect_and_warns() -> None:
    found = outlook(Contribution(1.0, epsilon=1.0, delta=0.0), PLAN, 1000, Exponential(2), 0)
    assert found.epsilon == pytest.approx(1.0, rel=1e-3)
    assert found.epsilon_per_round == pytest.approx(0.1, rel=1e-3)
    assert found.signal_to_noise is not None
    assert found.signal_to_noise_averaged == pytest.approx(found.signal_to_noise * 2**0.5)
    assert any("learn" in warning for warning in found.warnings)
    useless = outlook(Contribution(1.0, round_epsilon=10.0), PLAN, 10, Exponential(2), 0)
    assert any("meaningful" in warning for warning in useless.warnings)
    assert any("example" in w for w in outlook(NodeSwap(), PLAN, 10, Exponential(2), 0).warnings)


def test_what_is_left_of_a_plan() -> None:
    assert PLAN.count == 8
    assert PLAN.paid == 10
    assert PLAN.after(5).rounds == ((0.1, 3),)
    assert PLAN.after(8).count == 0
