"""What is particular to each unit; what all of them have in common is in tests/contracts/test_units.py."""

import math

import pytest

from dpps.errors import UsageError
from dpps.privacy import Charge, Contribution, NodeSwap, Pairs, Plan, Record
from dpps.sensitivity import Paper

PLAN = Plan(((1.0, 4), (0.1, 4)), lr_shared=0.5, batch_size=10, sampling=(0.1, 0.2), declared_sizes=(100, 50))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Record(epsilon=1.0, noise_multiplier=2.0), "record.*epsilon or noise_multiplier.*both"),
        (Record, "record.*epsilon or noise_multiplier.*neither"),
        (lambda: Record(epsilon=1.0, clip=0.0), r"clip.*0\.0"),
        (lambda: Record(epsilon=math.nan), "epsilon.*nan"),
        (lambda: Record(epsilon=1.0, delta=0.5), r"delta.*0\.5.*\[0, 0\.1\)"),
        (lambda: Record(epsilon=1.0, delta=0.0), "delta.*0.*Laplace"),
        (lambda: Record(epsilon=1.0, records_per_user=0), "records_per_user is 0"),
        (
            lambda: Contribution(1.0, mechanism="gaussian", round_epsilon=1.0),
            r"round_epsilon.*Laplace.*noise_multiplier.*Gaussian",
        ),
        (lambda: Contribution(1.0, epsilon=1.0, trust=Pairs(1)), r"pairs.*laplace.*gaussian"),
        (lambda: NodeSwap(budget=1.0, epsilon=1.0), "node-swap.*budget or epsilon.*both"),
    ],
)
def test_refusals_name_value_and_remedy(call, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        call()


def test_contribution_covers_two_opposite_updates() -> None:
    found = Contribution(3.0, round_epsilon=0.25, delta=0.0).calibrate(PLAN)
    assert found.sensitivity.distance == pytest.approx(2 * 0.5 * 3.0)
    assert found.mechanism.epsilon(3.0, found.mechanism.scale(3.0)) == pytest.approx(0.25)
    assert Contribution(3.0, epsilon=2.0, delta=0.0).noise(PLAN) == pytest.approx(0.25, rel=1e-3)
    assert Contribution(epsilon=1.0).clip == 30.0
    assert Contribution(epsilon=1.0, mechanism="gaussian").clip == 1.0


def test_record_covers_one_clipped_example_in_the_expected_batch() -> None:
    found = Record(noise_multiplier=2.0, clip=3.0).calibrate(PLAN)
    assert found.sensitivity.distance == pytest.approx(0.5 * 3.0 / 10)
    assert found.mechanism.scale(found.sensitivity.distance) == pytest.approx(2.0 * 0.15)
    assert found.sampling == 0.2, "the node that samples most"
    assert found.example_clip == 3.0


def test_who_owns_several_records_is_protected_as_a_group() -> None:
    assert "example" in Record(epsilon=3).who()
    assert "up to 4" in Record(epsilon=3, records_per_user=4).who()


def test_in_node_swap_a_wanted_sum_is_spread_over_rounds_whose_noise_decays() -> None:
    budget = NodeSwap(epsilon=2.0, noise_rate=1e-3).noise(PLAN)
    assert sum(count * budget / (1e-3 * rate) for rate, count in PLAN.rounds) == pytest.approx(2.0)
    assert NodeSwap().noise(PLAN) == 5.0


def test_in_node_swap_no_total_is_promised_whatever_the_delta() -> None:
    unit = NodeSwap(budget=1.0)
    total = unit.total([Charge.laplace(1.0, count=100)])
    assert (total.accountant, total.epsilon) == ("sum", pytest.approx(100))
    assert "100 rounds" in unit.promise(total, 100)
    proven, tuned = unit.not_covered(), NodeSwap(sensitivity=Paper(0.8, 0.5)).not_covered()
    assert len(tuned) > len(proven), "it is not proven"
