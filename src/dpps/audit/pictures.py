"""Pictures of what an attack has read: one line of images a setting, below the truth."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpps.errors import UsageError, needs_extra

Line = tuple[str, Sequence[NDArray[np.floating]]]
"""What stands beside a line, and its images."""


def check_picture(file: Path) -> None:
    """Refuse a file name before anything is computed for it."""
    if file.suffix.lower() not in (".png", ".svg"):
        raise UsageError(f"--plot {file}: use a name that ends in .png or .svg")
    if not file.parent.is_dir():
        raise UsageError(f"--plot {file}: the directory does not exist; create it first")
    with needs_extra("plots"):
        import matplotlib  # noqa: F401 - whether it is there


def draw(file: Path, lines: Sequence[Line], heads: Sequence[str] = (), title: str = "") -> None:
    """Draw lines of equally many images, each with its own range of greys; above the first line, what each column shows."""
    check_picture(file)
    from matplotlib.figure import Figure

    columns = len(lines[0][1])
    figure = Figure(figsize=(1.0 * columns + 2.6, 1.05 * len(lines) + 0.6), layout="constrained")
    figure.suptitle(title, fontsize=9)
    axes = figure.subplots(len(lines), columns, squeeze=False)
    for (name, images), row in zip(lines, axes, strict=True):
        row[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
        for axis, pixels in zip(row, images, strict=True):
            low, high = np.quantile(pixels, [0.01, 0.99])
            axis.imshow(pixels, cmap="gray", vmin=low, vmax=max(high, low + 1e-9))
            axis.set(xticks=[], yticks=[])
    for axis, head in zip(axes[0], heads, strict=False):
        axis.set_title(head, fontsize=7)
    figure.savefig(file, dpi=120)
