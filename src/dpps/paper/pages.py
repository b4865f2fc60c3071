"""The output of an experiment: CSV files, figures as SVG and PNG, and one HTML page with all of them."""

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from dpps.errors import needs_extra
from dpps.report.page import fill

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Spread(NamedTuple):
    """A mean over seeds and their standard deviation (None for one seed)."""

    mean: float
    deviation: float | None


def spread(values: Sequence[float | None]) -> Spread:
    """Mean and standard deviation of the known values; the mean is NaN when there are none."""
    known = [v for v in values if v is not None]
    return Spread(fmean(known) if known else float("nan"), stdev(known) if len(known) > 1 else None)


class Table:
    """Rows under headings, which are given with | between them. Values are text, numbers, `Spread`s, or None."""

    def __init__(self, headings: str) -> None:
        self.columns = headings.split(" | ")
        self.rows: list[tuple[object, ...]] = []

    def add(self, *values: object) -> None:
        """Add one row."""
        if len(values) != len(self.columns):
            raise ValueError(f"{len(values)} values for {len(self.columns)} columns")
        self.rows.append(values)

    def csv(self, path: Path, mark: str = "") -> None:
        """Write all digits; a spread takes two columns. A mark is a last column, the same in every row."""
        wide = [any(isinstance(row[k], Spread) for row in self.rows) for k in range(len(self.columns))]
        head = [
            (name, f"{name}, deviation") if two else name
            for name, two in zip(self.columns, wide, strict=True)
        ]
        lines: list[list[object]] = []
        for row in (head, *self.rows):
            cells: list[object] = []
            for value, two in zip(row, wide, strict=True):
                cells += value if isinstance(value, tuple) else [value, None] if two else [value]
            lines.append([*cells, mark if lines else "remark"] if mark else cells)
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(lines)  # None is an empty cell


def text(value: object) -> str:
    """A value, short, for reading."""
    if value is None:
        return ""
    if isinstance(value, Spread):
        return text(value.mean) + ("" if value.deviation is None else f" ± {text(value.deviation)}")
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.2e}"
    return str(value)


def figure(panels: int, columns: int) -> tuple["Figure", list[Any]]:
    """A figure with `panels` axes, in rows of `columns`."""
    with needs_extra("plots"):
        from matplotlib.figure import Figure

    rows, columns = -(-panels // columns), min(columns, panels)
    fig = Figure(figsize=(3.1 * columns + 0.6, 2.5 * rows + 0.3), layout="constrained")
    axes = [fig.add_subplot(rows, columns, k + 1) for k in range(panels)]
    for axis in axes:
        axis.tick_params(labelsize=7)
        axis.title.set_fontsize(8)
        axis.grid(alpha=0.25)
    return fig, axes


class Page:
    """Collects tables and figures in a folder and on one HTML page.

    Args:
        folder: where they go.
        title: of the page.
        notes: paragraphs before the tables.
        mark: what every table and figure must say, so that nobody takes it for the paper's setting.
    """

    def __init__(self, folder: Path, title: str, notes: Sequence[str], mark: str = "") -> None:
        self.folder, self.notes, self.mark = folder, notes, mark
        self.title = self._marked(title)
        folder.mkdir(parents=True, exist_ok=True)
        self._parts: list[dict[str, Any]] = []

    def _marked(self, words: str) -> str:
        return f"{words} ({self.mark})" if self.mark else words

    def table(self, name: str, caption: str, table: Table) -> None:
        """Add a table to the page and write it to `NAME.csv`."""
        table.csv(self.folder / f"{name}.csv", self.mark)
        rows = [[text(v) for v in row] for row in table.rows]
        self._parts.append(
            {"svg": "", "title": self._marked(caption), "columns": table.columns, "rows": rows}
        )

    def figure(self, name: str, fig: "Figure", dpi: int = 110) -> None:
        """Add a figure and write it to `NAME.svg` and `NAME.png`. The same data give the same file."""
        import matplotlib as mpl

        if self.mark:
            fig.suptitle(self.mark, fontsize=8)
        with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
            fig.savefig(self.folder / f"{name}.svg", metadata={"Date": None})
        fig.savefig(self.folder / f"{name}.png", dpi=dpi)
        svg = (self.folder / f"{name}.svg").read_text()
        self._parts.append({"svg": svg[svg.index("<svg") :]})

    def save(self, name: str = "index.html") -> Path:
        """Write the page."""
        path = self.folder / name
        path.write_text(fill("paper.html", heading=self.title, notes=self.notes, parts=self._parts))
        return path
