"""`dpps topology`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.table import Table
from tyro.conf import Positional, arg

from dpps.cli import DONE
from dpps.cli.arguments import parse_options
from dpps.cli.console import plain_console
from dpps.topology import TOPOLOGIES, parse


@dataclass(frozen=True)
class TopologyConfig:
    """What a communication graph does: does it connect, how fast does it mix, does it ever reach the exact average?

    Example: dpps topology exp --nodes 10 --plot exp.svg
    """

    name: Positional[Annotated[str, arg(metavar="{" + ",".join(TOPOLOGIES.names()) + "}")]]
    """The graph."""
    nodes: int = 10
    """How many nodes."""
    json: bool = False
    """For programs."""
    plot: Path | None = None
    """Draw it, one panel per phase (.svg or .png)."""


def main(arguments: list[str]) -> int:
    """Report and draw."""
    config = parse_options(TopologyConfig, arguments, "dpps topology")
    topology = parse(config.name, config.nodes)
    report = topology.validate()
    if config.plot:
        from dpps.topology.drawing import draw

        draw(topology, config.plot)
    if config.json:
        print(json.dumps(report.to_json()))
        return DONE
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    exact = "never" if report.exact_average_after is None else f"after {report.exact_average_after} rounds"
    for name, value in (
        ("graph", repr(topology)),
        ("period", "never repeats" if report.period is None else f"{report.period} rounds"),
        ("sends to", f"at most {report.degree} others a round"),
        (
            "weights",
            "doubly stochastic"
            if report.doubly_stochastic
            else "columns sum to 1, rows do not (not for node-swap)",
        ),
        (
            "connected",
            f"within any {report.connected_within} rounds (B of Assumption 1), diameter {report.diameter}",
        ),
        ("contraction", f"{report.contraction:.6g} over a period (second singular value of the product)"),
        ("exact average", exact),
    ):
        table.add_row(name, value)
    console = plain_console(soft_wrap=False)
    console.print(table)
    if config.plot:
        console.print(f"drawn to {config.plot}")
    return DONE
