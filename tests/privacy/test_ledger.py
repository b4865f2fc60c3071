"""The ledger in memory: what was charged, to whom, and what is refused before it is charged."""

import pytest

from dpps.errors import RunError, UsageError
from dpps.noise import laplace
from dpps.privacy import Budget, Ledger, Release


def _release(round_: int, rows="all") -> Release:
    return Release(round_, laplace(2.0), "laplace", 1.0, 2.0, rows)


def test_rows_pay_for_their_own_messages() -> None:
    ledger = Ledger([3, 5])
    ledger.charge(_release(0))
    ledger.charge(_release(1, rows=(5,)))
    assert ledger.mechanism == "laplace"
    charged = {row: sum(c.count for c in charges) for row, charges in ledger.charges_by_row().items()}
    assert charged == {3: 1, 5: 2}
    assert ledger.total(0.0).epsilon == pytest.approx(1.0)


def test_what_is_over_budget_is_refused_and_not_charged() -> None:
    ledger = Ledger([0], Budget(epsilon=1.0, planned=2))
    ledger.charge(_release(0))
    ledger.charge(_release(1))
    with pytest.raises(RunError):
        ledger.charge(_release(2))
    assert ledger.total(0.0).epsilon == pytest.approx(1.0)
    assert ledger.messages == 2


def test_equal_charges_are_kept_once_however_many_rounds_there_are() -> None:
    ledger = Ledger([0])
    for round_ in range(5):
        ledger.charge(Release(round_, laplace(float("2.0")), "laplace", 1.0, 2.0))
    assert len({id(charge) for _, charge in ledger.history}) == 1
    assert [round_ for round_, _ in ledger.history] == list(range(5))


def test_empty_requests_are_refused() -> None:
    with pytest.raises(UsageError, match="rows"):
        Ledger([])
    with pytest.raises(UsageError, match=r"rounds.*epsilon and delta"):
        Budget()
    with pytest.raises(UsageError, match=r"epsilon -1\.0"):
        Budget(epsilon=-1.0)
