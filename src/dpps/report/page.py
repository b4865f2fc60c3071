"""The page of one run, the comparison of several, and the model card: templates, and what they need to know.

A page is one file that loads nothing and runs no script: the style sheet is put into it.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from dpps.disk import private
from dpps.errors import RunError, UsageError
from dpps.privacy.promise import Privacy
from dpps.privacy.units import UNITS
from dpps.report import words
from dpps.report.charts import Axis, Chart, Line, charts
from dpps.report.read import Reported, read_folder, read_run
from dpps.report.words import number
from dpps.runs.baselines import INTERVAL, NO_COST, OWN_EYES, Gain, gains, measured_on
from dpps.runs.folder import RunFolder
from dpps.runs.run import Run
from dpps.runs.summary import DATA, Summary
from dpps.tasks import Estimate

LISTED_NODES = 40
"""Of more nodes, only the first are listed one by one."""
NOTHING = "-"
"""Stands where there is no value."""


def write(folders: Sequence[Path], out: Path) -> Path:
    """Write the page of one run, or the comparison of several.

    Args:
        folders: folders written by `dpps train`. An unfinished run is shown up to its last round.
        out: the HTML file.

    Returns:
        `out`.
    """
    if not folders:
        raise UsageError("no run to report: name one or more folders written by dpps train --out")
    if len(folders) == 1 and RunFolder(folders[0]).answers.exists():
        return _put(render_answers(Path(folders[0])), out)
    names = _names([Path(folder) for folder in folders])
    return _put(render([read_folder(folder, name) for folder, name in names.items()]), out)


def write_card(folder: Path, out: Path) -> Path:
    """Write the model card of a run in Markdown, from a folder written by `dpps train`. Returns `out`."""
    return _put(model_card(read_folder(folder, Path(folder).resolve().name)), out)


def from_run(run: Run, path: str | Path) -> Path:
    """Write the page of a run made in Python. Returns the path of the page."""
    return _put(render([read_run(run, Path(path).stem)]), Path(path))


def _names(folders: list[Path]) -> dict[Path, str]:
    """A short name for each folder: as many of its last parts as it takes to tell all of them apart."""
    paths = {folder: folder.resolve().parts for folder in folders}
    if len(set(paths.values())) < len(folders):
        raise UsageError("the same run is named twice: name every run once")
    length = next(n for n in count(1) if len({parts[-n:] for parts in paths.values()}) == len(folders))
    return {folder: "/".join(parts[-length:]) for folder, parts in paths.items()}


def _put(text: str, out: Path) -> Path:
    try:
        with open(out, "w", encoding="utf-8", opener=private) as file:
            file.write(text)
    except OSError as error:
        raise RunError(f"the page {out} cannot be written: {error.strerror}; the run is untouched") from error
    return out


# What is on a page


def render(runs: Sequence[Reported]) -> str:
    """The HTML of one run, or of a comparison."""
    drawn, run = charts(runs), runs[0]
    facts: dict[str, Any] = {
        "runs": runs,
        "charts": [chart for chart in drawn if not chart.flat],
        "steady": [chart for chart in drawn if chart.flat],
    }
    if len(runs) > 1:
        names = dict.fromkeys(name for each in runs for name in each.options)
        differs = {name: len({str(each.options.get(name)) for each in runs}) > 1 for name in names}
        alike = list(_grouped(runs, _without_guarantee).values())
        return fill("comparison.html", line=Line, alike=alike, options=differs, **facts)
    single, whole = gains(run.summary)
    reach = [edge for gain in (*single, *whole) for edge in (0.0, *gain.interval)]
    facts |= {"run": run, "single": single, "whole": whole, "strip": Axis.around(reach) if reach else None}
    return fill("run.html", measured_on=measured_on(run.summary), nodes=node_rows(run.summary), **facts)


def render_answers(folder: Path) -> str:
    """The HTML of the answers in a folder written by `dpps stats`."""
    try:
        found = json.loads(RunFolder(folder).answers.read_text(encoding="utf-8"))
        privacy = Privacy(**found["privacy"])
        answers = [_drawn(answer) for answer in found["answers"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"the answers in {folder} cannot be read ({error}): restore answers.json") from error
    suspected = words.ONE_RECORD if UNITS[privacy.unit].per_example else words.WHOLE_NODE
    return fill(
        "answers.html",
        name=folder.resolve().name,
        nodes=found["nodes"],
        privacy=privacy,
        answers=answers,
        meaning=words.odds(privacy, suspected),
    )


def _drawn(answer: Mapping[str, Any]) -> dict[str, Any]:
    """One question: a row for every number, the axis they share, and a curve where they are one."""
    axis = next((name for name in ("labels", "terms", "at", "times") if name in answer), "")
    labels = [" / ".join(map(str, x)) if isinstance(x, list) else str(x) for x in answer.get(axis, [""])]
    names = ("value", "low", "high", "noise")
    columns = [answer[name] if axis else [answer[name]] for name in names]
    rows = [dict(zip(("label", *names), row, strict=True)) for row in zip(labels, *columns, strict=True)]
    known = [row for row in rows if row["value"] is not None]
    # slopes have units of their own, so they share no axis
    ends = [row[name] for row in known for name in ("low", "high") if axis != "terms"]
    chart = None
    if axis == "times" and len(known) > 1 and not any(isinstance(x, list) for x in answer[axis]):
        ends_of = {"survival": "value", "lower end": "low", "upper end": "high"}
        lines = [
            Line(name, {float(row["label"]): row[key] for row in known}, k)
            for k, (name, key) in enumerate(ends_of.items())
        ]
        caption = "The outer lines are the ends of the 95 % interval at each time."
        chart = Chart(f"curve-{answer['query']}", "Survival", caption, lines, "share alive", "time")
    return {
        "query": answer["query"],
        "rows": rows,
        "axis": Axis.around(ends) if ends else None,
        "chart": chart,
    }


def model_card(run: Reported) -> str:
    """The card of one run: data, models, what they are worth, and the privacy statement word for word.

    What was not noised (training loss, label counts, accuracies on a node's own data, baselines) is left out:
    the card is made to be passed on.
    """
    return fill("card.md", run=run)


def node_rows(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a table: what was measured of every node at the end."""
    columns: dict[str, list[str]] = {}
    for which, accuracies in (("test", summary.accuracy_by_node), ("own", summary.own_accuracy_by_node)):
        if accuracies:
            columns[f"accuracy {DATA[which]}"] = [_percent(v) for v in accuracies]
    for which, scores in (summary.scores or {}).items():
        for name, found in scores.items():
            if found.by_node and name != "accuracy" and name not in summary.metrics_by_node.get(which, {}):
                columns[f"{name} {DATA[which]}"] = [_estimate(each) for each in found.by_node]
    for which, measured in summary.metrics_by_node.items():
        for name, values in measured.items():
            columns[f"{name} {DATA[which]}"] = ["undefined" if v is None else f"{v:.3f}" for v in values]
    nodes = max(map(len, columns.values()), default=0)
    listed = range(min(nodes, LISTED_NODES))
    rows = [[summary.node_name(k), *(values[k] for values in columns.values())] for k in listed]
    if nodes > LISTED_NODES:
        rows.append([f"... {nodes} nodes; summary.json has them all", *[""] * len(columns)])
    return list(columns), rows


def _level(gain: Gain, which: str) -> str:
    """One of a gain's three values, with as many digits as other numbers of the page have."""
    found: Estimate = getattr(gain, which)
    return _percent(100 * found.value) if gain.metric.percent else gain.text(found)


def _estimate(found: Estimate | None) -> str:
    if found is None:
        return "undefined"
    return f"{found.value:.4g}" + ("" if found.margin is None else f" ± {found.margin:.2g}")


def _without_guarantee(run: Reported) -> str:
    parts = words.statement(run.summary.privacy.statement)
    return str([part for part in parts if part[0] != "Guarantee:"])


def _grouped(runs: Sequence[Reported], text: Callable[[Reported], str]) -> dict[str, list[Reported]]:
    """The runs by a text that some of them have in common, so that each is read once."""
    groups: dict[str, list[Reported]] = {}
    for run in runs:
        groups.setdefault(text(run), []).append(run)
    return groups


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
    environment.globals |= {
        "style": Markup(files("dpps.report").joinpath("style.css").read_text(encoding="utf-8")),
        "words": words,
        "level": _level,
        "interval_words": INTERVAL,
        "no_cost": NO_COST,
        "not_noised": OWN_EYES,
        "data": DATA,
    }
    environment.filters |= {
        "number": lambda value: NOTHING if value is None else number(value),
        "percent": _percent,
        "setting": _setting,
        "size": _size,
        "duration": _duration,
        "options": lambda command: re.split(r" (?=--)", command),
        "members": _members,
        "groupby_meaning": lambda runs: _grouped(runs, words.meaning).items(),
    }
    return environment


def _members(summary: Summary) -> str:
    """Who took part, by name, where all have names."""
    names = summary.members or summary.node_names or ()
    return ", ".join(names) if len(names) == summary.config["nodes"] <= LISTED_NODES else ""


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f} %"


def _setting(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return words.small(value) if isinstance(value, float) else str(value)


def _size(sent: int | None) -> str:
    if not sent:
        return NOTHING
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if sent >= size:
            return f"{sent / size:.3g} {unit}"
    return f"{sent} B"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
