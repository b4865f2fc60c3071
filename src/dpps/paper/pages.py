"""What an experiment leaves behind: CSV files, figures as SVG and PNG, and one HTML page that holds all of it."""

import csv
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib as mpl
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


@dataclass
class Table:
    """Rows under headings. Values are text, numbers, `Spread`s, or None for nothing."""

    columns: Sequence[str]
    rows: list[tuple[object, ...]] = field(default_factory=list)

    def add(self, *values: object) -> None:
        """One row."""
        if len(values) != len(self.columns):
            raise ValueError(f"{len(values)} values for {len(self.columns)} columns")
        self.rows.append(values)

    def csv(self, path: Path) -> None:
        """All digits; a spread takes two columns."""
        wide = [any(isinstance(row[k], Spread) for row in self.rows) for k in range(len(self.columns))]
        head = [
            name for k, c in enumerate(self.columns) for name in ((c, f"{c}, deviation") if wide[k] else (c,))
        ]
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(head)
            for row in self.rows:
                writer.writerow([v for k, value in enumerate(row) for v in _cells(value, wide[k])])

    def html(self) -> str:
        """For the page."""
        head = "".join(f"<th>{html.escape(c)}</th>" for c in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(text(v))}</td>" for v in row) + "</tr>\n" for row in self.rows
        )
        return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>\n"


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


def figure(panels: int, columns: int) -> tuple[Figure, list[Any]]:
    """A figure with so many axes, in rows."""
    rows = -(-panels // columns)
    fig = Figure(figsize=(3.1 * min(columns, panels) + 0.6, 2.5 * rows + 0.3), layout="constrained")
    axes = [fig.add_subplot(rows, min(columns, panels), k + 1) for k in range(panels)]
    for axis in axes:
        axis.tick_params(labelsize=7)
        axis.title.set_fontsize(8)
        axis.grid(alpha=0.25)
    return fig, axes


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;font-size:13px;margin:1em 0}td,th{border:1px solid #ddd;padding:3px 8px;text-align:right}"
    "th{background:#f4f4f4}td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}.wide{overflow-x:auto}"
)


class Page:
    """Collects tables and figures into a folder and `index.html`."""

    def __init__(self, folder: Path, title: str, notes: Sequence[str]) -> None:
        self.folder, self.title = folder, title
        folder.mkdir(parents=True, exist_ok=True)
        self._parts = [f"<p>{html.escape(note)}</p>" for note in notes]
        self.tables: dict[str, Table] = {}

    def table(self, name: str, caption: str, table: Table) -> None:
        """`NAME.csv`, and on the page."""
        table.csv(self.folder / f"{name}.csv")
        self.tables[name] = table
        self._parts.append(f'<h2>{html.escape(caption)}</h2>\n<div class="wide">{table.html()}</div>')

    def figure(self, name: str, fig: Figure) -> None:
        """`NAME.svg`, `NAME.png`, and on the page. The same data give the same file."""
        with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
            fig.savefig(self.folder / f"{name}.svg", metadata={"Date": None})
        fig.savefig(self.folder / f"{name}.png", dpi=110)
        svg = (self.folder / f"{name}.svg").read_text()
        self._parts.append(svg[svg.index("<svg") :])

    def save(self) -> Path:
        """Write index.html."""
        path = self.folder / "index.html"
        head = f'<meta charset="utf-8"><title>{html.escape(self.title)}</title><style>{_STYLE}</style>'
        path.write_text(
            f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><h1>{html.escape(self.title)}</h1>\n'
            + "\n".join(self._parts)
            + "\n</body></html>\n"
        )
        return path
