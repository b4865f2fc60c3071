"""Commands for finished runs: `dpps predict`, `dpps evaluate`, `dpps report`."""

import csv
import json
import webbrowser
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any

from rich import box
from torch import Tensor
from tyro.conf import Positional, arg

from dpps import report as pages
from dpps.cli.main import DONE, parse_options, plain_console, plain_table, working
from dpps.data.images import image_files
from dpps.disk import check_target, private
from dpps.errors import RunError, UsageError
from dpps.runs.folder import RunFolder
from dpps.runs.saved_models import Saved, choose, outputs
from dpps.tasks import Classification, Estimate, measure, per_class


@dataclass(frozen=True)
class PredictConfig:
    """Predict new examples with a trained model.

    The CSV file has a line for each example: its number, from 1, or the name of the image, and the prediction. That is
    the most likely class and the probability of each class, a number, or a risk and survival probabilities. Predictions
    use a node's local parameters, so what the run's privacy statement says about these applies to them.

    Example: dpps predict out/demo --input new.csv --output predictions.csv
    """

    run: Positional[Annotated[Path, arg(metavar="RUN")]]
    """Folder of a run (--out)."""
    input: Annotated[Path, arg(metavar="FILE")]
    """Examples as for --node-data, or a folder of images.

    A table (.csv, .tsv, .parquet, .npz). It needs no labels; if there are any, they are ignored.
    """
    output: Annotated[Path, arg(metavar="FILE")]
    """CSV file to write."""
    node: Annotated[int | None, arg(metavar="K", help_behavior_hint="")] = None
    """Node whose model is used [the first]."""


def predict(arguments: list[str]) -> int:
    """Predict, and say where the predictions are."""
    config = parse_options(PredictConfig, arguments, "dpps predict")
    check_target("--output", config.output)
    if config.output.exists():
        with open(config.output, "rb") as earlier:
            if earlier.read(8) != b"example,":
                raise UsageError(
                    f"--output {config.output} exists and holds no predictions: it is kept; name another file"
                )
    found = choose(config.run, config.node)
    node, path = next(iter(found.items()))
    saved = Saved.read(path)
    x, _ = saved.examples(config.input, labelled=False)
    names: Sequence[object] = range(1, len(x) + 1)
    if config.input.is_dir():
        names = [file.relative_to(config.input) for file in image_files(config.input)]
    columns = saved.task.predictions(outputs(saved.load(), x))
    try:  # readable by the owner only, like all that a run writes
        with open(config.output, "w", newline="", encoding="utf-8", opener=private) as file:
            writer = csv.writer(file)
            writer.writerow(["example", *columns])
            for name, *row in zip(names, *columns.values(), strict=True):
                writer.writerow([name, *(v if isinstance(v, str) else f"{v:.6f}" for v in row)])
    except OSError as error:
        why = f"{error.strerror}; name another file"
        raise RunError(f"--output {config.output} cannot be written: {why}") from error
    others = f" of {len(found)} (--node K for another)" if len(found) > 1 else ""
    said = f"predictions {config.output}: {len(x)} examples, by the model of node {node}{others}"
    plain_console().print(said, markup=False)
    return DONE


@dataclass(frozen=True)
class EvaluateConfig:
    """Measure a run's models on labelled examples.

    The results carry no noise. Results on private examples, and in the unit contribution everything computed with local
    parameters, are for the node's own eyes.

    Example: dpps evaluate out/demo --input labelled.csv --metrics accuracy,auroc
    """

    run: Positional[Annotated[Path, arg(metavar="RUN")]]
    """Folder of a run (--out)."""
    input: Annotated[Path, arg(metavar="FILE")]
    """Labelled examples as for --node-data.

    A table (.csv, .tsv, .parquet, .npz), or a folder of images with one sub-folder per class.
    """
    node: Annotated[int | None, arg(metavar="K", help_behavior_hint="")] = None
    """Node whose models are measured [all]."""
    metrics: Annotated[str | None, arg(metavar="NAME,NAME,..", help_behavior_hint="")] = None
    """Names of metrics [those of the task].

    Classes: accuracy, balanced-accuracy, log-loss, brier, auroc, f1, calibration, calibration-slope. Numbers: rmse, mae, r2.
    Times: c-index, log-loss.
    """
    per_class: bool = False
    """Also recall and precision of every class.

    Recall is how many of the class's examples were found, precision how many predictions of it are right.
    """
    json: bool = False
    """Print JSON."""


def evaluate(arguments: list[str]) -> int:
    """Measure every model and print a table."""
    config = parse_options(EvaluateConfig, arguments, "dpps evaluate")
    names = None if config.metrics is None else [name.strip() for name in config.metrics.split(",")]
    sets = {}
    for node, path in choose(config.run, config.node).items():
        saved = Saved.read(path)
        task = saved.task
        metrics = [task.metric(name) for name in names or task.metrics]
        if config.per_class and not isinstance(task, Classification):
            raise UsageError(f"--per-class: the run predicts no classes but is a {task.name}: leave it out")
        x, targets = saved.examples(config.input, labelled=True)
        assert targets is not None
        sets[node] = outputs(saved.load(), x), targets

    def measured(of: Sequence[tuple[Tensor, Tensor]], *, common: bool) -> dict[str, Estimate | None]:
        """None where a metric is not defined for these examples."""
        found: dict[str, Estimate | None] = dict.fromkeys(metric.name for metric in metrics)
        for metric in metrics:
            with suppress(UsageError):
                found[metric.name] = measure(task, metric, of, common=common).pooled
        return found

    by_node = {node: measured([one], common=False) for node, one in sets.items()}
    mean = measured(list(sets.values()), common=True)
    classes: dict[int, list[dict[str, Any]]] = {}
    if config.per_class and isinstance(task, Classification):
        for node, one in sets.items():
            rows = zip(task.classes, per_class(*one), strict=True)
            classes[node] = [{"class": name, **row.to_json()} for name, row in rows]
    if config.json:
        found: dict[str, Any] = {
            "task": task.name,
            "nodes": {node: _values(each) for node, each in by_node.items()},
            "mean": _values(mean),
            "standard_errors": {node: _values(each, "standard_error") for node, each in by_node.items()},
        }
        print(json.dumps(found | ({"classes": classes} if classes else {})))
        return DONE
    nodes = {f"node {node}": found for node, found in by_node.items()}
    _print_metrics([*mean], nodes | ({"mean": mean} if len(nodes) > 1 else {}))
    for node, rows_of_node in classes.items():
        title, *numbers = rows_of_node[0]
        table = plain_table((title,), numbers, box=box.SIMPLE_HEAD, title=f"node {node}")
        for row_of_class in rows_of_node:
            table.add_row(*(f"{v:.4f}" if isinstance(v, float) else str(v) for v in row_of_class.values()))
        plain_console(markup=False, soft_wrap=False).print(table)
    return DONE


def _values(found: Mapping[str, Estimate | None], which: str = "value") -> dict[str, float | None]:
    return {name: None if each is None else getattr(each, which) for name, each in found.items()}


def _print_metrics(metrics: Sequence[str], nodes: Mapping[str, Mapping[str, Estimate | None]]) -> None:
    style: dict[str, Any] = {"box": None, "pad_edge": False, "padding": (0, 2, 0, 0)}
    # the shorter list goes across, so that a terminal is wide enough
    if len(nodes) < len(metrics):
        rows = [[name, *(_cell(found[name]) for found in nodes.values())] for name in metrics]
        table = plain_table(("metric",), [*nodes], **style)
    else:
        rows = [[whose, *(_cell(found[name]) for name in metrics)] for whose, found in nodes.items()]
        table = plain_table(("node",), metrics, **style)
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*row)
    plain_console(soft_wrap=False).print(table)


def _cell(found: Estimate | None) -> str:
    """A value and half the width of its 95 % interval."""
    if found is None:
        return "not defined"
    return f"{found.value:.3f}" + ("" if found.margin is None else f" ± {found.margin:.3f}")


@dataclass(frozen=True)
class ReportConfig:
    """Write one page about a run: how good it is, what joining gained, what privacy cost. Several runs are compared.

    The page is one HTML file that opens from disk, loads nothing and prints on two sheets, A4 or letter. The model card,
    model-card.md, is written next to it; --out NAME.md writes the card alone.

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
    console, runs, out = plain_console(), config.runs, config.out
    card = out is not None and out.suffix == ".md"
    if out is not None and out.suffix not in (".html", ".md"):
        raise UsageError(f"--out {out}: a page ends in .html, a model card in .md; name such a file")
    if card and len(runs) > 1:
        raise UsageError(f"--out {out}: a model card is about one run, and {len(runs)} are named; name one")
    if out is not None:
        check_target("--out", out)
    written: dict[str, Path] = {}
    with working(console, "adding up what was spent"):
        if not card:
            page = RunFolder(runs[0]).report if len(runs) == 1 else _unused("comparison")
            written["report"] = pages.write(runs, out or page)
        if card or (out is None and len(runs) == 1 and not RunFolder(runs[0]).answers.exists()):
            written["card"] = pages.write_card(runs[0], out or RunFolder(runs[0]).card)
    for kind, path in written.items():
        console.print(f"{kind:<9} {path}", markup=False)
    if config.open and not card:
        webbrowser.open(written["report"].resolve().as_uri())
    return DONE


def _unused(name: str) -> Path:
    """A page of other runs is not overwritten."""
    names = chain([Path(f"{name}.html")], (Path(f"{name}-{k}.html") for k in count(2)))
    return next(path for path in names if not path.exists())
