"""The contract of a run: read back as it was made, and nothing else is let through."""

import json
from dataclasses import replace

import pytest

from dpps.errors import RunError, UsageError
from dpps.privacy import Contract, Plan, Record

PLAN = Plan(((1.0, 8),), lr_shared=1.0, batch_size=2, sampling=(0.1, 0.2), declared_sizes=(20, 10))
UNIT = Record(noise_multiplier=2.0)


def test_a_contract_survives_the_ledger() -> None:
    made = Contract.first(UNIT, PLAN)
    read = Contract.from_json(json.loads(json.dumps(made.to_json())), "the ledger")
    assert read == made
    assert read.calibrate(UNIT).mechanism.scale(1.0) == 2.0
    assert made.budget(UNIT) is None, "noise was given, so no total was promised"


def test_a_promised_total_is_a_budget_over_the_planned_rounds() -> None:
    unit = Record(epsilon=3.0, delta=1e-5)
    made = replace(Contract.first(UNIT, PLAN), epsilon=3.0)
    budget = made.budget(unit)
    assert budget is not None
    assert (budget.epsilon, budget.planned) == (3.0, PLAN.paid)


@pytest.mark.parametrize(
    ("unit", "plan", "said"),
    [
        (replace(UNIT, clip=2.0), PLAN, r"clip.*2\.0.*1\.0"),
        (replace(UNIT, delta=1e-6), PLAN, "delta.*1e-06.*1e-05"),
        (UNIT, replace(PLAN, declared_sizes=(20, 11)), "node 1 .*11.*10"),
        (UNIT, replace(PLAN, lr_shared=2.0), r"lr_shared.*2\.0.*1\.0"),
    ],
)
def test_another_request_is_refused_by_what_differs(unit: Record, plan: Plan, said: str) -> None:
    made = Contract.first(UNIT, PLAN)
    made.check(UNIT, PLAN)
    with pytest.raises(UsageError, match=said):
        made.check(unit, plan)


@pytest.mark.parametrize("found", [None, {}, {"unit": "record"}])
def test_a_ledger_without_a_whole_contract_cannot_go_on(found: dict[str, str] | None) -> None:
    with pytest.raises(RunError, match="ledger x "):
        Contract.from_json(found, "ledger x")
