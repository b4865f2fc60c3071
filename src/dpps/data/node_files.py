"""Each node's own examples from its own folder: `train` and, if wanted, `test`.

With a schema they are tables or images; without one, numbers that are ready for a model.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpps.data.images import labelled_images, unlabelled_images
from dpps.data.schema import ImageSchema, Remarks, Schema, encode, encode_inputs
from dpps.data.tables import ENDINGS, TEXT, Table, read_arrays, read_table
from dpps.errors import UsageError


@dataclass(frozen=True, eq=False)
class NodeFiles:
    """What one node's folder holds: (inputs, labels) to train on, and to test on if there is such a file."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor] | None
    columns: tuple[str, ...] | None = None
    """The names in the first line of a CSV file that is read without a schema."""


def check_headers(found: Mapping[Path, tuple[str, ...] | None]) -> None:
    """Refuse files whose columns have other names or another order: without a schema, columns are known by their place."""
    named = [(path, names) for path, names in found.items() if names is not None]
    for path, names in named[1:]:
        first, expected = named[0]
        if len(names) != len(expected):
            raise UsageError(
                f"--node-data: {path} has {len(names)} columns and {first} has {len(expected)}: all nodes' files must have "
                "the same columns, in the same order"
            )
        for place, (own, other) in enumerate(zip(names, expected, strict=True), start=1):
            if own != other:
                raise UsageError(
                    f"--node-data: column {place} is {own!r} in {path} and {other!r} in {first}: bring the columns of all "
                    "nodes' files into the same order, under the same names"
                )


def node_folder(template: Path, node: int, alone: bool) -> Path:
    """The folder of a node: `{rank}` in --node-data stands for its number.

    It may be left out where a process holds one node only (`alone`).
    """
    if "{rank}" not in str(template) and not alone:
        raise UsageError(
            f"--node-data {template} names one folder for several nodes: write {{rank}} where the node's number belongs, "
            "such as data/node-{rank}"
        )
    return Path(str(template).replace("{rank}", str(node)))


def read_node(
    folder: Path, classes: int, schema: Schema | ImageSchema | None = None, remarks: Remarks | None = None
) -> NodeFiles:
    """Read `train` and perhaps `test` in a node's folder: tables, or folders of images with one sub-folder per class.

    Args:
        folder: of the node.
        classes: without a schema, every label must be one of 0..classes-1.
        schema: what the columns or images mean.
        remarks: collects the warnings about tables of several nodes.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--node-data: {folder} is a file: name the folder that holds it")
    if not folder.is_dir():
        raise UsageError(
            f"--node-data: there is no folder {folder}: name another or make it; {{rank}} counts the nodes from 0 to --nodes - 1"
        )
    if isinstance(schema, ImageSchema):
        train, test = folder / "train", folder / "test"
        return NodeFiles(
            labelled_images(train, schema), labelled_images(test, schema) if test.exists() else None
        )
    paths = [node_table(folder)]
    if (found := _find(folder, "test")) is not None:
        paths.append(found)
    if schema is not None:
        with nullcontext(remarks) if remarks else Remarks() as told:
            parts = [encode(read_table(path), schema, told) for path in paths]
        return NodeFiles(parts[0], parts[1] if found else None)
    parts, headers = [], {}
    for path in paths:
        inputs, labels, headers[path] = _read_numbers(path, labelled=True)
        assert labels is not None
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            raise UsageError(
                f"{path}: labels run from {low} to {high}, with --classes {classes} they must lie in 0 to {classes - 1}"
            )
        parts.append((inputs, labels))
    check_headers(headers)
    return NodeFiles(parts[0], parts[1] if found else None, headers[paths[0]])


def node_table(place: Path) -> Path:
    """The file of a node's own records: the place itself, or `train` in that folder."""
    found = place if place.is_file() else _find(place, "train")
    if found is None:
        endings = ", ".join(f"train{ending}" for ending in ENDINGS)
        unread = ", ".join(sorted(path.name for path in place.glob("[tT]rain*")))
        hint = f" ({unread} cannot be read: save as CSV UTF-8)" if unread else ""
        raise UsageError(f"--node-data: {place} holds none of {endings}: put the node's examples there{hint}")
    return found


def _find(folder: Path, part: str) -> Path | None:
    found = [folder / f"{part}{ending}" for ending in ENDINGS if (folder / f"{part}{ending}").is_file()]
    if len(found) > 1:
        raise UsageError(f"--node-data: {folder} holds {found[0].name} and {found[1].name}: keep one of them")
    return found[0] if found else None


def read_examples(
    path: Path,
    width: int,
    *,
    labelled: bool,
    columns: Sequence[str] | None = None,
    schema: Schema | ImageSchema | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The examples in one file, for a model that is trained, and their labels (None unless `labelled`).

    Args:
        path: as `train` and `test` in a node's folder; without a schema the label may be left out if it is not asked for.
        width: without a schema, how many numbers the model reads of one example.
        labelled: whether labels are asked for; otherwise they are ignored.
        columns: without a schema, the names of the columns in training, the label last.
        schema: how tables became numbers in training.
    """
    if isinstance(schema, ImageSchema):
        return labelled_images(path, schema) if labelled else (unlabelled_images(path, schema), None)
    if schema is not None:
        table = read_table(path)
        return encode(table, schema) if labelled else (encode_inputs(table, schema), None)
    inputs, labels, names = _read_numbers(path, labelled=labelled, width=width)
    for place, (own, known) in enumerate(zip(names or (), columns or (), strict=False), start=1):
        if own != known:
            raise UsageError(
                f"{path}: column {place} is {own!r} and was {known!r} in training: bring the columns into that order"
            )
    return inputs, labels


def _read_numbers(
    path: Path, *, labelled: bool, width: int | None = None
) -> tuple[Tensor, Tensor | None, tuple[str, ...] | None]:
    """Inputs, labels if asked for, and the names of the columns, the label last; `width` numbers per example if given."""
    names, y = None, None
    if path.suffix == ".npz":
        arrays = read_arrays(path)
        for name in ("x", "y") if labelled else ("x",):
            if name not in arrays:
                raise UsageError(
                    f"{path} has no array {name!r}: save with numpy.savez(path, x=inputs, y=labels)"
                )
        x, y = arrays["x"], arrays["y"] if labelled else None
    else:
        table = read_table(path, headed=None if path.suffix in TEXT else True)
        found, names = len(table.names), table.names if table.headed else None
        width = found - 1 if width is None else width
        if found != width + 1 and (labelled or found != width):
            label = "and the label behind them" if labelled else "with or without the label behind them"
            raise UsageError(f"{path} has {found} columns: the model reads {width}, {label}")
        values = _values(table, table.names if labelled else table.names[:width])
        x, y = values[:, :width], values[:, -1] if labelled else None
    if x.dtype.kind not in "biuf" or x.ndim < 2 or not x.size:
        raise UsageError(
            f"{path}: the inputs are {x.dtype} of shape {x.shape}: numbers are needed, one example or more, examples first"
        )
    inputs = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    if x.dtype == np.uint8:  # images as bytes
        inputs /= 255
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        bad = int(np.argmin(np.isfinite(x.reshape(len(x), -1)).all(1)))
        raise UsageError(f"{path}: example {bad} holds NaN or infinity: repair or leave it out")
    if y is None:
        return inputs, None, names
    if y.ndim != 1 or y.dtype.kind not in "iuf" or not np.array_equal(y, np.rint(y)):
        raise UsageError(f"{path}: labels must be whole numbers, one per example")
    if len(x) != len(y):
        raise UsageError(f"{path} has {len(x)} examples and {len(y)} labels: give one label each")
    return inputs, torch.from_numpy(y.astype(np.int64)), names


def _values(table: Table, names: Sequence[str]) -> np.ndarray:
    """The numbers in these columns, (examples, columns)."""
    values = np.empty((len(table), len(names)))
    for place, name in enumerate(names):
        for row, cell in enumerate(table.columns[name]):
            number = table.number(cell)
            if number is None:
                raise UsageError(
                    f"{table.place(row, name)} is {cell!r}, no number: for texts, categories and missing values write a schema "
                    f"(dpps data describe {table.path} --label COLUMN --out schema.toml) and give --schema instead of --classes"
                )
            values[row, place] = number
    return values
