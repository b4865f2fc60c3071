"""`dpps leave`: take no further part in a run between organisations."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from dpps.cli import DONE, FAILED
from dpps.cli.arguments import parse_options
from dpps.cli.console import plain_console
from dpps.disk import write_private
from dpps.errors import UsageError
from dpps.peers.status import FINISHED, LEAVE, LEFT, read_status


@dataclass(frozen=True)
class LeaveConfig:
    """Leave a run for good: this member's share of the model goes to a neighbour, and the others go on without it.

    The dpps join of this member must be running. To come back later, do not leave: Ctrl-C, and the same dpps join again.

    Example: dpps leave run
    """

    run: Positional[Annotated[Path, arg(metavar="DIR")]]
    """Folder of the run."""
    wait: float = 600.0
    """Seconds to wait until it has left; 0: only ask."""


def main(arguments: list[str]) -> int:
    """Ask the running process to leave."""
    config = parse_options(LeaveConfig, arguments, "dpps leave")
    console = plain_console()
    status = read_status(config.run)
    if not status.alive:
        over = "it takes no further part already"
        more = "leaving means to hand its share over; start its dpps join again, then ask again"
        raise UsageError(
            f"dpps leave {config.run}: no process of {status.member} is running there (it is {status.state}), and "
            + (over if status.state in (FINISHED, LEFT) else more)
        )
    write_private(config.run / LEAVE, b"")
    console.print(f"{status.member} was asked to leave after its current round", markup=False)
    until = time.monotonic() + config.wait
    while time.monotonic() < until:
        status = read_status(config.run)
        if not status.alive:
            console.print(
                f"{status.member}: {status.state}, after round {status.round} of {status.rounds}",
                markup=False,
            )
            return DONE if status.state == LEFT else FAILED
        time.sleep(0.2)
    return DONE if config.wait == 0 else FAILED
