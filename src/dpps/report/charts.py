"""What the page draws: axes, charts of one run, and charts that lay several runs over each other."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Any

from dpps.privacy.accountant import Charge
from dpps.privacy.units import Unit
from dpps.report.read import RunRecord

# Axes

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


# Charts

KEPT_POINTS = 400
"""A longer series is thinned: of each stretch its smallest and its largest value stay."""
DOTTED_POINTS = 25
"""A line of no more points shows each of them."""

DODGE = 0.5
"""Over how much of the distance between two nodes their dots are spread."""

DASHES = ("", "7 4", "2 4", "9 4 2 4")
TONES = 6
"""How many colours the style sheet has."""

Points = Mapping[Any, float]
"""x -> y; x are numbers of one kind."""


@dataclass(frozen=True)
class Mark:
    """How a series looks; a run has the same look everywhere. Up to 24 lines differ, and neighbours in colour and in dash;
    of dots, which have no dashes, 12."""

    index: int

    @property
    def colour(self) -> str:
        """Of the style sheet."""
        return f"var(--t{self.index % TONES})"

    @property
    def square(self) -> bool:
        """Whether its dots have corners."""
        return self.index // TONES % 2 == 1

    @property
    def dash(self) -> str:
        """As SVG's stroke-dasharray."""
        return DASHES[(self.index + self.index // 12) % len(DASHES)]


@dataclass(frozen=True)
class Series:
    """One line of a chart. `y` runs along the chart's `x`; None where this series has no value."""

    name: str
    y: list[float | None]
    mark: Mark


@dataclass(frozen=True)
class Chart:
    """One figure of the page.

    Attributes:
        own_eyes: what is drawn was not noised, so it is for the node itself and not to be passed on.
        dots: the values stand for themselves: no lines between them.
        printed: whether it belongs on the printed page.
    """

    key: str
    title: str
    caption: str
    x_label: str
    y_label: str
    x: list[float]
    series: list[Series]
    log: bool = False
    log_x: bool = False
    unit: str = ""
    dots: bool = False
    own_eyes: bool = False
    printed: bool = False

    @property
    def flat(self) -> bool:
        """Whether there is nothing to see: no series ever changes."""
        several = all(len(_known(series)) > 1 for series in self.series)
        return (several or not self.dots) and all(_steady(_known(series)) for series in self.series)

    @property
    def x_axis(self) -> Axis:
        """Along the chart."""
        if self.log_x:
            return Axis.around(self.x, log=True)
        room = 0.5 if self.dots else 0.0
        return Axis(self.x[0] - room, self.x[-1] + room, whole=True)

    @property
    def y_axis(self) -> Axis:
        """Up the chart."""
        values = [y for series in self.series for y in _known(series)]
        floor = 0.0 if min(values) >= 0 else -math.inf
        return Axis.around(values, log=self.log, floor=floor, ceiling=100.0 if self.unit else math.inf)

    def path(self, series: Series, dots: bool = False) -> str:
        """As SVG: y counts from the top. A dot is a line of no length with round ends."""
        across, up, aside = self.x_axis, self.y_axis, self._aside(series)
        places = [
            (across.place(x + aside), round(SIZE - up.place(y), 1))
            for x, y in zip(self.x, series.y, strict=True)
            if y is not None
        ]
        if dots:
            return "".join(f"M{x:g} {y:g}h.01" for x, y in places)
        return "M" + "L".join(f"{x:g} {y:g}" for x, y in places)

    def _aside(self, series: Series) -> float:
        """Dots of several series at the same whole number stand beside each other, so that none hides another."""
        if not self.dots or self.log_x:
            return 0.0
        return (self.series.index(series) - (len(self.series) - 1) / 2) * DODGE / len(self.series)

    def dotted(self, series: Series) -> bool:
        """Whether its points are shown one by one."""
        return self.dots or len(_known(series)) <= DOTTED_POINTS

    def reading(self) -> dict[str, Any]:
        """What the page's script needs to tell the values."""
        return {
            "key": self.key,
            "at": [self.x_axis.place(x) for x in self.x],
            "x": [f"{self.x_label} {number(x)}" for x in self.x],
            "series": [
                {
                    "name": series.name,
                    "colour": series.mark.colour,
                    "y": ["" if y is None else number(y) + self.unit for y in series.y],
                }
                for series in self.series
            ],
        }


@dataclass(frozen=True)
class Steady:
    """What a chart would show as level lines only: (series, value)."""

    title: str
    values: list[tuple[str, str]]
    own_eyes: bool


def charts(runs: Sequence[RunRecord]) -> tuple[list[Chart], list[Steady]]:
    """Everything that these runs have values for: what changes is drawn, what does not is listed."""
    drawn = [chart for chart in (_of_one(runs[0]) if len(runs) == 1 else _of_many(runs)) if chart.series]
    steady = [
        Steady(
            chart.title, [(s.name, number(_known(s)[0]) + chart.unit) for s in chart.series], chart.own_eyes
        )
        for chart in drawn
        if chart.flat
    ]
    return [chart for chart in drawn if not chart.flat], steady


# One run


def _of_one(run: RunRecord) -> list[Chart]:
    spent = dict(by_round(run.unit, run.charges, run.privacy.epsilon_spent))
    return [
        _accuracy(run),
        _nodes(run),
        *_metrics(run),
        _chart("epsilon", "Privacy spent", _how_spent(run), "epsilon", [("epsilon", spent)], printed=True),
        _loss([("loss", run)], f" of {run.part}" if run.part else ""),
        _sensitivity(run),
        _scale([("noise scale", run)]),
    ]


def _accuracy(run: RunRecord) -> Chart:
    lines = [("this run", dict(enumerate(run.accuracy.by_epoch, start=1)))]
    caption, covered = "On the test set, mean over the nodes.", run.accuracy_is_covered
    if run.baselines and run.accuracy.by_epoch:
        caption += " The baselines are not covered by the guarantee."
        for name, baseline in run.baselines.items():
            level = [] if baseline.mean is None else [baseline.mean] * len(run.accuracy.by_epoch)
            lines.append((name, dict(enumerate(baseline.by_epoch or level, start=1))))
    look = {"unit": " %", "printed": covered and not run.baselines, "own_eyes": not covered}
    return _chart("accuracy", "Accuracy", caption, "accuracy (%)", lines, x_label="epoch", **look)


def _nodes(run: RunRecord) -> Chart:
    measured = {"test set": run.accuracy.by_node, "own data": run.accuracy.own_by_node}
    for name, baseline in run.baselines.items():
        measured |= {f"test set, {name}": baseline.by_node, f"own data, {name}": baseline.own_by_node}
    local = " with each node's own local part" if run.local_parameters else ""
    return _chart(
        "nodes",
        "Accuracy of every node at the end",
        f"The shared average{local}.",
        "accuracy (%)",
        [(name, dict(enumerate(values))) for name, values in measured.items()],
        x_label="node",
        unit=" %",
        dots=True,
        own_eyes=True,
    )


def _metrics(run: RunRecord) -> list[Chart]:
    """One chart for each metric asked for, after every epoch."""
    names = {"test": "test set", "own": "own data"}
    metrics = dict.fromkeys(m for epoch in run.metrics_by_epoch for found in epoch.values() for m in found)
    return [
        _chart(
            f"metric-{k}",
            f"Metric: {metric}",
            "Mean over the nodes.",
            metric,
            [(name, _by_epoch(run, which, metric)) for which, name in names.items()],
            x_label="epoch",
            own_eyes=True,
        )
        for k, metric in enumerate(metrics)
    ]


def _by_epoch(run: RunRecord, which: str, metric: str) -> Points:
    """The mean over the nodes for which it is defined."""
    found = {}
    for k, epoch in enumerate(run.metrics_by_epoch, start=1):
        known = [v for v in epoch.get(which, {}).get(metric, ()) if v is not None and math.isfinite(v)]
        if known:
            found[k] = fmean(known)
    return found


def _how_spent(run: RunRecord) -> str:
    if run.unit is not None and not run.unit.has_total:
        return "The sum of the rounds' epsilons, which is not a proven total."
    return "Total epsilon after each round, by the accountant, from the ledger."


def _sensitivity(run: RunRecord) -> Chart:
    lines = [(run.estimator, _column(run, "estimated", positive=True))]
    if any(log.used != log.estimated for log in run.rounds):
        lines.append(("used, with rounding", _column(run, "used", positive=True)))
    lines.append(("real", _column(run, "real", positive=True)))
    names = dict.fromkeys(name for log in run.rounds for name in log.watched)
    lines += [
        (name, {log.round: log.watched[name] for log in run.rounds if log.watched.get(name, 0) > 0})
        for name in names
    ]
    seen = "; real is what it was" if any(log.real is not None for log in run.rounds) else ""
    caption = f"What the noise is calibrated to{seen}."
    return _chart("sensitivity", "Sensitivity", caption, "sensitivity", lines, log=True)


# Several runs


def _of_many(runs: Sequence[RunRecord]) -> list[Chart]:
    named, covered = [(run.name, run) for run in runs], all(run.accuracy_is_covered for run in runs)
    return [
        _chart(
            "accuracy",
            "Accuracy",
            "On the test set, mean over the nodes.",
            "accuracy (%)",
            [(run.name, dict(enumerate(run.accuracy.by_epoch, start=1))) for run in runs],
            x_label="epoch",
            unit=" %",
            printed=covered,
            own_eyes=not covered,
        ),
        _exchange(runs),
        _loss(named),
        _chart(
            "sensitivity",
            "Sensitivity",
            "What the noise is calibrated to.",
            "sensitivity",
            [(name, _column(run, "estimated", positive=True)) for name, run in named],
            log=True,
        ),
        _scale(named),
    ]


def _exchange(runs: Sequence[RunRecord]) -> Chart:
    """What accuracy each run has for its epsilon."""
    points = {
        run.name: {run.privacy.epsilon: found}
        for run in runs
        if run.privacy.epsilon and (found := run.accuracy.judged[0]) is not None
    }
    own = any(run.accuracy.only_own or not run.accuracy_is_covered for run in runs)
    apart = len({epsilon for each in points.values() for epsilon in each}) > 1
    return _chart(
        "exchange",
        "Accuracy against epsilon",
        "Of the whole run; units differ in what they protect.",
        "accuracy (%)",
        [(run.name, points.get(run.name, {}) if apart else {}) for run in runs],
        x_label="epsilon",
        unit=" %",
        dots=True,
        log_x=True,
        printed=not own,
        own_eyes=own,
    )


# Both


def _loss(named: Sequence[tuple[str, RunRecord]], whose: str = "") -> Chart:
    return _chart(
        "loss",
        "Training loss",
        f"Mean over the nodes{whose}, each on its own batch; not noised.",
        "loss",
        [(name, _column(run, "loss")) for name, run in named],
        own_eyes=True,
    )


def _scale(named: Sequence[tuple[str, RunRecord]]) -> Chart:
    lines = [(name, _column(run, "scale", positive=True)) for name, run in named]
    caption = "Of the noise in every number that is sent."
    return _chart("scale", "Noise scale", caption, "scale of the noise", lines, log=True)


def _column(run: RunRecord, name: str, *, positive: bool = False) -> Points:
    """A column of the rounds, without what cannot be drawn."""
    values = {log.round: getattr(log, name) for log in run.rounds}
    return {
        at: y for at, y in values.items() if y is not None and math.isfinite(y) and (y > 0 or not positive)
    }


def _chart(
    key: str,
    title: str,
    caption: str,
    y_label: str,
    lines: Iterable[tuple[str, Points]],
    *,
    x_label: str = "round",
    **look: Any,
) -> Chart:
    """The look of a line follows from its place in `lines`, also when others of them are empty."""
    named = list(lines)
    x = sorted(set().union(*(thinned(points) for _, points in named)))
    series = [
        Series(name, [_short(points.get(at)) for at in x], Mark(index))
        for index, (name, points) in enumerate(named)
        if points
    ]
    return Chart(key, title, caption, x_label, y_label, x, series, **look)


def thinned(points: Points) -> list[float]:
    """The x that stay: all of a short series; of a long one the ends and each stretch's extremes."""
    x = sorted(points)
    if len(x) <= KEPT_POINTS:
        return x
    width = math.ceil(2 * len(x) / KEPT_POINTS)
    kept = {x[0], x[-1]}
    for start in range(0, len(x), width):
        stretch = x[start : start + width]
        kept |= {min(stretch, key=lambda at: points[at]), max(stretch, key=lambda at: points[at])}
    return sorted(kept)


def _known(series: Series) -> list[float]:
    return [y for y in series.y if y is not None]


def _steady(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= 1e-6 * max(abs(value) for value in values)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


# Epsilon spent by round

SPENT_POINTS = 8
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
    step = max(1, math.ceil((len(rounds) - 1) / (SPENT_POINTS - 1)))
    asked = sorted({*rounds[::step], rounds[-1]})
    # The last point is the run's own total and need not be asked for.
    known = [(at, unit.total([charge for _, charge in lines[: ends[at]]]).epsilon) for at in asked[:-1]]
    return [*known, (asked[-1], math.nan)]
