"""One self-contained HTML page per run, or per comparison of runs: opens from disk, loads nothing; and a model card per run.

The way of the data: a run's folder or a `Run` becomes a `RunRecord`; records become charts, charts the page.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dpps.disk import private
from dpps.errors import RunError, UsageError
from dpps.lazy import lazy_imports
from dpps.report.card import model_card
from dpps.report.page import render
from dpps.report.reading import read_folder, read_run
from dpps.runs.run import Run

if TYPE_CHECKING:  # imported when first asked for
    from dpps.report.axes import SIZE, Axis, number
    from dpps.report.charts import KEPT_POINTS, Chart, Mark, thinned
    from dpps.report.html import small
    from dpps.report.options import applied, command, data_name
    from dpps.report.page import badges, statement
    from dpps.report.reading import Accuracy, RunRecord
    from dpps.report.spending import by_round

__getattr__, __dir__, __all__ = lazy_imports(__name__)


def write(folders: Sequence[Path], out: Path) -> Path:
    """The page of one run, or the comparison of several.

    Args:
        folders: folders written by `dpps train`; an unfinished run is shown as far as it has come.
        out: the HTML file.

    Returns:
        `out`.
    """
    if not folders:
        raise UsageError("no run to report: name one or more folders written by dpps train --out")
    names = _names([Path(folder) for folder in folders])
    return _put(render([read_folder(folder, name) for folder, name in names.items()]), out)


def write_card(folder: Path, out: Path) -> Path:
    """The model card of a run, in Markdown, from a folder written by `dpps train`; returns `out`."""
    return _put(model_card(read_folder(folder, Path(folder).resolve().name)), out)


def from_run(run: Run, path: str | Path) -> Path:
    """The page of a run that was started from Python; returns the path of the page."""
    return _put(render([read_run(run, Path(path).stem)]), Path(path))


def _names(folders: list[Path]) -> dict[Path, str]:
    """A short name for each folder: as many of its last parts as it takes to tell all of them apart."""
    paths = {folder: folder.resolve().parts for folder in folders}
    if len(set(paths.values())) < len(folders):
        raise UsageError("the same run is named twice: name every run once")
    for count in range(1, max(len(parts) for parts in paths.values()) + 1):
        names = {folder: "/".join(parts[-count:]) for folder, parts in paths.items()}
        if len(set(names.values())) == len(names):
            break
    return names


def _put(text: str, out: Path) -> Path:
    try:
        with open(out, "w", encoding="utf-8", opener=private) as file:
            file.write(text)
    except OSError as error:
        raise RunError(f"the page {out} cannot be written: {error.strerror}; the run is untouched") from error
    return out
