"""Schedules: the factor on the learning rates in every round, known before the first one.

A schedule depends on the number of the round and of all rounds only, never on what a run has seen: it is part of what a run
promises, and is kept as text in the contract.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from dpps.errors import UsageError

FORMS = ("constant", "step:K", "cosine", "warm-up:K", "warm-up:K+cosine")
"""The allowed schedules as text."""

_LAST = 0.01  # of the cosine: a factor of 0 would send noise for nothing


@dataclass(frozen=True)
class Schedule(ABC):
    """A factor in (0, 1] for every round."""

    @abstractmethod
    def factor(self, round_: int, rounds: int) -> float:
        """On the rates in a round, counted from 0, of so many."""

    @abstractmethod
    def __str__(self) -> str:
        """As `parse_schedule` reads it."""

    def factors(self, rounds: int) -> tuple[float, ...]:
        """Of all rounds."""
        if rounds < 1:
            raise UsageError(f"a schedule over {rounds} rounds: it needs 1 or more")
        found = tuple(float(self.factor(t, rounds)) for t in range(rounds))
        wrong = [factor for factor in found if not 0 < factor <= 1]
        if wrong:
            raise UsageError(f"the schedule {self} gives a factor of {wrong[0]}: it must lie in (0, 1]")
        return found


@dataclass(frozen=True)
class Constant(Schedule):
    """The same rate in all rounds."""

    def factor(self, round_: int, rounds: int) -> float:
        return 1.0

    def __str__(self) -> str:
        return "constant"


@dataclass(frozen=True)
class StepDecay(Schedule):
    """A tenth of the rate after each of K equal parts of the run but the last: step:3 ends with a hundredth."""

    parts: int

    def __post_init__(self) -> None:
        _whole("step", self.parts)

    def factor(self, round_: int, rounds: int) -> float:
        return 10.0 ** -(round_ * self.parts // rounds)

    def __str__(self) -> str:
        return f"step:{self.parts}"


@dataclass(frozen=True)
class Cosine(Schedule):
    r"""Half a cosine from 1 to almost 0: $\frac{1}{2} (1 + \cos \pi t / T)$, at least 0.01."""

    def factor(self, round_: int, rounds: int) -> float:
        return max(_LAST, 0.5 * (1 + math.cos(math.pi * round_ / rounds)))

    def __str__(self) -> str:
        return "cosine"


@dataclass(frozen=True)
class WarmUp(Schedule):
    """The rate grows evenly over the first K rounds; from there on another schedule, over the rounds that are left."""

    over: int
    then: Schedule = Constant()

    def __post_init__(self) -> None:
        _whole("warm-up", self.over)

    def factor(self, round_: int, rounds: int) -> float:
        if round_ < self.over:
            return (round_ + 1) / self.over
        return self.then.factor(round_ - self.over, rounds - self.over)

    def __str__(self) -> str:
        rest = "" if isinstance(self.then, Constant) else f"+{self.then}"
        return f"warm-up:{self.over}{rest}"


def parse_schedule(text: str) -> Schedule:
    """The schedule that a text stands for: one of `FORMS`."""
    name, plus, rest = text.partition("+")
    kind, colon, number = name.partition(":")
    if kind == "warm-up" and colon and number.isdecimal():
        return WarmUp(int(number), parse_schedule(rest) if plus else Constant())
    if kind == "step" and colon and number.isdecimal() and not plus:
        return StepDecay(int(number))
    if text in ("constant", "cosine"):
        return Constant() if text == "constant" else Cosine()
    raise UsageError(
        f"unknown schedule {text!r}: choose one of {', '.join(FORMS)}; it is fixed before the first round and cannot depend on "
        "what a run sees"
    )


def _whole(name: str, value: int) -> None:
    if value < 1:
        raise UsageError(f"schedule {name}:{value}: K must be 1 or more")
