"""The page of one run, of several beside each other, and the model card: templates, and what they need to know.

A page is one file that loads nothing: style and script are put into it.
"""

import re
from collections.abc import Sequence
from decimal import Decimal
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from dpps.disk import private
from dpps.errors import RunError, UsageError
from dpps.privacy.accountant import NO_PROTECTION, label
from dpps.privacy.promise import Privacy
from dpps.privacy.units import UNITS
from dpps.report.charts import Axis, Chart, Mark, charts, number
from dpps.report.read import RunRecord, read_folder, read_run
from dpps.runs.baselines import INTERVAL, verdict
from dpps.runs.run import Run

TABLE_ROWS = 40
"""The table below a chart shows at most about this many of its points."""

SIMULATION = "simulation: messages not private"
OWN_EYES = "for the node's own eyes"
NOTHING = "-"
"""Stands where there is no value."""


def write(folders: Sequence[Path], out: Path) -> Path:
    """The page of one run, or the comparison of several.

    Args:
        folders: folders written by `dpps train`; an unfinished run is shown as far as it has come.
        out: the HTML file.

    Returns:
        `out`.
    """
    if not folders:
        raise UsageError("no run to report: name one or more folders written by dpps train --out")
    names = _names([Path(folder) for folder in folders])
    return _put(render([read_folder(folder, name) for folder, name in names.items()]), out)


def write_card(folder: Path, out: Path) -> Path:
    """The model card of a run, in Markdown, from a folder written by `dpps train`; returns `out`."""
    return _put(model_card(read_folder(folder, Path(folder).resolve().name)), out)


def from_run(run: Run, path: str | Path) -> Path:
    """The page of a run that was started from Python; returns the path of the page."""
    return _put(render([read_run(run, Path(path).stem)]), Path(path))


def _names(folders: list[Path]) -> dict[Path, str]:
    """A short name for each folder: as many of its last parts as it takes to tell all of them apart."""
    paths = {folder: folder.resolve().parts for folder in folders}
    if len(set(paths.values())) < len(folders):
        raise UsageError("the same run is named twice: name every run once")
    for count in range(1, max(len(parts) for parts in paths.values()) + 1):
        names = {folder: "/".join(parts[-count:]) for folder, parts in paths.items()}
        if len(set(names.values())) == len(names):
            break
    return names


def _put(text: str, out: Path) -> Path:
    try:
        with open(out, "w", encoding="utf-8", opener=private) as file:
            file.write(text)
    except OSError as error:
        raise RunError(f"the page {out} cannot be written: {error.strerror}; the run is untouched") from error
    return out


# What is on a page


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


def model_card(run: RunRecord) -> str:
    """The card of one run: data, models, what they are worth, and the privacy statement word for word.

    What was not noised (training loss, label counts, accuracies on a node's own data, baselines) is left out:
    the card is made to be passed on.
    """
    return fill(
        "card.md",
        run=run,
        badges=badges(run),
        epsilon=epsilon(run.privacy),
        protected=protected,
        statement=statement,
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


# Templates


def fill(template: str, **facts: Any) -> str:
    """The text of a template; everything put into HTML is escaped."""
    return _environment().get_template(template).render(facts)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("dpps.report"),
        autoescape=select_autoescape(("html",)),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.globals["asset"] = _asset
    environment.filters |= {
        "number": lambda value: NOTHING if value is None else number(value),
        "percent": lambda value: NOTHING if value is None else f"{value:.1f} %",
        "small": small,
        "setting": _setting,
        "size": _size,
        "duration": _duration,
        "options": _options,
    }
    return environment


def _asset(name: str) -> Markup:
    """A file of this package that is no template: it goes into the page as it is."""
    return Markup(files("dpps.report").joinpath(name).read_text(encoding="utf-8"))


def small(value: float) -> str:
    """As short as it can be: 1e-5."""
    return re.sub(r"e-0*", "e-", f"{value:g}")


def _setting(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return small(value) if isinstance(value, float) else str(value)


def _options(command: str) -> list[str]:
    """A command line in pieces that belong on one line."""
    return re.split(r" (?=--)", command)


def _size(count: int | None) -> str:
    if not count:
        return NOTHING
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
