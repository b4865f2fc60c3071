"""The page of one run, and of several beside each other: what its templates need to know."""

import re
from collections.abc import Sequence
from decimal import Decimal

from dpps.privacy.accountant import NO_PROTECTION, label
from dpps.privacy.promise import Privacy
from dpps.privacy.units import UNITS
from dpps.report.axes import Axis
from dpps.report.charts import Chart, Mark, charts
from dpps.report.html import render as fill
from dpps.report.reading import RunRecord
from dpps.runs.baselines import INTERVAL, verdict

TABLE_ROWS = 40
"""The table below a chart shows at most about this many of its points."""

SIMULATION = "simulation: messages not private"
OWN_EYES = "for the node's own eyes"


def render(runs: Sequence[RunRecord]) -> str:
    """The HTML of one run, or of a comparison."""
    drawn, steady = charts(runs)
    facts = {
        "runs": runs,
        "charts": drawn,
        "steady": steady,
        "readings": [chart.reading() for chart in drawn],
        "table_places": table_places,
        "badges": badges,
        "epsilon": epsilon,
        "protected": protected,
        "own_eyes": OWN_EYES,
        "verdict": verdict,
        "interval": INTERVAL,
        "data_names": {"test": "the test set", "own": "each node's own test data"},
        "statement": statement,
        "alike": alike,
        "options_of": options_of,
    }
    if len(runs) == 1:
        return fill("run.html", run=runs[0], **facts)
    nodes = [value for run in runs for value in run.accuracy.judged[1]]
    return fill(
        "comparison.html",
        mark=Mark,
        strip=Axis.around(nodes, floor=0, ceiling=100) if nodes else None,
        baselines=dict.fromkeys(name for run in runs for name in run.baselines),
        **facts,
    )


def protected(unit: str) -> str:
    """What the unit protects, in a few words."""
    if unit == "none":
        return "messages were sent without noise"
    return f"protects {UNITS[unit].protects}" if unit in UNITS and UNITS[unit].protects else unit


def table_places(chart: Chart) -> list[int]:
    """Which of a chart's points are written in the table below it."""
    step = -(-len(chart.x) // TABLE_ROWS)
    return sorted({*range(0, len(chart.x), step), len(chart.x) - 1})


def badges(run: RunRecord) -> list[str]:
    """What must be said beside an epsilon."""
    privacy = run.privacy
    if privacy.unit == "none":
        return ["no protection"]
    useless = privacy.epsilon is None or privacy.epsilon > NO_PROTECTION
    return ["no meaningful protection"] * useless + [SIMULATION] * run.simulated


def epsilon(privacy: Privacy) -> str:
    """The number alone, rounded up as everywhere."""
    text = label(float("inf") if privacy.epsilon is None else privacy.epsilon)
    number = text.removeprefix("epsilon ").partition(" (")[0]
    return number if privacy.epsilon is None else f"{Decimal(number):,}"


_OPENINGS = (
    "Protected:|Guarantee:|No guarantee for the run as a whole:|Not covered:|Also not covered:|No protection:"
)


def statement(text: str) -> list[tuple[str, str]]:
    """(opening words, the rest) of each paragraph."""
    parts = re.split(rf"\s+(?={_OPENINGS}|This run was a simulation)", text)
    found = [re.match(f"({_OPENINGS})?(.*)", part, re.DOTALL) for part in parts]
    return [(match[1] or "", match[2]) for match in found if match]


def alike(runs: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """The runs in groups whose statements differ in nothing but the guarantee, so that each text is read once."""
    groups: dict[tuple[tuple[str, str], ...], list[RunRecord]] = {}
    for run in runs:
        text = tuple(part for part in statement(run.privacy.statement) if part[0] != "Guarantee:")
        groups.setdefault(text, []).append(run)
    return list(groups.values())


def options_of(runs: Sequence[RunRecord]) -> list[dict[str, object]]:
    """Every option that applied to one of the runs, and whether they differ in it."""
    names = dict.fromkeys(name for run in runs for name in run.options)
    return [
        {"name": name, "differs": len({str(run.options.get(name)) for run in runs}) > 1} for name in names
    ]
