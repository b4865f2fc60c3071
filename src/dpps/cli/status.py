"""`dpps status`: how a run between organisations stands, from another terminal."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.table import Table
from tyro.conf import Positional, arg

from dpps.cli import DONE
from dpps.cli.arguments import parse_options
from dpps.cli.console import wide_console
from dpps.peers.status import OVER, Status, bytes_in_words, read_status


@dataclass(frozen=True)
class StatusConfig:
    """How a run of dpps join stands: round, who is here, epsilon spent, bytes sent.

    Example: dpps status run
    """

    run: Positional[Annotated[Path, arg(metavar="DIR")]]
    """Folder of the run."""
    json: bool = False
    """As JSON, for programs."""


def main(arguments: list[str]) -> int:
    """Show a run's status."""
    config = parse_options(StatusConfig, arguments, "dpps status")
    status = read_status(config.run)
    if config.json:
        print(json.dumps({**status.to_json(), "alive": status.alive}))
    else:
        _show(status)
    return DONE


def _show(status: Status) -> None:
    console = wide_console()
    state = status.state if status.alive or status.state in OVER else f"not running (it was {status.state})"
    console.print(
        f"member     [bold]{status.member}[/] of federation {status.federation}, revision {status.revision}"
    )
    console.print(
        f"state      [bold]{state}[/], round {status.round} of {status.rounds}, as of {status.updated}"
    )
    if status.message:
        console.print(f"           {status.message}", markup=False)
    if status.unit not in ("", "none"):
        console.print(f"privacy    {status.spent}, delta {status.delta:g}, unit {status.unit}")
    console.print(f"sent       {bytes_in_words(status.bytes_sent)} since its start at {status.since}")
    lines = Table(box=None, pad_edge=False)
    for title in ("member", "state", "round", "heard", "connected", "sent to", "received from"):
        lines.add_column(title)
    for peer in status.members:
        own = peer.name == status.member
        lines.add_row(
            peer.name + (" (this one)" if own else ""),
            peer.state,
            str(peer.round),
            "" if own else "never" if peer.heard is None else f"{peer.heard:.0f} s ago",
            "" if own else "yes" if peer.connected else "no",
            "" if own else bytes_in_words(peer.sent),
            "" if own else bytes_in_words(peer.received),
        )
    console.print(lines)
    for line in status.refusals:
        console.print(line, markup=False)
