"""What the page draws: charts of one run, and charts that lay several runs over each other."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dpps.report.story import Story, finite

KEPT_POINTS = 400
"""A longer series is thinned: of each stretch its smallest and its largest value stay."""

Points = Mapping[int, float]
"""x -> y."""


@dataclass(frozen=True)
class Series:
    """One line of a chart. `y` runs along the chart's `x`; None where this series has no value."""

    name: str
    y: list[float | None]
    tone: int
    """Which colour of the palette."""


@dataclass(frozen=True)
class Chart:
    """One figure of the page.

    Attributes:
        kind: ``line``: y over x; ``dots``: a value per node, with the mean; ``strip``: a column of nodes per series.
    """

    key: str
    title: str
    caption: str
    x_label: str
    y_label: str
    x: list[int]
    series: list[Series]
    log: bool = False
    kind: Literal["line", "dots", "strip"] = "line"
    unit: str = ""

    def to_json(self) -> dict[str, Any]:
        """For the page's script."""
        return asdict(self)


def charts(stories: Sequence[Story]) -> list[Chart]:
    """Everything that these runs have values for."""
    drawn = _of_one(stories[0]) if len(stories) == 1 else _of_many(stories)
    return [chart for chart in drawn if chart.series]


# One run


def _of_one(story: Story) -> list[Chart]:
    return [
        _accuracy([("mean over nodes", story)], "On the test set, mean over the nodes."),
        _nodes(story),
        _epsilon([("epsilon", story)], _how_spent(story)),
        _chart(
            "loss",
            "Training loss",
            f"Mean over the nodes{_of_part(story)}, each on its own batch.",
            "loss",
            [("loss", _column(story, "loss"))],
        ),
        _sensitivity(story),
        _scale([("noise scale", story)]),
    ]


def _of_part(story: Story) -> str:
    return f" of {story.part}" if story.part else ""


def _how_spent(story: Story) -> str:
    if story.privacy.unit == "node-swap":
        return "The rounds' epsilons added up plainly; the words below say what that is worth."
    return "Total epsilon after each round, by the accountant, from the ledger."


def _nodes(story: Story) -> Chart:
    series = [("test set", story.accuracy_by_node), ("own data", story.own_accuracy_by_node)]
    lines = [(name, dict(enumerate(values))) for name, values in series if values]
    return _chart(
        "nodes",
        "Accuracy of every node at the end",
        "Shared average with each node's own local part; the line is the mean.",
        "accuracy (%)",
        lines,
        x_label="node",
        kind="dots",
        unit=" %",
    )


def _sensitivity(story: Story) -> Chart:
    lines = [(story.estimator, _column(story, "estimated", positive=True))]
    if any(log.used != log.estimated for log in story.rounds):
        lines.append(("used, with rounding", _column(story, "used", positive=True)))
    lines.append(("real", _column(story, "real", positive=True)))
    names = dict.fromkeys(name for log in story.rounds for name in log.watched)
    lines += [
        (name, {log.round: log.watched[name] for log in story.rounds if log.watched.get(name, 0) > 0})
        for name in names
    ]
    real = any(log.real is not None for log in story.rounds)
    seen = "; real is what it was" if real else ""
    return _chart(
        "sensitivity",
        "Sensitivity",
        f"What the noise is calibrated to{seen}.",
        "sensitivity",
        lines,
        log=True,
    )


# Several runs


def _of_many(stories: Sequence[Story]) -> list[Chart]:
    named = [(story.name, story) for story in stories]
    return [
        _accuracy(named, "On the test set, mean over the nodes."),
        _strip(stories),
        _epsilon(named, "Epsilon after each round; the units differ in what they protect."),
        _chart(
            "loss",
            "Training loss",
            "Mean over the nodes, each on its own batch.",
            "loss",
            [(name, _column(story, "loss")) for name, story in named],
        ),
        _chart(
            "sensitivity",
            "Sensitivity",
            "What the noise is calibrated to.",
            "sensitivity",
            [(name, _column(story, "estimated", positive=True)) for name, story in named],
            log=True,
        ),
        _scale(named),
    ]


def _strip(stories: Sequence[Story]) -> Chart:
    most = max(len(story.accuracy_by_node) for story in stories)
    series = [
        Series(story.name, _padded(story.accuracy_by_node, most), tone)
        for tone, story in enumerate(stories)
        if story.accuracy_by_node
    ]
    return Chart(
        "nodes",
        "Accuracy of every node at the end",
        "One dot per node; the bar is the mean.",
        "node",
        "accuracy (%)",
        list(range(most)),
        series,
        kind="strip",
        unit=" %",
    )


def _padded(values: Sequence[float], length: int) -> list[float | None]:
    return [*(_short(value) for value in values), *[None] * (length - len(values))]


# Both


def _accuracy(named: Sequence[tuple[str, Story]], caption: str) -> Chart:
    lines = [(name, dict(enumerate(story.accuracy_by_epoch, start=1))) for name, story in named]
    return _chart("accuracy", "Accuracy", caption, "accuracy (%)", lines, x_label="epoch", unit=" %")


def _epsilon(named: Sequence[tuple[str, Story]], caption: str) -> Chart:
    lines = [(name, dict(story.spent)) for name, story in named]
    ends = [story.spent[-1][1] for _, story in named if story.spent]
    apart = bool(ends) and max(ends) > 30 * min(ends) > 0
    return _chart("epsilon", "Privacy spent", caption, "epsilon", lines, log=apart)


def _scale(named: Sequence[tuple[str, Story]]) -> Chart:
    lines = [(name, _column(story, "scale", positive=True)) for name, story in named]
    return _chart(
        "scale",
        "Noise scale",
        "Of the noise in every number that is sent.",
        "scale of the noise",
        lines,
        log=True,
    )


def _column(story: Story, name: str, *, positive: bool = False) -> Points:
    """A column of the rounds, without what cannot be drawn."""
    values = {log.round: getattr(log, name) for log in story.rounds}
    return {at: y for at, y in values.items() if finite(y) and (y > 0 or not positive)}


def _chart(
    key: str,
    title: str,
    caption: str,
    y_label: str,
    lines: Iterable[tuple[str, Points]],
    *,
    x_label: str = "round",
    log: bool = False,
    kind: Literal["line", "dots"] = "line",
    unit: str = "",
) -> Chart:
    named = list(lines)
    kept = [thinned(points) for _, points in named]
    x = sorted(set().union(*kept))
    series = [
        Series(name, [_short(points.get(at)) for at in x], tone)
        for tone, (name, points) in enumerate(named)
        if points
    ]
    return Chart(key, title, caption, x_label, y_label, x, series, log, kind, unit)


def thinned(points: Points) -> list[int]:
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


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
