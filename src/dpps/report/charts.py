"""What the page draws: lines over an axis, for one run or several over each other."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from dpps.privacy.units import NodeSwap
from dpps.report.read import Reported
from dpps.report.words import number

# Axes

SIZE = 1000
"""Places are counted from 0 to this, whatever the size of the drawing."""
TICKS = 6


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, linear or logarithmic."""

    low: float
    high: float
    log: bool = False
    whole: bool = False
    """Whether only whole numbers are written."""

    @classmethod
    def around(cls, values: Sequence[float], *, log: bool = False, ceiling: float = math.inf) -> "Axis":
        """With some room around the values, unless that would pass 0 or the ceiling."""
        low, high = min(values), max(values)
        if log:
            room = max((high / low) ** 0.06, 2.0 if high < 1.5 * low else 1.0)
            return cls(low / room, high * room, log=True)
        room = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
        return cls(max(0.0, low - room) if low >= 0 else low - room, min(ceiling, high + room))

    def place(self, value: float) -> float:
        """From 0 at the low end to SIZE at the high end, in steps of a tenth."""
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / ((self.high - self.low) or 1.0)
        return round(SIZE * share, 1)

    def ticks(self) -> list[tuple[float, str]]:
        """(place, text) of at most about `TICKS` round values."""
        values = self._powers() if self.log else self._steps()
        return [(self.place(value), number(value)) for value in values]

    def _steps(self) -> list[float]:
        rough = max((self.high - self.low) / TICKS, float(self.whole))
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(k * power for k in (1, 2, 5, 10) if k * power >= 0.999 * rough)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [float(f"{k * step:.12g}") for k in range(first, last + 1)]

    def _powers(self) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        within = (1,) if last - first > 3 else (1, 3) if last - first > 2 else (1, 2, 5)
        powers = range(first, last + 1, max(1, math.ceil((last - first) / TICKS)))
        values = [float(f"{k}e{power}") for power in powers for k in within]
        return [value for value in values if self.low <= value <= self.high] or [self.low, self.high]


# Charts

KEPT_POINTS = 400
"""A longer line is thinned: of each stretch its smallest and its largest value stay."""
DOTTED_POINTS = 25
"""A line of no more points shows each of them."""
TABLE_ROWS = 40
"""The table below a chart shows at most about this many of its points."""
COLOURS = 6
"""How many the style sheet has."""
DASHES = ("", "7 4", "2 4", "9 4 2 4")

Points = Mapping[Any, float]
"""x -> y; x are numbers of one kind."""


@dataclass(frozen=True)
class Line:
    """One line of a chart. Its look follows from its index, so that a run looks the same everywhere: 24 differ, and neighbours
    in colour and in dash."""

    name: str
    points: Points
    index: int = 0

    @property
    def colour(self) -> str:
        """Of the style sheet."""
        return f"var(--t{self.index % COLOURS})"

    @property
    def dash(self) -> str:
        """As SVG's stroke-dasharray."""
        return DASHES[(self.index + self.index // 12) % len(DASHES)]

    @property
    def dotted(self) -> bool:
        """Whether its points are shown one by one."""
        return len(self.points) <= DOTTED_POINTS

    @property
    def last(self) -> float:
        """Its value at the end."""
        return self.points[max(self.points)]

    @property
    def flat(self) -> bool:
        """Whether its value never changes."""
        values = self.points.values()
        return max(values) - min(values) <= 1e-6 * max(map(abs, values))


@dataclass(frozen=True)
class Chart:
    """One figure of the page.

    Attributes:
        own_eyes: what is drawn was not noised, so it is for the node itself, not to be passed on, and not printed.
    """

    key: str
    title: str
    caption: str
    lines: Sequence[Line]
    y_label: str
    x_label: str = "round"
    log: bool = False
    log_x: bool = False
    unit: str = ""
    own_eyes: bool = False

    @property
    def flat(self) -> bool:
        """Whether there is nothing to see: no line ever changes."""
        return not self.log_x and all(line.flat for line in self.lines)

    @cached_property
    def x(self) -> list[float]:
        """Where any line has a value."""
        return sorted({x for line in self.lines for x in line.points})

    @cached_property
    def x_axis(self) -> Axis:
        """Along the chart."""
        return Axis.around(self.x, log=True) if self.log_x else Axis(self.x[0], self.x[-1], whole=True)

    @cached_property
    def y_axis(self) -> Axis:
        """Up the chart."""
        values = [y for line in self.lines for y in line.points.values()]
        return Axis.around(values, log=self.log, ceiling=100.0 if self.unit else math.inf)

    def places(self, line: Line) -> list[tuple[float, float]]:
        """Of its points as SVG counts them: y from the top."""
        x, y = self.x_axis, self.y_axis
        return [(x.place(at), round(SIZE - y.place(line.points[at]), 1)) for at in thinned(line.points)]

    def table(self) -> list[list[str]]:
        """x and the values of all lines there, at some of the points."""
        step = -(-len(self.x) // TABLE_ROWS)
        return [
            [number(x), *(f"{line.points[x]:.6g}" if x in line.points else "" for line in self.lines)]
            for x in sorted({*self.x[::step], self.x[-1]})
        ]


def thinned(points: Points) -> list[float]:
    """The x that stay: all of a short line; of a long one the ends and each stretch's extremes."""
    x = sorted(points)
    if len(x) <= KEPT_POINTS:
        return x
    width = math.ceil(2 * len(x) / KEPT_POINTS)
    kept = {x[0], x[-1]}
    for start in range(0, len(x), width):
        stretch = x[start : start + width]
        kept |= {min(stretch, key=lambda at: points[at]), max(stretch, key=lambda at: points[at])}
    return sorted(kept)


# What is drawn of a run, and of several


def charts(runs: Sequence[Reported]) -> list[Chart]:
    """Everything that these runs have values for. A single run shows its parts, several show one line each."""
    one, first = len(runs) == 1, runs[0]
    uncovered = not all(run.summary.accuracy_is_covered for run in runs)
    percent: dict[str, Any] = {"y_label": "accuracy (%)", "unit": " %", "own_eyes": uncovered}
    accuracies = _lines({run.name: dict(enumerate(run.summary.accuracy_by_epoch, start=1)) for run in runs})
    exchange = _lines({run.name: _exchange(run) for run in runs})
    sensitivity = _sensitivity(first) if one else {run.name: _column(run, "estimated") for run in runs}
    spent = "Total epsilon after each round, computed by the accountant from the ledger."
    if not all(run.unit is None or run.unit.has_total for run in runs):
        spent = "In the unit node-swap, the sum of the rounds' epsilons, which is not a proven total."
    found = [
        Chart(
            "accuracy",
            "Accuracy",
            "On the test set, mean over the nodes.",
            accuracies,
            x_label="epoch",
            **percent,
        )
    ]
    if len({epsilon for line in exchange for epsilon in line.points}) > 1:
        title, caption = "Accuracy against epsilon", "Of the whole run. Units differ in what they protect."
        found.append(Chart("exchange", title, caption, exchange, x_label="epsilon", log_x=True, **percent))
    found += _metrics(first) if one else ()
    lines = _lines({run.name: run.spent() for run in runs})
    found.append(Chart("epsilon", "Privacy spent", spent, lines, "epsilon", log=not one))
    lines = _lines({run.name: _column(run, "loss") for run in runs})
    caption = "Mean over the nodes, each on its own batch; not noised."
    found.append(Chart("loss", "Training loss", caption, lines, "loss", own_eyes=True))
    caption = "What the noise is calibrated to."
    found.append(Chart("sensitivity", "Sensitivity", caption, _lines(sensitivity), "sensitivity", log=True))
    lines = _lines({run.name: _column(run, "scale") for run in runs})
    caption = "Scale of the noise in every number that is sent."
    found.append(Chart("scale", "Noise scale", caption, lines, "scale", log=True))
    return [chart for chart in found if chart.lines]


def _lines(named: Mapping[str, Points]) -> list[Line]:
    """The look of a line follows from its place, also when others have nothing to draw."""
    return [Line(name, points, k) for k, (name, points) in enumerate(named.items()) if points]


def _exchange(run: Reported) -> Points:
    epsilon, accuracy = run.summary.privacy.epsilon, run.summary.headline[1]
    if not epsilon or accuracy is None or run.summary.metric.name != "accuracy":
        return {}
    return {float(f"{epsilon:.3g}"): accuracy}


def _metrics(run: Reported) -> Iterator[Chart]:
    """One chart for each metric asked for, after every epoch."""
    epochs = run.summary.metrics_by_epoch
    names = dict.fromkeys(name for epoch in epochs for found in epoch.values() for name in found)
    for k, metric in enumerate(names):
        lines: dict[str, dict[float, float]] = {"test set": {}, "own test data": {}}
        for at, epoch in enumerate(epochs, start=1):
            for points, which in zip(lines.values(), ("test", "own"), strict=True):
                measured = epoch.get(which, {}).get(metric, ())
                if values := [v for v in measured if v is not None and math.isfinite(v)]:
                    points[at] = fmean(values)
        drawn = _lines({name: points for name, points in lines.items() if points})
        yield Chart(f"metric-{k}", metric, "Mean over the nodes.", drawn, metric, "epoch", own_eyes=True)


def _sensitivity(run: Reported) -> dict[str, Points]:
    name = type(run.unit.sensitivity).__name__ if isinstance(run.unit, NodeSwap) else "bound by clipping"
    lines = {name.lower(): _column(run, "estimated"), "real": _column(run, "real")}
    if any(log.used != log.estimated for log in run.log):
        lines["used, with rounding"] = _column(run, "used")
    for watched in dict.fromkeys(name for log in run.log for name in log.watched):
        lines[watched] = {
            log.round: log.watched[watched] for log in run.log if log.watched.get(watched, 0) > 0
        }
    return lines


def _column(run: Reported, name: str) -> Points:
    """A column of the rounds, without what cannot be drawn; on a log scale that is 0, too."""
    values = ((log.round, getattr(log, name)) for log in run.log)
    known = {at: y for at, y in values if y is not None and math.isfinite(y)}
    return known if name == "loss" else {at: y for at, y in known.items() if y > 0}
