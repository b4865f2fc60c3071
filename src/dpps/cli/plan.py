"""Before a run: `dpps plan`, and `dpps topology`."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

from tyro.conf import Positional, arg

from dpps.cli.main import DONE, facts_table, parse_options, plain_console, working
from dpps.cli.train import take_config
from dpps.errors import UsageError
from dpps.learning.suggestion import Suggestion
from dpps.privacy.accountant import SUM_OF_ROUNDS, label
from dpps.privacy.outlook import Coalition, LimitingNode, Outlook, refuse_large_delta
from dpps.privacy.units import UNITS
from dpps.runs.options import OWN_DATA, Options, planned, refuse_ignored, suggestion
from dpps.sensitivity import Paper
from dpps.topology import TOPOLOGIES, parse

_ANYWHERE = Path("data")
"""Stands for the nodes' own folders, which a plan does not read."""


@dataclass(frozen=True)
class PlanConfig(Options):
    """Which noise for this epsilon, which epsilon for this noise, and is any signal left?

    Takes the options of a run, and reads no data.

    Examples:
      dpps plan --epsilon 3                        noise for a total epsilon
      dpps plan --noise-multiplier 1.0             and the other way round
      dpps plan --unit contribution --epsilon 8    all that a node contributes
      dpps plan --epsilon 1 --trust pairs          noise that cancels
      dpps plan --unit node-swap --budget 5        the paper's setting
      dpps plan --schema schema.toml --nodes 3 --declared-sizes 35,90,180
    """

    groups: ClassVar[Mapping[str, str]] = {**Options.groups, "rounds": "plan"}
    also: ClassVar[Mapping[str, tuple[str, str]]] = {"--config": Options.also["--config"]}
    unused: ClassVar[frozenset[str]] = frozenset(
        (
            *("data_dir", "weights", "out", "overwrite", "resume", "checkpoint_every", "device", "metrics"),
            *("baselines", "tensorboard", "quiet", "timeout", "seeded_noise", "secure_noise", "track_real"),
        )
    )

    rounds: Annotated[int | None, arg(metavar="INT")] = None
    """Planned rounds [by epochs, batch and data].

    Instead of those that epochs, batch and data set give.
    """
    parameters: Annotated[int | None, arg(metavar="INT")] = None
    """Shared parameters d_s [those of the model]."""
    examples: Annotated[int | None, arg(metavar="INT")] = None
    """Training examples of every node [of the data]."""
    json: bool = False
    """Print JSON."""


def plan(arguments: list[str]) -> int:
    """Answer and warn."""
    arguments, default = take_config(arguments)
    start = PlanConfig(**vars(default)) if default else PlanConfig()
    config = parse_options(PlanConfig, arguments, "dpps plan", default=start)
    if config.node_data is None and (config.schema is not None or config.classes is not None):
        config = replace(config, node_data=_ANYWHERE)
    refuse_ignored(arguments, config)
    with working(plain_console(stderr=True, soft_wrap=False), "solving for the noise"):
        result, suggested = answer(config)
    if config.json:
        more = {"data": _data(config), "suggested": asdict(suggested) if suggested else None}
        print(json.dumps(result.to_json() | more))
    else:
        show(result, config, suggested)
    return DONE


def answer(config: PlanConfig) -> tuple[Outlook, Suggestion | None]:
    """The outlook for a run with these options, and what the rule suggests for those left open."""
    for name in ("rounds", "parameters", "examples"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} is {value}: it must be 1 or more")
    if config.examples is not None:
        if config.declared_sizes is not None:
            raise UsageError("--examples and --declared-sizes say the same thing: choose one")
        config = replace(config, declared_sizes=str(config.examples))
    full = config.resolve()
    unit = full.privacy()
    if unit is None:
        raise UsageError(
            f"--unit none: without noise there is nothing to plan; choose one of {', '.join(UNITS.names())}"
        )
    rounds, parameters = planned(full)
    least = min(rounds.declared_sizes)
    if not rounds.batches and least < rounds.batch_size:
        raise UsageError(
            f"--batch-size is {full.batch_size} and a node has {least} examples: use a batch of at most {least}"
        )
    refuse_large_delta(unit, rounds.declared_sizes)
    if config.parameters is not None:
        parameters = config.parameters
    if config.rounds is not None:
        rounds = replace(rounds, rounds=((1.0, config.rounds),))
    found = Outlook.of(
        unit, rounds, parameters, full.network(), full.sync_every, Paper(full.c_prime, full.decay)
    )
    return found, suggestion(replace(config, epsilon=full.epsilon))


def _data(config: PlanConfig) -> str:
    """Whose shape and sizes the plan is for."""
    return OWN_DATA if config.node_data is not None else config.data


def show(result: Outlook, config: PlanConfig, suggested: Suggestion | None) -> None:
    """A table for people."""
    table = facts_table()

    def line(name: str, value: str | None, note: str = "") -> None:
        if value is not None:
            table.add_row(name, f"{value}  [dim]{note}[/]" if note else value)

    by = f", as {config.schema} describes it" if config.schema is not None else ""
    sizes = "" if config.declared_sizes is None else f"declared sizes {config.declared_sizes}"
    line("data", f"{_data(config)}{by}", sizes)
    unit = UNITS[result.unit]
    scaled = "in units of the parameters" if unit.has_total else "x S, the sensitivity of the round"
    line(
        "total" if unit.has_total else SUM_OF_ROUNDS,
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
    line("  of the run", _number(result.signal_to_noise_of_run), "averaged, over all rounds")
    line(
        "paper's growth",
        _number(result.paper_growth),
        "decay (1 + 2 c_prime noise_rate d / budget) a round; above 1 it diverges",
    )
    line("certified gain", _number(result.certified_gain), "below 1: bounded without synchronisation")
    if result.coalition is not None:
        _show_coalition(result.coalition, line)
    if result.limits is not None:
        _show_limits(result.limits, line)
    console = plain_console(soft_wrap=False)
    console.print(table)
    for reason in suggested.reasons if suggested else ():
        console.print(f"[bold]suggested[/] {reason}")
    for warning in result.warnings:
        console.print(f"[yellow]note:[/] {warning}")


def _show_limits(found: LimitingNode, line: Callable[[str, str | None, str], None]) -> None:
    """Who sets the noise of all, and what every node spends at its own rate."""
    line(
        "limited by",
        f"node {found.node}, {found.size} examples",
        f"it draws most often, which asks for the noise multiplier {found.noise_multiplier:.4g}; with --batch-size {found.part:.3g} (a part "
        f"of every node's examples, as many in all) {found.noise_multiplier_at_part:.4g} would do",
    )
    for node, size, batch, rate, epsilon in found.epsilons:
        line(f"  node {node}", label(epsilon), f"{size} examples, batch {batch:.4g}, rate {rate:.3g}")


def _show_coalition(found: Coalition, line: Callable[[str, str | None, str], None]) -> None:
    """What partners make of the noise, and what more colluders would cost."""
    line(
        "partners", f"{found.degree} of every node", f"strength {found.strength:.4g} (lambda_2 less C and A)"
    )
    line(
        "  sigma, tau",
        f"{found.sigma:.4g}, {found.tau:.4g}",
        "independent and shared noise, over a message's without partners",
    )
    line("  message noise", f"x {found.message_noise:.4g}", "deviation, over that without partners")
    line(
        "  mean noise",
        f"x {found.mean_noise:.4g}",
        f"deviation, over that without partners; variance {found.mean_over_server:.4g} times a trusted server's",
    )
    line(
        "  absences",
        str(found.absences),
        "nodes away unannounced before the mean is noisier than without partners",
    )
    for other in found.trade:
        line(
            f"  --mean-variance {other.mean_variance:g}",
            f"messages x {other.message_noise:.4g}, mean {other.mean_over_server:.4g} of a server's variance",
            f"{other.absences} absences",
        )
    for colluders, epsilon in found.epsilons:
        note = "promised" if colluders == found.colluders else ""
        if colluders == found.epsilons[-1][0]:
            note = "all others: only the independent noise protects"
        line(f"  {colluders} colluders", label(epsilon), note)


def _number(value: float | None) -> str | None:
    return None if value is None or math.isnan(value) else f"{value:.4g}"


@dataclass(frozen=True)
class TopologyConfig:
    """What a communication graph does: does it connect, how fast does it mix, does it ever reach the exact average?

    Example: dpps topology exp --nodes 10 --plot exp.svg
    """

    name: Positional[Annotated[str, arg(metavar="{" + ",".join(TOPOLOGIES.names()) + "}")]]
    """The graph."""
    nodes: int = 10
    """Number of nodes."""
    plot: Annotated[Path | None, arg(metavar="FILE")] = None
    """Draw it, one panel per phase (.svg or .png)."""
    json: bool = False
    """Print JSON."""


def topology(arguments: list[str]) -> int:
    """Report and draw."""
    config = parse_options(TopologyConfig, arguments, "dpps topology")
    graph = parse(config.name, config.nodes)
    report = graph.validate()
    if config.plot:
        from dpps.topology import draw

        draw(graph, config.plot)
    if config.json:
        print(json.dumps(report.to_json()))
        return DONE
    table = facts_table()
    exact = "never" if report.exact_average_after is None else f"after {report.exact_average_after} rounds"
    for name, value in (
        ("graph", repr(graph)),
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
