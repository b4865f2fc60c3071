"""What was promised: the contract, what its rounds will cost, and what is said about a run in numbers and words."""

import json
from dataclasses import replace

import pytest

import dpps
from dpps.errors import RunError, UsageError
from dpps.noise import gaussian, laplace, non_private, sampled
from dpps.privacy import (
    Contract,
    Contribution,
    Ledger,
    NodeSwap,
    Plan,
    Record,
    Release,
    account,
    planned_charges,
)
from dpps.privacy.promise import SIMULATED
from tests.support.learning import tiny, toy_data

PLAN = Plan(((1.0, 8), (0.1, 4)), 0.5, 10, (0.25, 0.5), declared_sizes=(40, 20), spare=3)
UNIT = Record(noise_multiplier=2.0)


# The contract


def test_a_promised_total_is_a_budget_over_the_planned_rounds() -> None:
    made = replace(Contract.first(UNIT, PLAN), epsilon=3.0)
    budget = made.budget(Record(epsilon=3.0, delta=1e-5))
    assert budget is not None
    assert (budget.epsilon, budget.planned) == (3.0, PLAN.paid)


@pytest.mark.parametrize(
    ("unit", "plan", "said"),
    [
        (replace(UNIT, clip=2.0), PLAN, r"clip.*2\.0.*1\.0"),
        (replace(UNIT, delta=1e-6), PLAN, "delta.*1e-06.*1e-05"),
        (UNIT, replace(PLAN, declared_sizes=(40, 11)), "node 1 .*11.*20"),
        (UNIT, replace(PLAN, lr_shared=2.0), r"lr_shared.*2\.0.*0\.5"),
        (UNIT, replace(PLAN, rounds=((1.0, 12),)), r"rounds.*12.*8"),
    ],
)
def test_another_request_is_refused_by_what_differs(unit: Record, plan: Plan, said: str) -> None:
    made = Contract.first(UNIT, PLAN)
    made.check(UNIT, PLAN)
    with pytest.raises(UsageError, match=said):
        made.check(unit, plan)


def test_a_contract_with_partners_holds_what_the_promise_rests_on() -> None:
    unit = replace(UNIT, trust=dpps.Pairs(2))
    plan = replace(PLAN, sampling=(0.1,) * 6, declared_sizes=(100,) * 6)
    kept = json.loads(json.dumps(Contract.first(unit, plan).to_json()))
    shares = dpps.Pairs(2).partners(6).shares()
    assert {name: kept["trust"][name] for name in ("colluders", "graph", "sigma", "tau")} == {
        "colluders": 2,
        "graph": "complete",
        "sigma": shares.independent,
        "tau": shares.pair,
    }
    again = Contract.from_json(kept, "test")
    again.check(unit, plan)
    for other in (dpps.Pairs(1), dpps.Pairs(2, mean_variance=1.2), dpps.Nobody()):
        with pytest.raises(UsageError, match=r"trust .*'colluders': 2"):
            again.check(replace(unit, trust=other), plan)


@pytest.mark.parametrize("found", [None, {}, {"unit": "record"}])
def test_a_ledger_without_a_whole_contract_cannot_go_on(found: dict[str, str] | None) -> None:
    with pytest.raises(RunError, match="ledger x "):
        Contract.from_json(found, "ledger x")


# What is planned is what is charged


def test_what_is_left_of_a_plan() -> None:
    assert (PLAN.count, PLAN.paid) == (12, 15)
    assert PLAN.after(9).rounds == ((0.1, 3),)
    assert PLAN.after(12).count == 0


@pytest.mark.parametrize("unit", [UNIT, Contribution(clip=1.0, round_epsilon=0.5)])
def test_noise_that_stays_is_charged_once_for_all_rounds_spare_ones_included(unit) -> None:
    (charge,) = planned_charges(unit.calibrate(PLAN), PLAN)
    assert charge.count == PLAN.paid
    assert charge.event.pure_epsilon == (0.5 if isinstance(unit, Contribution) else None)


def test_noise_that_decays_with_the_rates_costs_more_in_later_rounds() -> None:
    first, later = planned_charges(NodeSwap(budget=5).calibrate(PLAN), PLAN)
    assert (first.count, later.count) == (8, 4)
    assert later.event.pure_epsilon == pytest.approx(10 * first.event.pure_epsilon)


@pytest.mark.parametrize("unit", [UNIT, NodeSwap(budget=5, sensitivity=dpps.WorstCase(), clip=0.1)])
def test_a_run_is_charged_what_was_planned(unit) -> None:
    algorithm = dpps.PartPSP(tiny(), ["layer1"], batch_size=10, lr_step=2)
    run = dpps.Run(algorithm, toy_data(4), topology=dpps.Exponential(4), privacy=unit, seed=0).fit(epochs=3)
    planned = planned_charges(unit.calibrate(run.plan), run.plan)
    assert run.unit.total(planned).epsilon == pytest.approx(run.privacy.epsilon, rel=1e-6)


# The statement


def test_without_a_unit_there_is_no_protection_and_without_messages_nothing_was_revealed() -> None:
    none = account(None, Ledger(range(2)), private_noise=True)
    assert (none.unit, none.epsilon) == ("none", None)
    nothing = account(UNIT, Ledger(range(2)), private_noise=True)
    assert nothing.epsilon == 0
    assert "epsilon" not in nothing.statement


def test_the_node_that_paid_most_counts() -> None:
    ledger = Ledger(range(2))
    ledger.charge(Release(0, laplace(1.0), "laplace", 1.0, 1.0))
    ledger.charge(Release(1, laplace(0.5), "laplace", 1.0, 0.5, rows=(1,)))
    unit = Contribution(1.0, round_epsilon=1.0, delta=0.0)
    found = account(unit, ledger, private_noise=False)
    assert found.epsilon == pytest.approx(3.0)
    assert found.epsilon_by_node == pytest.approx([1.0, 3.0])
    assert found.epsilon_per_round_max == pytest.approx(2.0)
    assert SIMULATED in found.statement
    assert SIMULATED not in account(unit, ledger, private_noise=True).statement


def test_numbers_that_do_not_exist_are_none() -> None:
    ledger = Ledger(range(1))
    ledger.charge(Release(0, sampled(0.5, gaussian(1.0)), "gaussian", 1.0, 1.0))
    assert account(UNIT, ledger, private_noise=True).epsilon_sum is None
    ledger.charge(Release(1, non_private(), "none", 1.0, 0.0))
    assert account(UNIT, ledger, private_noise=True).epsilon is None
