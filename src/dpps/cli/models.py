"""What is done with a run that is over: `dpps predict`, `dpps evaluate`, `dpps report`."""

import csv
import json
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from rich import box
from rich.table import Table
from torch import Tensor
from tyro.conf import Positional, arg

from dpps import report as pages
from dpps.cli.console import plain_console, working
from dpps.cli.main import DONE, parse_options
from dpps.data.images import image_files
from dpps.disk import check_target, private
from dpps.errors import RunError, UsageError
from dpps.learning.evaluation import METRICS, ClassRow, of_classes, per_class
from dpps.runs.folder import RunFolder
from dpps.runs.saved_models import Saved, choose, outputs

_FIRST = b"example,prediction,"
"""How the file of predictions begins."""


@dataclass(frozen=True)
class PredictConfig:
    """Predict the classes of new examples with a trained model.

    The CSV file has a line for each example: its number, from 1, or the name of the image; the most likely class; the
    probability of every class. Predictions use a node's local parameters, so what the run's privacy statement says about
    these holds for them.

    Example: dpps predict out/demo --input new.csv --output predictions.csv
    """

    run: Positional[Annotated[Path, arg(metavar="RUN")]]
    """Folder of a run (--out)."""
    input: Annotated[Path, arg(metavar="FILE")]
    """Examples as for --node-data, or a folder of images.

    A table (.csv, .tsv, .parquet, .npz) with or without labels, which are ignored.
    """
    output: Annotated[Path, arg(metavar="FILE")]
    """CSV file to write."""
    node: Annotated[int | None, arg(metavar="K", help_behavior_hint="")] = None
    """Whose model [the first node's]."""


def predict(arguments: list[str]) -> int:
    """Predict, and say where the predictions are."""
    config = parse_options(PredictConfig, arguments, "dpps predict")
    check_target("--output", config.output)
    _keep_other_files(config.output)
    found = choose(config.run, config.node)
    node, path = next(iter(found.items()))
    saved = Saved.read(path)
    x, _ = saved.examples(config.input, labelled=False)
    named = (
        [str(f.relative_to(config.input)) for f in image_files(config.input)]
        if config.input.is_dir()
        else None
    )
    _write_predictions(
        config.output, outputs(saved.load(), x).softmax(-1), saved.classes, named or range(1, len(x) + 1)
    )
    console = plain_console()
    others = f" of {len(found)} (--node K for another)" if len(found) > 1 else ""
    console.print(
        f"predictions {config.output}: {len(x)} examples, by the model of node {node}{others}", markup=False
    )
    return DONE


def _keep_other_files(path: Path) -> None:
    """Earlier predictions are replaced; nothing else is."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        if file.read(len(_FIRST)) != _FIRST:
            raise UsageError(
                f"--output {path} exists and holds no predictions: it is kept; name another file"
            )


def _write_predictions(
    path: Path, probabilities: Tensor, classes: list[str], names: Sequence[object]
) -> None:
    """What is predicted of people is the owner's alone, like all that a run writes."""
    try:
        with open(path, "w", newline="", encoding="utf-8", opener=private) as file:
            writer = csv.writer(file)
            writer.writerow(["example", "prediction", *(f"probability of {what}" for what in classes)])
            for name, row in zip(names, probabilities, strict=True):
                writer.writerow([name, classes[int(row.argmax())], *(f"{p:.6f}" for p in row.tolist())])
    except OSError as error:
        raise RunError(f"--output {path} cannot be written: {error.strerror}; name another file") from error


@dataclass(frozen=True)
class EvaluateConfig:
    """Measure a run's models on labelled examples.

    Nothing here is noised: numbers of private examples, and in the unit contribution all that is computed with local parameters,
    are for the node's own eyes.

    Example: dpps evaluate out/demo --input labelled.csv --metrics accuracy,auroc
    """

    run: Positional[Annotated[Path, arg(metavar="RUN")]]
    """Folder of a run (--out)."""
    input: Annotated[Path, arg(metavar="FILE")]
    """Labelled examples as for --node-data.

    A table (.csv, .tsv, .parquet, .npz), or a folder of images with a sub-folder for every class.
    """
    node: Annotated[int | None, arg(metavar="K", help_behavior_hint="")] = None
    """Whose model [all]."""
    metrics: Annotated[str, arg(metavar="NAME,NAME,..")] = "accuracy"
    """Any of accuracy, balanced-accuracy, auroc, f1, calibration."""
    per_class: bool = False
    """Also recall and precision of every class.

    Recall is how many of the class's examples were found, precision how many predictions of it are right.
    """
    json: bool = False
    """Print JSON."""


def evaluate(arguments: list[str]) -> int:
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
        found: dict[str, Any] = {"nodes": measured, "mean": mean}
        if config.per_class:
            found["classes"] = {node: _rows(table, names) for node, table in tables.items()}
        print(json.dumps(found))
        return DONE
    _print_metrics(metrics, measured, mean)
    if config.per_class:
        for node, table in tables.items():
            _print_classes(node, _rows(table, names))
    return DONE


def _print_metrics(
    metrics: tuple[str, ...], measured: dict[int, dict[str, float]], mean: dict[str, float]
) -> None:
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


def _print_classes(node: int, rows: list[dict[str, Any]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, title=f"node {node}", title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "class" else "right")
    for row in rows:
        table.add_row(*(f"{v:.4f}" if isinstance(v, float) else str(v) for v in row.values()))
    plain_console(markup=False, soft_wrap=False).print(table)


@dataclass(frozen=True)
class ReportConfig:
    """One page about a run: accuracy, what joining gained, what privacy cost and what it means. Several runs are compared.

    The page is one HTML file that opens from disk, loads nothing and prints on two sheets, A4 or letter. The model card, model-card.md, is
    written next to it; --out NAME.md writes the card alone.

    Example: dpps report out/demo --open
    """

    runs: Positional[Annotated[tuple[Path, ...], arg(metavar="RUN [RUN ...]")]]
    """Folders of runs (--out)."""
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    """The page (.html) or the card (.md) [RUN/report.html].

    Several runs are compared in comparison.html, or comparison-2.html and so on where that exists.
    """
    open: bool = False
    """Show the page in the browser."""


def report(arguments: list[str]) -> int:
    """Write the page and say where it is."""
    config = parse_options(ReportConfig, arguments, "dpps report")
    console = plain_console()
    card = config.out is not None and config.out.suffix == ".md"
    if config.out is not None and config.out.suffix not in (".html", ".md"):
        raise UsageError(f"--out {config.out}: a page ends in .html, a model card in .md; name such a file")
    if card and len(config.runs) > 1:
        raise UsageError(
            f"--out {config.out}: a model card is about one run, and {len(config.runs)} are named; name one"
        )
    if config.out is not None:
        check_target("--out", config.out)
    with working(console, "adding up what was spent"):
        pages = _write_report(config, card)
    for kind, page in pages.items():
        console.print(f"{kind:<9} {page}", markup=False)
    if config.open and not card:
        webbrowser.open(pages["report"].resolve().as_uri())
    return DONE


def _write_report(config: ReportConfig, card: bool) -> dict[str, Path]:
    runs, out = config.runs, config.out
    if out is not None:
        return {"card": pages.write_card(runs[0], out)} if card else {"report": pages.write(runs, out)}
    if len(runs) != 1:
        return {"report": pages.write(runs, _unused("comparison"))}
    folder = RunFolder(runs[0])
    if folder.answers.exists():
        return {"report": pages.write(runs, folder.report)}
    return {
        "report": pages.write(runs, folder.report),
        "card": pages.write_card(runs[0], folder.card),
    }


def _unused(name: str) -> Path:
    """A page of other runs is not overwritten."""
    names = chain([Path(f"{name}.html")], (Path(f"{name}-{k}.html") for k in count(2)))
    return next(path for path in names if not path.exists())
