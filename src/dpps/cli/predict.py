"""`dpps predict`."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from torch import Tensor
from tyro.conf import Positional, arg

from dpps.cli import DONE
from dpps.cli.arguments import parse_options
from dpps.cli.console import plain_console
from dpps.data.images import image_files
from dpps.disk import check_target, private
from dpps.errors import RunError, UsageError
from dpps.runs.saved import Saved, choose, outputs

_FIRST = b"example,prediction,"
"""How the file of predictions begins."""


@dataclass(frozen=True)
class PredictConfig:
    """Predictions of a trained model for new examples.

    Writes a CSV file: the number of the example, from 1, or the name of the image, the most likely class, and the probability of every class. Predictions
    are made with a node's local parameters: what the run's privacy statement says about these holds for them.

    Example: dpps predict out/demo --input new.csv --output predictions.csv
    """

    run: Positional[Annotated[Path, arg(metavar="RUN")]]
    """Folder written by dpps train --out."""
    input: Path
    """Examples as for --node-data (.csv, .tsv, .parquet, .npz), with or without labels, which are ignored; or a folder of images."""
    output: Path
    """The CSV file to write."""
    node: Annotated[int | None, arg(metavar="K", help_behavior_hint="")] = None
    """Whose model (default: the first node that the folder has)."""


def main(arguments: list[str]) -> int:
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
    _write(config.output, outputs(saved.load(), x).softmax(-1), saved.classes, named or range(1, len(x) + 1))
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


def _write(path: Path, probabilities: Tensor, classes: list[str], names: Sequence[object]) -> None:
    """What is predicted of people is the owner's alone, like all that a run writes."""
    try:
        with open(path, "w", newline="", encoding="utf-8", opener=private) as file:
            writer = csv.writer(file)
            writer.writerow(["example", "prediction", *(f"probability of {what}" for what in classes)])
            for name, row in zip(names, probabilities, strict=True):
                writer.writerow([name, classes[int(row.argmax())], *(f"{p:.6f}" for p in row.tolist())])
    except OSError as error:
        raise RunError(f"--output {path} cannot be written: {error.strerror}; name another file") from error
