"""Each node's own examples from its own folder: `train` and, if wanted, `test`, as .npz or .csv, easily written by hand."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpps.errors import UsageError

ENDINGS = (".npz", ".csv")


@dataclass(frozen=True, eq=False)
class NodeFiles:
    """What one node's folder holds: (inputs, labels) to train on, and to test on where there is such a file."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor] | None


def node_folder(template: Path, node: int, alone: bool) -> Path:
    """The folder of a node: `{rank}` in --node-data stands for its number.

    Args:
        alone: whether this process holds one node only; then the folder may be named without `{rank}`.
    """
    if "{rank}" not in str(template) and not alone:
        raise UsageError(
            f"--node-data {template} names one folder for several nodes: write {{rank}} where the node's number belongs, "
            "such as data/node-{rank}"
        )
    return Path(str(template).replace("{rank}", str(node)))


def read_node(folder: Path, classes: int) -> NodeFiles:
    """Read a node's folder; every label must lie in 0..classes-1."""
    train = _find(folder, "train")
    if train is None:
        raise UsageError(
            f"--node-data: {folder} holds neither train.npz (arrays x and y) nor train.csv (numbers, the label last)"
        )
    test = _find(folder, "test")
    return NodeFiles(_read(train, classes), None if test is None else _read(test, classes))


def _find(folder: Path, part: str) -> Path | None:
    found = [folder / f"{part}{ending}" for ending in ENDINGS if (folder / f"{part}{ending}").is_file()]
    if len(found) > 1:
        raise UsageError(f"--node-data: {folder} holds {found[0].name} and {found[1].name}: keep one of them")
    return found[0] if found else None


def _read(path: Path, classes: int) -> tuple[Tensor, Tensor]:
    x, y = _read_npz(path) if path.suffix == ".npz" else _read_csv(path)
    if len(x) != len(y) or not len(y):
        raise UsageError(
            f"{path} has {len(x)} examples and {len(y)} labels: give one label each, and one or more"
        )
    inputs = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    if x.dtype == np.uint8:  # images as bytes
        inputs /= 255
    bad = np.flatnonzero(~np.isfinite(x.reshape(len(x), -1)).all(1)) if x.dtype.kind == "f" else np.empty(0)
    if bad.size:
        raise UsageError(f"{path}: example {int(bad[0])} holds NaN or infinity: repair or leave it out")
    labels = torch.from_numpy(np.asarray(y, dtype=np.int64))
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise UsageError(
            f"{path}: labels run from {int(labels.min())} to {int(labels.max())}, with --classes {classes} they must lie in 0 to {classes - 1}"
        )
    return inputs, labels


def _read_npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            missing = [name for name in ("x", "y") if name not in arrays]
            if missing:
                raise UsageError(
                    f"{path} has no array {missing[0]!r}: save with numpy.savez(path, x=inputs, y=labels)"
                )
            return arrays["x"], _whole(path, arrays["y"])
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} is no .npz file of numbers: {error}") from error


def _read_csv(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Numbers separated by commas, one example a line, the label last; a first line of names is passed over."""
    try:
        lines = path.read_text().splitlines()
        names = bool(lines) and not _numeric(lines[0])
        table = np.loadtxt(lines[names:], delimiter=",", dtype=np.float64, ndmin=2)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no table of numbers: {error}") from error
    if table.shape[1] < 2:
        raise UsageError(f"{path} has {table.shape[1]} column: at least one input and the label are needed")
    return table[:, :-1], _whole(path, table[:, -1])


def _numeric(line: str) -> bool:
    try:
        [float(cell) for cell in line.split(",")]
    except ValueError:
        return False
    return True


def _whole(path: Path, y: np.ndarray) -> np.ndarray:
    if y.ndim != 1 or y.dtype.kind not in "iuf" or not np.array_equal(y, np.rint(y)):
        raise UsageError(f"{path}: labels must be whole numbers, one per example")
    return y.astype(np.int64)
