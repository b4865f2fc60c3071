"""`dpps evaluate`."""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from rich import box
from rich.table import Table
from tyro.conf import Positional, arg

from dpps.cli import DONE
from dpps.cli.arguments import parse_options
from dpps.cli.console import plain_console
from dpps.learning.evaluation import METRICS, ClassRow, of_classes, per_class
from dpps.runs.saved import Saved, choose, outputs


@dataclass(frozen=True)
class EvaluateConfig:
    """How good a run's models are on labelled examples.

    Nothing here is noised: numbers of private examples, and in the unit contribution all that is computed with local parameters,
    are for the node's own eyes.

    Example: dpps evaluate out/demo --input labelled.csv --metrics accuracy,auroc --per-class
    """

    run: Positional[Annotated[Path, arg(metavar="RUN")]]
    """Folder written by dpps train --out."""
    input: Path
    """Labelled examples as for --node-data (.csv, .tsv, .parquet, .npz), or a folder of images with a sub-folder for every class."""
    node: Annotated[int | None, arg(metavar="K", help_behavior_hint="")] = None
    """Whose model (default: all that the folder has)."""
    metrics: Annotated[str, arg(metavar="NAME,NAME,..")] = "accuracy"
    """What to measure, with commas between: accuracy, balanced-accuracy, auroc, f1, calibration."""
    per_class: bool = False
    """Also a table with a row for every class: recall (how many of its examples were found) and precision (how many predictions of it are right)."""
    json: bool = False
    """For programs."""


def main(arguments: list[str]) -> int:
    """Measure every model and print a table."""
    config = parse_options(EvaluateConfig, arguments, "dpps evaluate")
    metrics = tuple(name.strip() for name in config.metrics.split(","))
    of_classes(metrics)
    measured, tables, names = {}, {}, []
    for node, path in choose(config.run, config.node).items():
        saved = Saved.read(path)
        x, labels = saved.examples(config.input, labelled=True)
        assert labels is not None
        logits = outputs(saved.load(), x)
        measured[node] = {name: METRICS[name](logits, labels) for name in metrics}
        tables[node], names = per_class(logits, labels), saved.classes
    mean = {name: fmean(found[name] for found in measured.values()) for name in metrics}
    if config.json:
        told: dict[str, Any] = {"nodes": measured, "mean": mean}
        if config.per_class:
            told["classes"] = {node: _rows(table, names) for node, table in tables.items()}
        print(json.dumps(told))
        return DONE
    _say(metrics, measured, mean)
    if config.per_class:
        for node, table in tables.items():
            _say_classes(node, _rows(table, names))
    return DONE


def _say(metrics: tuple[str, ...], measured: dict[int, dict[str, float]], mean: dict[str, float]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("node")
    for name in metrics:
        table.add_column(name, justify="right")
    rows: dict[str, dict[str, float]] = {str(node): found for node, found in measured.items()}
    for whose, found in (rows | {"mean": mean} if len(rows) > 1 else rows).items():
        table.add_row(whose, *(f"{found[name]:.4f}" for name in metrics))
    plain_console(soft_wrap=False).print(table)


def _rows(table: list[ClassRow], names: list[str]) -> list[dict[str, Any]]:
    return [{"class": name, **row.to_json()} for name, row in zip(names, table, strict=True)]


def _say_classes(node: int, rows: list[dict[str, Any]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, title=f"node {node}", title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "class" else "right")
    for row in rows:
        table.add_row(*(f"{v:.4f}" if isinstance(v, float) else str(v) for v in row.values()))
    plain_console(markup=False, soft_wrap=False).print(table)
