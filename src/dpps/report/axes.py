"""Axes of a chart: where a value lies, and which values are written beside it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

SIZE = 1000
"""Places are counted from 0 to this, whatever the size of the drawing."""


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, linear or logarithmic."""

    low: float
    high: float
    log: bool = False
    whole: bool = False
    """Whether only whole numbers are written."""

    @classmethod
    def around(
        cls,
        values: Iterable[float],
        *,
        log: bool = False,
        floor: float = -math.inf,
        ceiling: float = math.inf,
    ) -> "Axis":
        """With some room around the values, unless that would pass the floor or the ceiling."""
        known = list(values)
        low, high = min(known), max(known)
        if log:
            room = max((high / low) ** 0.06, 2.0 if high < 1.5 * low else 1.0)
            return cls(low / room, high * room, log=True)
        room = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
        return cls(max(floor, low - room), min(ceiling, high + room))

    def place(self, value: float) -> float:
        """From 0 at the low end to SIZE at the high end, in steps of a tenth."""
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(SIZE * share, 1)

    def ticks(self, count: int = 6) -> list[tuple[float, str]]:
        """(place, text) of at most about `count` round values."""
        values = self._powers(count) if self.log else self._steps(count)
        return [(self.place(value), number(value)) for value in values]

    def _steps(self, count: int) -> list[float]:
        rough = max((self.high - self.low) / count, float(self.whole))
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(k * power for k in (1, 2, 5, 10) if k * power >= 0.999 * rough)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [float(f"{k * step:.12g}") for k in range(first, last + 1)]

    def _powers(self, count: int) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        within = (1,) if last - first > 3 else (1, 3) if last - first > 2 else (1, 2, 5)
        powers = range(first, last + 1, max(1, math.ceil((last - first) / count)))
        values = [float(f"{k}e{power}") for power in powers for k in within]
        return [value for value in values if self.low <= value <= self.high]


def number(value: float) -> str:
    """Four digits, for people; what cannot be written briefly is written with a power of ten."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{float(f'{value:.4g}'):,}".removesuffix(".0")
    digits, _, power = f"{value:.3g}".partition("e")
    if not power:
        digits, _, power = f"{value:.2e}".partition("e")
    raised = str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return f"10{raised}" if digits == "1" else f"{digits}×10{raised}"
