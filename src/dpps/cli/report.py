"""`dpps report`."""

import webbrowser
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from dpps import report
from dpps.cli import DONE
from dpps.cli.arguments import parse_options
from dpps.cli.console import plain_console
from dpps.cli.progress import working
from dpps.disk import check_target
from dpps.errors import UsageError
from dpps.runs.folder import RunFolder


@dataclass(frozen=True)
class ReportConfig:
    """One page about a run: accuracy, privacy spent, sensitivity, noise, the network. Several runs are compared.

    The page is one HTML file that opens from disk, loads nothing and prints on one sheet. Beside the page of a run stands its model card,
    model-card.md; --out NAME.md writes the card alone.

    Example: dpps report out/demo --open
    """

    runs: Positional[Annotated[tuple[Path, ...], arg(metavar="RUN [RUN ...]")]]
    """Folders written by dpps train --out."""
    out: Path | None = None
    """The page, or the card if it ends in .md (default: RUN/report.html and RUN/model-card.md; for several runs comparison.html, or comparison-2.html and so on where that exists)."""
    open: bool = False
    """Show it in the browser."""


def main(arguments: list[str]) -> int:
    """Write the page and say where it is."""
    config = parse_options(ReportConfig, arguments, "dpps report")
    console = plain_console()
    card = config.out is not None and config.out.suffix == ".md"
    if config.out is not None and config.out.suffix not in (".html", ".md"):
        raise UsageError(f"--out {config.out}: a page ends in .html, a model card in .md; name such a file")
    if card and len(config.runs) > 1:
        raise UsageError(
            f"--out {config.out}: a model card is about one run, and {len(config.runs)} are named; name one"
        )
    if config.out is not None:
        check_target("--out", config.out)
    with working(console, "adding up what was spent"):
        pages = _write(config, card)
    for kind, page in pages.items():
        console.print(f"{kind:<9} {page}", markup=False)
    if config.open and not card:
        webbrowser.open(pages["report"].resolve().as_uri())
    return DONE


def _write(config: ReportConfig, card: bool) -> dict[str, Path]:
    runs, out = config.runs, config.out
    if out is not None:
        return {"card": report.write_card(runs[0], out)} if card else {"report": report.write(runs, out)}
    if len(runs) != 1:
        return {"report": report.write(runs, _unused("comparison"))}
    folder = RunFolder(runs[0])
    return {
        "report": report.write(runs, folder.report),
        "card": report.write_card(runs[0], folder.card),
    }


def _unused(name: str) -> Path:
    """A page of other runs is not overwritten."""
    names = chain([Path(f"{name}.html")], (Path(f"{name}-{k}.html") for k in count(2)))
    return next(path for path in names if not path.exists())
