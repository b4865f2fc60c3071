"""`dpps plan`."""

import json
import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table
from tyro.conf import arg

from dpps.cli import DONE
from dpps.cli.progress import working
from dpps.config import TrainConfig
from dpps.errors import UsageError
from dpps.privacy.accountant import label
from dpps.privacy.plan import Outlook, outlook
from dpps.privacy.units import Contribution, NodeSwap, Plan, Record, Unit
from dpps.sensitivity import Certified, Paper
from dpps.topology import parse


@dataclass(frozen=True)
class PlanConfig:
    """What noise for this epsilon, what epsilon for this noise, and will the sensitivity diverge?

    Examples:
      dpps plan --epsilon 3                        noise for epsilon 3 in total, every example protected
      dpps plan --noise-multiplier 1.0             and the other way round
      dpps plan --unit contribution --epsilon 8    everything a node contributes
      dpps plan --unit node-swap --budget 5        what the paper's setting costs, and whether its estimate diverges
    """

    unit: Literal["record", "contribution", "node-swap"] = "record"
    """Who is protected."""
    epsilon: float | None = None
    """Wanted total (default 3 if no noise is given)."""
    delta: float = 1e-5
    """Failure probability."""
    rounds: int = 720
    """Planned rounds (12 epochs of MNIST over ten nodes)."""
    parameters: int = 7850
    """Shared parameters d_s (one layer of the paper's MLP)."""
    examples: int = 6000
    """Training examples of the smallest node."""
    batch_size: int = 100
    """Expected batch of a node."""
    lr_shared: float | None = None
    """Learning rate of the shared parameters (default as in train: 1 for record, otherwise 0.1)."""
    clip: float | None = None
    """Gradient clip (default as in train: 1; 30 for contribution with Laplace noise)."""
    records_per_user: int = 1
    """Records one person may own (record)."""
    mechanism: Literal["laplace", "gaussian"] = "laplace"
    """Noise in the unit contribution."""
    noise_multiplier: float | None = None
    """Gaussian noise: deviation over sensitivity."""
    budget: float | None = None
    """b of the paper; epsilon of a round is budget / noise rate."""
    noise_rate: float = 1e-3
    """gamma_n of the paper."""
    c_prime: float = 0.78
    """C' of the paper's estimate."""
    decay: float = 0.55
    """lambda of the paper's estimate."""
    topology: Annotated[str, arg(metavar="{exp,K-out,ring,complete,base-K,random}")] = "exp"
    """Who sends to whom."""
    nodes: int = 10
    """How many nodes."""
    sync_every: int = 0
    """Synchronisation period (0 = never)."""
    json: bool = False
    """For programs."""


def main(arguments: list[str]) -> int:
    """Answer and warn."""
    config = tyro.cli(PlanConfig, args=arguments, prog="dpps plan")
    with working(Console(stderr=True), "solving for the noise"):
        result = answer(config)
    if config.json:
        print(json.dumps(result.to_json()))
    else:
        show(result, config)
    return DONE


def answer(config: PlanConfig) -> Outlook:
    """The outlook for a configuration; what is left out is as in `dpps train`."""
    config = _filled(config)
    assert config.lr_shared is not None
    for name in ("rounds", "parameters", "examples", "batch_size"):
        if getattr(config, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(config, name)}: it must be 1 or more")
    q = min(1.0, config.batch_size / config.examples)
    plan = Plan(((1.0, config.rounds),), config.lr_shared, config.batch_size, (q,))
    topology = parse(config.topology, config.nodes)
    return outlook(
        _unit(config),
        plan,
        config.parameters,
        topology,
        config.sync_every,
        Paper(config.c_prime, config.decay),
    )


def _filled(config: PlanConfig) -> PlanConfig:
    names = (
        "unit",
        "epsilon",
        "delta",
        "clip",
        "lr_shared",
        "mechanism",
        "noise_multiplier",
        "budget",
        "noise_rate",
    )
    full = TrainConfig(**{name: getattr(config, name) for name in names}).resolved()
    return replace(config, **{name: getattr(full, name) for name in names})


def _unit(config: PlanConfig) -> Unit:
    epsilon = config.epsilon
    clip = 1.0 if config.clip is None else config.clip  # node-swap does without
    if config.unit == "record":
        return Record(epsilon, config.delta, clip, config.noise_multiplier, config.records_per_user)
    if config.unit == "node-swap":
        return NodeSwap(config.budget, config.noise_rate, Certified(config.delta), None, epsilon)
    round_epsilon = None if config.budget is None else config.budget / config.noise_rate
    return Contribution(clip, epsilon, config.delta, config.mechanism, round_epsilon, config.noise_multiplier)


def show(result: Outlook, config: PlanConfig) -> None:
    """A table for people."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()

    def line(name: str, value: str | None, note: str = "") -> None:
        if value is not None:
            table.add_row(name, f"{value}  [dim]{note}[/]" if note else value)

    scaled = (
        "x S, the sensitivity of the round" if result.unit == "node-swap" else "in units of the parameters"
    )
    line(
        "total",
        f"{label(result.epsilon)}, delta {result.delta:g}",
        f"{result.rounds} rounds, by {result.accountant}",
    )
    line(
        "noise",
        f"{result.mechanism}, scale {result.noise_scale:.4g}",
        f"per coordinate of a message, {scaled}",
    )
    line("epsilon per round", _number(result.epsilon_per_round))
    line("noise multiplier", _number(result.noise_multiplier), "deviation / sensitivity")
    line(
        "signal / noise",
        _number(result.signal_to_noise),
        "largest update of a node / expected noise of its message",
    )
    line("  averaged", _number(result.signal_to_noise_averaged), f"over {config.nodes} nodes")
    line(
        "paper's growth",
        _number(result.paper_growth),
        "decay (1 + 2 c_prime noise_rate d / budget) a round; above 1 it diverges",
    )
    line("certified gain", _number(result.certified_gain), "below 1: bounded without synchronisation")
    console = Console(highlight=False)
    console.print(table)
    for warning in result.warnings:
        console.print(f"[yellow]note:[/] {warning}")


def _number(value: float | None) -> str | None:
    return None if value is None or math.isnan(value) else f"{value:.4g}"
