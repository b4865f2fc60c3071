"""What an experiment leaves behind: CSV files, figures as SVG and PNG, and one HTML page that holds all of it."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from dpps.errors import needs_extra
from dpps.report.page import fill

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Spread:
    """A mean over seeds and the deviation between them (None for one seed)."""

    mean: float
    deviation: float | None


def mean(values: Sequence[float | None]) -> float:
    """The mean of what is there; NaN when nothing is."""
    known = [v for v in values if v is not None]
    return fmean(known) if known else float("nan")


def spread(values: Sequence[float | None]) -> Spread:
    """Mean and deviation over seeds."""
    known = [v for v in values if v is not None]
    return Spread(mean(known), stdev(known) if len(known) > 1 else None)


class Table:
    """Rows under headings. Values are text, numbers, `Spread`s, or None for nothing.

    Args:
        headings: with | between them.
    """

    def __init__(self, headings: str) -> None:
        self.columns = headings.split(" | ")
        self.rows: list[tuple[object, ...]] = []

    def add(self, *values: object) -> None:
        """One row."""
        if len(values) != len(self.columns):
            raise ValueError(f"{len(values)} values for {len(self.columns)} columns")
        self.rows.append(values)

    def csv(self, path: Path, mark: str = "") -> None:
        """All digits; a spread takes two columns. A mark is a last column, the same in every row."""
        wide = [any(isinstance(row[k], Spread) for row in self.rows) for k in range(len(self.columns))]
        head = [
            name for k, c in enumerate(self.columns) for name in ((c, f"{c}, deviation") if wide[k] else (c,))
        ]
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*head, *(["remark"] if mark else [])])
            for row in self.rows:
                cells = [v for k, value in enumerate(row) for v in _cells(value, wide[k])]
                writer.writerow([*cells, *([mark] if mark else [])])


def _cells(value: object, wide: bool) -> list[object]:
    if isinstance(value, Spread):
        return [value.mean, "" if value.deviation is None else value.deviation]
    return ["" if value is None else value, *([""] if wide else [])]


def text(value: object) -> str:
    """Short, for reading."""
    if value is None:
        return ""
    if isinstance(value, Spread):
        return text(value.mean) + ("" if value.deviation is None else f" ± {text(value.deviation)}")
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.2e}"
    return str(value)


def figure(panels: int, columns: int) -> tuple["Figure", list[Any]]:
    """A figure with so many axes, in rows."""
    with needs_extra("plots"):
        from matplotlib.figure import Figure

    rows = -(-panels // columns)
    fig = Figure(figsize=(3.1 * min(columns, panels) + 0.6, 2.5 * rows + 0.3), layout="constrained")
    axes = [fig.add_subplot(rows, min(columns, panels), k + 1) for k in range(panels)]
    for axis in axes:
        axis.tick_params(labelsize=7)
        axis.title.set_fontsize(8)
        axis.grid(alpha=0.25)
    return fig, axes


@dataclass(frozen=True)
class Part:
    """A table or a figure of a page."""

    title: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    svg: str = ""


class Page:
    """Collects tables and figures into a folder and `index.html`.

    Args:
        folder: where they go.
        title: of the page.
        notes: what is said before the tables.
        mark: what must be said of each of them, so that it is not taken for the paper's setting.
    """

    def __init__(self, folder: Path, title: str, notes: Sequence[str], mark: str = "") -> None:
        self.folder, self.mark, self.notes = folder, mark, notes
        self.title = self._marked(title)
        folder.mkdir(parents=True, exist_ok=True)
        self._parts: list[Part] = []

    def table(self, name: str, caption: str, table: Table) -> None:
        """`NAME.csv`, and on the page."""
        table.csv(self.folder / f"{name}.csv", self.mark)
        self.show(caption, table)

    def show(self, caption: str, table: Table) -> None:
        """On the page only."""
        self._parts.append(
            Part(self._marked(caption), table.columns, [[text(v) for v in row] for row in table.rows])
        )

    def figure(self, name: str, fig: "Figure", dpi: int = 110) -> None:
        """`NAME.svg`, `NAME.png`, and on the page. The same data give the same file."""
        import matplotlib as mpl

        if self.mark:
            fig.suptitle(self.mark, fontsize=8)
        with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
            fig.savefig(self.folder / f"{name}.svg", metadata={"Date": None})
        fig.savefig(self.folder / f"{name}.png", dpi=dpi)
        svg = (self.folder / f"{name}.svg").read_text()
        self._parts.append(Part(name, svg=svg[svg.index("<svg") :]))

    def _marked(self, words: str) -> str:
        return f"{words} ({self.mark})" if self.mark else words

    def save(self, name: str = "index.html") -> Path:
        """Write the page."""
        path = self.folder / name
        path.write_text(fill("paper.html", heading=self.title, notes=self.notes, parts=self._parts))
        return path
