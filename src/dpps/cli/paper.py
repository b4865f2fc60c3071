"""`dpps paper`: the paper's tables and figures, computed again."""

import importlib
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from tyro.conf import Positional, arg

from dpps.cli.console import plain_console
from dpps.cli.main import DONE, STOPPED, parse_options
from dpps.errors import UsageError, needs_extra, unknown
from dpps.paper.cells import identity
from dpps.paper.pages import Page
from dpps.paper.scheduler import Scheduler, Store, cores
from dpps.paper.scope import MODELS, SEEDS, Scope
from dpps.version import __version__

#: Name, module, what it is.
NAMES = {
    "sensitivity": ("sensitivity", "real against estimated sensitivity, round by round: eight panels"),
    "factors": ("factors", "mean real sensitivity against shared layers and connectivity: 27 points"),
    "scale": ("scale", "mean real sensitivity against network scale, up to 1000 nodes"),
    "accuracy": ("accuracy", "the big accuracy table, the study of synchronisation periods, the other units"),
    "real-vs-estimated": (
        "real_vs_estimated",
        "accuracy with noise by the real and by the estimated sensitivity",
    ),
    "time": ("timing", "computation and communication of SGP, SGPDP and PartPSP-1"),
    "convergence": ("convergence", "Theorem 2: slopes of the averaged squared gradients"),
}

#: --quick, --models mlp, everything, on 2 cores of an AMD EPYC (virtual machine), no GPU, 15 November 2026. The middle column was
#: measured while other jobs used the machine too (accuracy and scale: scaled up from the four fifths and more that ran); the others follow from the processor time of their rounds (? = not measured).
TOOK = {
    "sensitivity": ("1 min", "2 min", "27 min"),
    "factors": ("2 min", "13 min", "13 min"),
    "scale": ("1 min", "10 min", "14 min"),
    "accuracy": ("5 min", "50 min", "8 h"),
    "real-vs-estimated": ("1 min", "11 min", "60 min"),
    "time": ("1 min", "1 min", "4 min"),
    "convergence": ("1 min", "", "?"),
}


@dataclass(frozen=True)
class PaperConfig:
    """Compute a table or figure of the paper again, beside the published numbers. Without a name: what there is.

    Finished cells are kept in OUT/cells: the same command of the same version goes on where a stopped one was.
    """

    name: Annotated[Positional[str], arg(metavar="{" + ",".join(NAMES) + "}")] = ""
    """Which one."""
    out: Path = Path("paper")
    """Folder for the results; each table gets a sub-folder."""
    quick: bool = False
    """Minutes instead of hours: the embedded data set, few rounds of the large models' cells, the MLP alone unless --models says more."""
    hours: float | None = None
    """Begin no cell that would end after this time; what is missing is marked "not run"."""
    seeds: int = len(SEEDS)
    """How many seeds, counted from 2024, where a spread is shown."""
    models: Annotated[str, arg(metavar="MODEL,..")] = ""
    """Which of mlp, resnet18 and vit (default: all; with --quick: mlp)."""
    bandwidth: float = 1e9
    """Bits a second, for time."""
    workers: int = 0
    """Processes at a time, one core each (0: as many as there are cores; time uses one)."""
    data_dir: Path | None = None
    """Folder with one sub-folder per data set (default: $DPPS_DATA, then the user cache)."""

    def scope(self) -> Scope:
        """How much is asked for."""
        models = tuple(self.models.split(",")) if self.models else MODELS[:1] if self.quick else MODELS
        seeds = tuple(SEEDS[0] + k for k in range(self.seeds))
        return Scope("quick" if self.quick else "full", seeds, models, self.bandwidth)


def main(arguments: list[str]) -> int:
    """Run one, or list them."""
    config = parse_options(PaperConfig, arguments, "dpps paper")
    console = plain_console()
    if not config.name:
        _list(console)
        return DONE
    if config.name not in NAMES:
        raise unknown("table or figure", config.name, NAMES)
    with needs_extra("plots"):  # now, not after hours
        import matplotlib as _  # noqa: F401
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {config.out} cannot be made ({error.strerror}): name a folder") from error
    if config.name == "convergence":
        return _convergence(config, console)
    return _run(config, console)


def _list(console: Console) -> None:
    console.print("The paper's tables and figures: [bold]dpps paper NAME --out DIR[/]\n")
    console.print(f"  {'':<18} {'--quick':>8} {'--models mlp':>13} {'all':>8}")
    for name, (_, what) in NAMES.items():
        quick, mlp, everything = TOOK[name]
        console.print(f"  [bold cyan]{name:<18}[/] {quick:>8} {mlp:>13} {everything:>8}  {what}")
    console.print(
        "\nTimes: about, 2 cores of an AMD EPYC shared with other jobs, no GPU, 15 November 2026. "
        f"Here are {cores()} cores."
    )


def _convergence(config: PaperConfig, console: Console) -> int:
    module = importlib.import_module("dpps.paper.convergence")
    folder = config.out / config.name
    module.run(folder, config.quick)
    console.print(f"written to {folder}", markup=False)
    return DONE


def _run(config: PaperConfig, console: Console) -> int:
    scope = config.scope()
    if config.hours is not None and config.hours < 0:
        raise UsageError(f"--hours is {config.hours}: it must be 0 or more")
    if config.workers < 0:
        raise UsageError(f"--workers is {config.workers}: it must be 0 (all cores) or more")
    module: Any = importlib.import_module(f"dpps.paper.{NAMES[config.name][0]}")
    deadline = None if config.hours is None else time.monotonic() + 3600 * config.hours
    workers = config.workers or (1 if config.name == "time" else cores())
    scheduler = Scheduler(Store(config.out / "cells"), workers, config.data_dir, deadline, console)
    stopped = False
    try:
        with _term_as_interrupt():
            scheduler.run(module.cells(scope))
    except KeyboardInterrupt:
        stopped = True
    page = write(config.name, module, scheduler.store, scope, config.out)
    if stopped:
        console.print("stopped: finished cells are kept, the same command goes on from here")
        return STOPPED
    scheduler.raise_errors()
    console.print(f"written to {page}")
    return DONE


def write(name: str, module: Any, store: Store, scope: Scope, out: Path) -> Path:
    """The page of an experiment from the results that are there."""
    cells = module.cells(scope)
    results = store.all(cells)
    day = datetime.now(UTC).date()
    notes = [
        f"{len(results)} of {len(set(cells))} cells run; seeds {', '.join(map(str, scope.seeds))}; written {day} by dpps {__version__}, code {identity()}.",
        " ".join((module.__doc__ or "").split()),
    ]
    page = Page(out / name, module.TITLE, notes, scope.mark)
    module.write(results, scope, page)
    return page.save()


@contextmanager
def _term_as_interrupt() -> Iterator[None]:
    """A polite kill stops like Ctrl-C."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
