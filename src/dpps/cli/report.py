"""`dpps report`."""

import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from tyro.conf import Positional, arg

from dpps import report
from dpps.cli import DONE
from dpps.cli.progress import working


@dataclass(frozen=True)
class ReportConfig:
    """One page that tells a run: accuracy, privacy spent, sensitivity, noise, the network. Several runs are compared.

    The page is one HTML file that opens from disk and loads nothing.

    Example: dpps report out/demo --open
    """

    runs: Positional[Annotated[tuple[Path, ...], arg(metavar="RUN [RUN ...]")]]
    """Folders written by dpps train --out."""
    out: Path | None = None
    """The page (default: RUN/report.html; comparison.html for several runs)."""
    open: bool = False
    """Show it in the browser."""


def main(arguments: list[str]) -> int:
    """Write the page and say where it is."""
    config = tyro.cli(ReportConfig, args=arguments, prog="dpps report")
    console = Console(highlight=False, soft_wrap=True)
    with working(console, "adding up what was spent"):
        page = report.write(config.runs, config.out or _default(config.runs))
    console.print(f"report    {page}", markup=False)
    if config.open:
        webbrowser.open(page.resolve().as_uri())
    return DONE


def _default(runs: tuple[Path, ...]) -> Path:
    return runs[0] / "report.html" if len(runs) == 1 else Path("comparison.html")
