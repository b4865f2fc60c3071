"""The command line: one module per command, imported only when it is called."""

import gc
import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from dpps.cli.console import log_lines, plain_console
from dpps.errors import RunError, UsageError, unknown
from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.cli.arguments import parse_options
    from dpps.cli.join import Shown
    from dpps.cli.outcome import say_outcome
    from dpps.cli.plan import PlanConfig, answer
    from dpps.cli.progress import Progress, stopped_by_signals, working

__getattr__, __dir__, __all__ = lazy_imports(__name__)

COMMANDS = {
    "train": "train a model privately over many nodes",
    "data": "draft a schema for your own tables or images: columns, ranges, classes",
    "secret": "make a secret that keeps strangers out of a run on several machines",
    "member": "between organisations: make the key of a member, which never leaves it",
    "federation": "between organisations: the convener signs members and the contract of a run",
    "join": "between organisations: take part in a run, and continue it after a crash",
    "status": "between organisations: how a run stands, who is here, what was spent",
    "leave": "between organisations: take no further part in a run",
    "predict": "predictions of a trained model for new examples",
    "evaluate": "how good a run's models are on labelled examples",
    "report": "one page about a run, or a comparison of several",
    "ledger": "how much privacy a data set has spent, over all its runs",
    "plan": "what noise for this epsilon, what epsilon for this noise, and will the sensitivity diverge?",
    "tune": "search batch, epochs, clip and rate for a run, on public or stand-in data",
    "audit": "attack the shipped mechanism and bound its epsilon from below",
    "attack": "what a curious neighbour reconstructs of nodes that it never heard from",
    "paper": "every table and figure of the paper, computed again, beside the published numbers",
    "topology": "facts about a communication graph: period, connectivity, contraction; draw it",
}

GONE = {
    "launch": "torchrun starts the processes: torchrun --nproc-per-node 4 -m dpps train --nodes 8 --out DIR"
}
"""Commands of earlier versions, and what to use instead."""

DONE, FAILED, WRONG, STOPPED = 0, 1, 2, 3


def main(arguments: Sequence[str] | None = None, *, alone: bool = False) -> int:
    """Run a command; the result is the exit code: 0 done, 1 the run failed, 2 the request is wrong, 3 stopped on request.

    Args:
        arguments: without the program's name; by default those of this process.
        alone: nothing else runs in this process, so what is loaded may be taken out of the garbage collector's sight.
    """
    args, code = list(sys.argv[1:] if arguments is None else arguments), DONE
    try:
        with log_lines():
            code = _dispatch(args, alone)
        if sys.stdout is not None:
            sys.stdout.flush()
    except (UsageError, RunError) as error:
        plain_console(stderr=True).print(f"[bold red]dpps:[/] {_escape(error)}")
        return WRONG if isinstance(error, UsageError) else FAILED
    except KeyboardInterrupt:  # where no run takes it as a request to stop after its round
        plain_console(stderr=True).print("[bold red]dpps:[/] stopped on request")
        return STOPPED
    except BrokenPipeError:  # whoever we print to has seen enough (dpps ... | head)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except SystemExit as error:  # the parser has already said what is wrong
        return int(error.code or 0) if not isinstance(error.code, str) else WRONG
    return code


def _dispatch(args: list[str], alone: bool) -> int:
    if not args or args[0] in ("-h", "--help"):
        _overview()
        return DONE
    if args[0] in ("-V", "--version"):
        _versions()
        return DONE
    if args[0] in GONE:
        raise UsageError(f"dpps {args[0]} is gone: {GONE[args[0]]}")
    if args[0] not in COMMANDS:
        raise unknown("command", args[0], COMMANDS)
    command = _load(f"dpps.cli.{args[0]}", alone)
    code: int = command.main(args[1:])
    return code


def _load(name: str, alone: bool) -> Any:
    """The module. Torch's are a million objects, none of them garbage: looking through them again and again takes a third of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if alone:
            gc.freeze()
        if collects:
            gc.enable()


def _escape(error: Exception) -> str:
    return str(error).replace("[", r"\[")


def _overview() -> None:
    out = plain_console(soft_wrap=False)
    out.print("[bold]dpps[/]: learn together without a server and without trusting each other\n")
    table = Table.grid(padding=(0, 2))
    for name, what in COMMANDS.items():
        table.add_row(f"  [bold cyan]dpps {name}[/]", what)
    out.print(table)
    out.print("\nStart here:  [bold]dpps train[/]   (ten nodes, embedded data, epsilon 3, under a minute)")
    out.print("Every command explains itself with --help; dpps --version prints what a bug report needs.")


def _versions() -> None:
    from dpps.version import versions

    for name, value in versions().items():
        print(f"{name} {value}")
