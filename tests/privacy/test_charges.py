"""What a plan will cost is what its run is charged for."""

import pytest

import dpps
from dpps.privacy import Contribution, NodeSwap, Plan, Record, planned_charges
from tests.support.learning import tiny, toy_data

RATES = ((1.0, 8), (0.1, 4))


def plan(**options) -> Plan:
    return Plan(RATES, 0.5, 10, (0.25,) * 4, declared_sizes=(40,) * 4, **options)


@pytest.mark.parametrize("unit", [Record(noise_multiplier=2.0), Contribution(clip=1.0, round_epsilon=0.5)])
def test_noise_that_stays_is_charged_once_for_all_rounds_spare_ones_included(unit):
    (charge,) = planned_charges(unit.calibrate(plan(spare=3)), plan(spare=3))
    assert charge.count == 8 + 4 + 3


def test_noise_that_decays_with_the_rates_costs_more_in_later_rounds():
    first, later = planned_charges(NodeSwap(budget=5).calibrate(plan()), plan())
    assert (first.count, later.count) == (8, 4)
    assert later.event.pure_epsilon == pytest.approx(10 * first.event.pure_epsilon)


@pytest.mark.parametrize(
    "unit", [Record(noise_multiplier=2.0), NodeSwap(budget=5, sensitivity=dpps.WorstCase(), clip=0.1)]
)
def test_a_run_is_charged_what_was_planned(unit):
    algorithm = dpps.PartPSP(tiny(), ["layer1"], batch_size=10, lr_step=2)
    run = dpps.Run(algorithm, toy_data(4), topology=dpps.Exponential(4), privacy=unit, seed=0).fit(epochs=3)
    planned = planned_charges(unit.calibrate(run.plan), run.plan)
    assert run.unit.total(planned).epsilon == pytest.approx(run.privacy.epsilon, rel=1e-6)
