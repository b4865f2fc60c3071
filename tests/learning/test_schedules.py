"""Schedules are functions of the round alone, and texts that read back."""

import itertools
from dataclasses import dataclass

import pytest

from dpps.errors import UsageError
from dpps.learning import FORMS, Constant, Cosine, Schedule, StepDecay, WarmUp, parse_schedule

ALL = [Constant(), StepDecay(3), Cosine(), WarmUp(4), WarmUp(4, Cosine()), WarmUp(2, StepDecay(2))]


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_text_reads_back(schedule):
    assert parse_schedule(str(schedule)) == schedule


@pytest.mark.parametrize("schedule", ALL, ids=str)
@pytest.mark.parametrize("rounds", [1, 7, 100])
def test_factors_lie_above_zero_and_at_most_at_one(schedule, rounds):
    factors = schedule.factors(rounds)
    assert len(factors) == rounds
    assert all(0 < f <= 1 for f in factors)


def test_step_divides_by_ten():
    assert StepDecay(3).factors(6) == pytest.approx((1, 1, 0.1, 0.1, 0.01, 0.01))


def test_cosine_falls_from_one_through_a_half():
    factors = Cosine().factors(10)
    assert factors[0] == 1
    assert factors[5] == pytest.approx(0.5)
    assert all(a > b for a, b in itertools.pairwise(factors))
    assert Cosine().factors(1000)[-1] == 0.01


def test_warm_up_grows_evenly_then_hands_over():
    assert WarmUp(4).factors(6) == pytest.approx((0.25, 0.5, 0.75, 1, 1, 1))
    assert WarmUp(2, Cosine()).factors(12)[2:] == Cosine().factors(10)


@pytest.mark.parametrize(
    "text", ["plateau", "step", "step:0", "warm-up:x", "cosine:3", "warm-up:0", "", "step:2+cosine"]
)
def test_what_is_not_fixed_is_refused(text):
    with pytest.raises(UsageError, match=r"schedule"):
        parse_schedule(text)


def test_the_forms_are_read():
    for form in FORMS:
        parse_schedule(form.replace("K", "3"))


def test_no_rounds_no_schedule():
    with pytest.raises(UsageError, match=r"0 rounds.*1"):
        Constant().factors(0)


def test_a_schedule_of_your_own_stays_within_its_bounds():
    @dataclass(frozen=True)
    class Wild(Schedule):
        value: float

        def factor(self, round_, rounds):
            return self.value

        def __str__(self):
            return "wild"

    for value in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(UsageError, match=r"schedule wild .*\(0, 1\]"):
            Wild(value).factors(3)
