"""`dpps attack`."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich import box
from rich.console import Console
from rich.table import Table
from tyro.conf import arg

from dpps.audit import Attack, Outcome, check_picture, draw_reconstruction, reconstruct
from dpps.audit.leaks import DELTA
from dpps.cli import DONE
from dpps.cli.arguments import parse_options
from dpps.cli.console import plain_console
from dpps.errors import UsageError
from dpps.topology import TOPOLOGIES, parse


@dataclass(frozen=True)
class AttackConfig:
    """What a curious neighbour reconstructs of nodes that never sent it anything.

    The nodes average private values by gossip. One of them follows the protocol, keeps all it hears and solves for the
    others' values: gossip is linear and its weights are public. Then the same with noise on what is sent.

    Examples:
      dpps attack                                    ten nodes in a ring, one private number each
      dpps attack --images --plot attack.png         private images
      dpps attack --topology exp --nodes 16          a graph that mixes too fast to be undone
    """

    topology: Annotated[str, arg(metavar="{" + ",".join(TOPOLOGIES.names()) + "}")] = "ring"
    """Who sends to whom."""
    nodes: int = 10
    """How many nodes."""
    attacker: int = 0
    """The curious node."""
    rounds: int = 10
    """How long it listens."""
    epsilon: tuple[float, ...] = (10.0, 3.0, 1.0)
    """Of all that a node sends, at delta 1e-5: one or several."""
    images: bool = False
    """The private values are digits of mnist-mini instead of one number from 0 to 100 a node."""
    plot: Path | None = None
    """With --images: picture of the truth and of what was reconstructed (.png or .svg)."""
    seed: int = 0
    """Of values and independent noise; cancelling noise is keyed by the operating system."""
    json: bool = False
    """For programs."""


def main(arguments: list[str]) -> int:
    """Attack, print what came out, draw it."""
    config = parse_options(AttackConfig, arguments, "dpps attack")
    _check(config)
    topology = parse(config.topology, config.nodes)
    attack = reconstruct(
        topology,
        attacker=config.attacker,
        rounds=config.rounds,
        epsilons=config.epsilon,
        images=config.images,
        seed=config.seed,
    )
    if config.plot:
        draw_reconstruction(config.plot, attack, f"What node {config.attacker} of {topology!r} reconstructs")
    if config.json:
        print(json.dumps(_plain(attack)))
        return DONE
    console = plain_console()
    _say_who(console, attack, repr(topology), config.rounds)
    _show(console, attack)
    if config.plot:
        console.print(f"picture   {config.plot}")
    return DONE


def _check(config: AttackConfig) -> None:
    """What the parser cannot see, before anything is computed."""
    if not config.epsilon:
        raise UsageError("--epsilon is empty: give one or several numbers, such as 10 3 1")
    if config.seed < 0:
        raise UsageError(f"--seed is {config.seed}: it must be 0 or more")
    if config.plot and not config.images:
        raise UsageError("--plot draws images: add --images")
    if config.plot:
        check_picture(config.plot)


def _say_who(console: Console, attack: Attack, graph: str, rounds: int) -> None:
    known = attack.knowledge
    beyond = [i for i in known.recovered if i not in known.neighbours]
    console.print(f"[bold]Node {known.attacker} of {graph} listens for {rounds} rounds[/]\n")
    console.print(f"hears              {_list(known.neighbours)}")
    console.print(
        f"recovers exactly   {_list(known.recovered)}" + (" (without noise)" if known.recovered else "")
    )
    console.print(f"  never heard      {_list(beyond)}")
    console.print(f"in sums at most    {_list(known.hidden)}")
    console.print(
        f"equations          of rank {known.rank} for {len(attack.truth)} values, its own included\n"
    )


def _show(console: Console, attack: Attack) -> None:
    table = Table(
        title="Error of what it reconstructs",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("noise")
    for name in ("epsilon", "error", "least\nsquares", "error of\nthe mean"):
        table.add_column(name, justify="right")
    if attack.candidates:
        table.add_column("corre-\nlation", justify="right")
        table.add_column(f"picked of\n{attack.candidates:,}", justify="right")
    for o in attack.outcomes:
        row = [
            o.noise,
            "" if o.noise == "none" else f"{o.epsilon:g}",
            *map(_number, (o.error, o.theory, o.mean_error)),
        ]
        if attack.candidates:
            row += ["-" if o.correlation is None else f"{o.correlation:.3f}", f"{o.identified} of {o.images}"]
        table.add_row(*row)
    console.print(table)
    unit = "Pixels are from 0 to 1" if attack.candidates else "Values are from 0 to 100"
    console.print(
        f"{unit}; delta {DELTA:g}. Errors are root mean squares over the recovered nodes; beside them the deviation of least squares "
        "by theory, and the error of the network's mean, which is what all wanted to know. Noise is drawn once, before the first "
        "message: listening longer does not help."
    )


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2g}" if abs(value) < 1 else f"{value:.1f}"


def _list(nodes: Sequence[int]) -> str:
    if not nodes:
        return "nobody"
    shown = ", ".join(map(str, nodes[:20]))
    return shown + (f" and {len(nodes) - 20} more" if len(nodes) > 20 else "")


def _plain(attack: Attack) -> dict[str, Any]:
    known = attack.knowledge
    return {
        "attacker": known.attacker,
        "hears": known.neighbours,
        "recovered": known.recovered,
        "hidden": known.hidden,
        "rank": known.rank,
        "delta": DELTA,
        "candidates": attack.candidates,
        "outcomes": [_row(o) for o in attack.outcomes],
    }


def _row(o: Outcome) -> dict[str, Any]:
    facts = ("noise", "mean_error", "correlation", "identified", "images")
    numbers = {name: getattr(o, name) for name in ("epsilon", "error", "theory")}
    return {name: getattr(o, name) for name in facts} | {
        name: value if math.isfinite(value) else None for name, value in numbers.items()
    }
