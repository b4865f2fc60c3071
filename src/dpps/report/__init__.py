"""One self-contained HTML page per run, or per comparison of runs: opens from disk, loads nothing.

The way of the data: a run's folder or a `Run` becomes a `Story`; stories become charts and networks; those become the page.
"""

from collections.abc import Sequence
from pathlib import Path

from dpps.errors import RunError, UsageError
from dpps.learning import Run
from dpps.report.page import render
from dpps.report.story import Story, read_folder, read_run

__all__ = ["from_run", "write"]


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
    return _put([read_folder(folder, name) for folder, name in names.items()], out)


def from_run(run: Run, path: str | Path) -> Path:
    """The page of a run that was started from Python; returns the path of the page."""
    return _put([read_run(run, Path(path).stem)], Path(path))


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


def _put(stories: list[Story], out: Path) -> Path:
    html = render(stories)
    try:
        out.write_text(html, encoding="utf-8")
    except OSError as error:
        raise RunError(f"the page {out} cannot be written: {error.strerror}; the run is untouched") from error
    return out
