"""What is said about a run's privacy, in numbers and words."""

import pytest

from dpps.noise import gaussian, laplace, non_private, sampled
from dpps.privacy import SIMULATED, Contribution, Ledger, Record, Release, account


def test_without_a_unit_there_is_no_protection_and_without_messages_nothing_was_revealed() -> None:
    none = account(None, Ledger(range(2)), private_noise=True)
    assert (none.unit, none.epsilon) == ("none", None)
    nothing = account(Record(noise_multiplier=1.0), Ledger(range(2)), private_noise=True)
    assert nothing.epsilon == 0
    assert "epsilon" not in nothing.statement


def test_the_node_that_paid_most_counts() -> None:
    ledger = Ledger(range(2))
    ledger.charge(Release(0, laplace(1.0), "laplace", 1.0, 1.0))
    ledger.charge(Release(1, laplace(0.5), "laplace", 1.0, 0.5, rows=(1,)))
    found = account(Contribution(1.0, round_epsilon=1.0, delta=0.0), ledger, private_noise=False)
    assert found.epsilon == pytest.approx(3.0)
    assert found.epsilon_per_round_max == pytest.approx(2.0)
    assert SIMULATED in found.statement
    assert (
        SIMULATED not in account(Contribution(1.0, round_epsilon=1.0), ledger, private_noise=True).statement
    )


def test_numbers_that_do_not_exist_are_none() -> None:
    ledger = Ledger(range(1))
    ledger.charge(Release(0, sampled(0.5, gaussian(1.0)), "gaussian", 1.0, 1.0))
    assert account(Record(noise_multiplier=1.0), ledger, private_noise=True).epsilon_sum is None
    ledger.charge(Release(1, non_private(), "none", 1.0, 0.0))
    assert account(Record(noise_multiplier=1.0), ledger, private_noise=True).epsilon is None
