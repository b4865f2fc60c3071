"""`dpps paper`: the paper's tables and figures, computed again."""

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from rich.console import Console
from tyro.conf import Positional, arg

from dpps.cli.main import DONE, STOPPED, parse_options, plain_console, stopped_by_signals
from dpps.errors import UsageError, needs_extra, unknown
from dpps.paper import EXPERIMENTS, MODELS, SEEDS, Pool, Scope, Store, convergence, cores, identity
from dpps.version import __version__

NAMES = {name: experiment.what for name, experiment in EXPERIMENTS.items()}
NAMES |= {"convergence": "Theorem 2: slopes of the averaged squared gradients"}


@dataclass(frozen=True)
class PaperConfig:
    """Compute a table or figure of the paper again, and compare it with the published numbers. Without a name: list them.

    Finished cells are kept in OUT/cells: the same command of the same version continues where a stopped one was.
    """

    name: Annotated[Positional[str], arg(metavar="{" + ",".join(NAMES) + "}")] = ""
    """Table or figure."""
    out: Annotated[Path, arg(metavar="DIR")] = Path("paper")
    """Folder for the results."""
    quick: bool = False
    """Minutes instead of hours.

    The embedded data set, few rounds of the large models' cells, and the MLP alone unless --models says more.
    """
    hours: Annotated[float | None, arg(metavar="FLOAT")] = None
    """Time limit: start no cell that would end after it.

    What is missing is marked "not run".
    """
    seeds: int = len(SEEDS)
    """Number of seeds, where a spread is shown.

    Counted from 2024.
    """
    models: Annotated[str, arg(metavar="MODEL,..")] = ""
    """Any of mlp, resnet18, vit [all; --quick: mlp]."""
    bandwidth: float = 1e9
    """Bits per second (time)."""
    workers: int = 0
    """Processes at a time [0: as many as cores].

    One core each; time uses one process.
    """
    data_dir: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder of the data sets [$DPPS_DATA, or user cache]."""

    def scope(self) -> Scope:
        """How much is asked for."""
        models = tuple(self.models.split(",")) if self.models else MODELS[:1] if self.quick else MODELS
        seeds = tuple(SEEDS[0] + k for k in range(self.seeds))
        return Scope("quick" if self.quick else "full", seeds, models, self.bandwidth)


def paper(arguments: list[str]) -> int:
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
        page = config.out / config.name
        convergence.run(page, config.quick)
        console.print(f"written to {page}", markup=False)
        return DONE
    return _run(config, console)


def _list(console: Console) -> None:
    console.print("The paper's tables and figures: [bold]dpps paper NAME --out DIR[/]\n")
    console.print(f"  {'':<18} {'--quick':>8} {'--models mlp':>13} {'all':>8}")
    for name, what in NAMES.items():
        quick, mlp, everything = EXPERIMENTS[name].took if name in EXPERIMENTS else ("1 min", "", "?")
        console.print(f"  [bold cyan]{name:<18}[/] {quick:>8} {mlp:>13} {everything:>8}  {what}")
    console.print(
        "\nTimes: about, 2 cores of an AMD EPYC shared with other jobs, no GPU, 15 November 2026. "
        f"Here are {cores()} cores."
    )


def _run(config: PaperConfig, console: Console) -> int:
    scope = config.scope()
    if config.hours is not None and config.hours < 0:
        raise UsageError(f"--hours is {config.hours}: it must be 0 or more")
    if config.workers < 0:
        raise UsageError(f"--workers is {config.workers}: it must be 0 (all cores) or more")
    experiment = EXPERIMENTS[config.name]
    deadline = None if config.hours is None else time.monotonic() + 3600 * config.hours
    workers = config.workers or (1 if config.name == "time" else cores())
    pool = Pool(Store(config.out / "cells"), workers, config.data_dir, deadline, console)
    stopped = False
    try:
        with stopped_by_signals():
            pool.run(experiment.cells(scope))
    except KeyboardInterrupt:
        stopped = True
    written = f"written {datetime.now(UTC).date()} by dpps {__version__}, code {identity()}."
    page = experiment.page(pool.store, scope, config.out, [written])
    if stopped:
        console.print("stopped: finished cells are kept, the same command goes on from here")
        return STOPPED
    pool.raise_errors()
    console.print(f"written to {page}")
    return DONE
