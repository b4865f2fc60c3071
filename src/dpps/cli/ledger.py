"""`dpps ledger`."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from rich import box
from rich.table import Table
from tyro.conf import Positional, arg

from dpps.cli import DONE
from dpps.cli.arguments import parse_options
from dpps.cli.console import wide_console
from dpps.errors import UsageError
from dpps.peers.store import read_whole
from dpps.runs.data_ledger import Spent, notes_of, spent
from dpps.runs.data_totals import Together, alone, together


@dataclass(frozen=True)
class LedgerConfig:
    """How much a data set has ever spent, over all runs of this user whose messages left.

    Example: dpps ledger /srv/data --delta 1e-5
    """

    data: Positional[Annotated[Path, arg(metavar="DATA")]]
    """The folder (or file) given as --node-data, wherever it is now; or the folder of a run, for the data of its nodes."""
    node: int | None = None
    """Of a run's folder with several nodes: whose data."""
    delta: float = 1e-5
    """Of the total."""
    json: bool = False
    """For programs."""


def main(arguments: list[str]) -> int:
    """Add up and print."""
    config = parse_options(LedgerConfig, arguments, "dpps ledger")
    if not 0 < config.delta < 1:
        raise UsageError(f"--delta is {config.delta}: it must lie between 0 and 1")
    runs = spent(notes_of(config.data, config.node), read_whole)
    units = sorted({run.note.unit for run in runs})
    totals = {unit: together(runs, unit, config.delta) for unit in units}
    if config.json:
        told = [{**asdict(r.note), "messages": _messages(r), "epsilon": alone(r, config.delta)} for r in runs]
        found = {
            "epsilon": {unit: t.epsilon for unit, t in totals.items()},
            "records_per_user": {unit: t.records_per_user for unit, t in totals.items()},
            "remarks": {unit: t.remark for unit, t in totals.items() if t.remark},
        }
        print(json.dumps({"data": str(config.data), "delta": config.delta, "runs": told, **found}))
        return DONE
    console = wide_console()
    if not runs:
        console.print(f"{config.data}: no run of this data has sent anything, as far as is known here.")
        return DONE
    table = Table(box=box.SIMPLE)
    for title in ("started", "run", "unit", "messages", f"epsilon at delta {config.delta:g}"):
        table.add_column(title, overflow="fold")
    for run in runs:
        messages, place = _messages(run), run.note.ledger.removesuffix("/ledger.jsonl")
        cells = ("?", _lost(run)) if messages is None else (str(messages), _number(alone(run, config.delta)))
        table.add_row(run.note.started, place, run.note.unit, *cells)
    console.print(table)
    for unit, sum_ in totals.items():
        console.print(f"together, for the unit {unit}{_told(sum_, config.delta)}")
    return DONE


def _messages(run: Spent) -> int | None:
    return None if run.charges is None else sum(charge.count for charge in run.charges)


def _lost(run: Spent) -> str:
    note = run.note
    if note.promised is None:
        return "ledger gone or not whole: not known"
    return f"ledger gone or not whole: the promise counts, {note.promised:.4g} at delta {note.delta:g}"


def _told(sum_: Together, delta: float) -> str:
    owned = f" (up to {sum_.records_per_user} records of a person)" if sum_.records_per_user > 1 else ""
    if sum_.epsilon is None:
        return f"{owned}: not known: {sum_.remark}"
    remark = f" ({sum_.remark})" if sum_.remark else f" at delta {delta:g}"
    return f"{owned}: epsilon {_number(sum_.epsilon)}{remark}"


def _number(value: float | None) -> str:
    return "not known" if value is None else f"{value:.4g}"
