"""Epsilon spent by round, from what was charged."""

import math
from collections.abc import Sequence
from itertools import accumulate

from dpps.privacy.accountant import Charge
from dpps.privacy.units import Unit

POINTS = 8
"""How often the accountant is asked along a run: it takes a good part of a second each time."""

Spending = list[tuple[int, float]]
"""(round, epsilon spent after it); empty when there is no finite epsilon."""


def by_round(unit: Unit | None, lines: Sequence[tuple[int, Charge]], total: float | None) -> Spending:
    """Epsilon after each round, or after a few of them where only the accountant can tell.

    Args:
        unit: who is protected.
        lines: (round, charge) of every message; rounds repeated after a crash are there twice and count twice.
        total: of the whole run; the last point.
    """
    if unit is None or not lines or total is None:
        return []
    ordered = sorted(lines, key=lambda line: line[0])
    spent = _totals(unit, ordered) if unit.has_total else _sums(ordered)
    return [*spent[:-1], (spent[-1][0], total)]


def _sums(lines: Sequence[tuple[int, Charge]]) -> Spending:
    """Where a unit has no total, only the plain sum stands."""
    sums = accumulate((charge.event.pure_epsilon or 0.0) * charge.count for _, charge in lines)
    return list(dict(zip((at for at, _ in lines), sums, strict=True)).items())


def _totals(unit: Unit, lines: Sequence[tuple[int, Charge]]) -> Spending:
    ends = {at: k + 1 for k, (at, _) in enumerate(lines)}
    rounds = list(ends)
    step = max(1, math.ceil((len(rounds) - 1) / (POINTS - 1)))
    asked = sorted({*rounds[::step], rounds[-1]})
    # The last point is the run's own total and need not be asked for.
    known = [(at, unit.total([charge for _, charge in lines[: ends[at]]]).epsilon) for at in asked[:-1]]
    return [*known, (asked[-1], math.nan)]
