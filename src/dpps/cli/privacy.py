"""Attacks on the mechanism, and what data has spent: `dpps audit`, `dpps attack`, `dpps ledger`."""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from rich import box
from rich import progress as bars
from rich.console import Console
from tyro.conf import Positional, arg

from dpps.audit import (
    ALPHA,
    CLAIM,
    ENOUGH,
    LEAST,
    Attack,
    Case,
    Finding,
    MeanFinding,
    Progress,
    audit_mean,
    cases,
    certifiable,
    check_picture,
    draw_inversion,
    draw_reconstruction,
    invert,
    pair_cases,
    reconstruct,
    work,
)
from dpps.audit import audit as audit_case
from dpps.audit.leaks import DELTA
from dpps.cli.main import DONE, FAILED, parse_options, plain_console, plain_table, wide_console
from dpps.errors import UsageError
from dpps.logs import only_from
from dpps.privacy.accountant import finite_or_none, label
from dpps.runs.data_ledger import Spent, alone, notes_of, spent, together
from dpps.topology import TOPOLOGIES, parse

_PATIENCE = 2.0  # seconds without a bar
_OF_ATTACK = ("attack", "plot", "seed", "json")


@dataclass(frozen=True)
class AuditConfig:
    """Attack the shipped mechanism and bound its epsilon from below.

    Everything that is sent over two rounds is recorded and an observer guesses the input from it. The noise is rescaled to
    epsilon 1 over the two rounds: a claim holds if the bound stays below 1, and every claim has a twin, with the noise cut by
    a third, that must be caught. Exit code 1 if anything is not as documented.

    Examples:
      dpps audit                             two minutes on an idle machine
      dpps audit --thorough                  ten times as many runs
      dpps audit --unit record --samples 5000
      dpps audit --attack --plot images.png  read training images off messages
    """

    unit: Literal["all", "contribution", "record", "node-swap"] = "all"
    """Whose claim is tested."""
    sensitivity: Literal["all", "certified", "paper", "worst-case"] = "all"
    """Sensitivity (node-swap)."""
    thorough: bool = False
    """100,000 runs in each world: bounds within 5 %."""
    samples: Annotated[int | None, arg(metavar="INT")] = None
    """Runs in each world [10,000].

    10,000 catch every twin. Known leaks have their own number.
    """
    secure_noise: bool = True
    """Leave out the noise of --secure-noise.

    By default it is audited too: an integer grid, keyed by the operating system.
    """
    epsilon: Annotated[float | None, arg(metavar="FLOAT")] = None
    """Epsilon of your run, to check whether it can be tested directly."""
    seed: int = 0
    """Seed of seeded noise and sampling."""
    attack: bool = False
    """Instead, read training images off messages.

    With and without noise.
    """
    plot: Annotated[Path | None, arg(metavar="FILE")] = None
    """Picture of what was read (--attack; .png, .svg)."""
    json: bool = False
    """Print JSON."""

    def check(self) -> None:
        """Refuse what is wrong. (Not at construction: the parser would wrap the message.)"""
        changed = (f.name.replace("_", "-") for f in fields(self) if getattr(self, f.name) != f.default)
        if self.attack and (idle := next((name for name in changed if name not in _OF_ATTACK), None)):
            raise UsageError(f"--attack reads images off messages and would ignore --{idle}: leave one out")
        if self.samples is not None and self.samples < LEAST:
            raise UsageError(
                f"--samples is {self.samples}: so few show nothing; use {LEAST} or more ({ENOUGH} catch every twin)"
            )
        if self.thorough and self.samples is not None:
            raise UsageError("--thorough and --samples: leave one out")
        if self.plot and not self.attack:
            raise UsageError("--plot belongs to --attack: add it")
        if self.plot:
            check_picture(self.plot)
        if self.epsilon is not None and not self.epsilon > 0:
            raise UsageError(f"--epsilon is {self.epsilon}: it must be above 0")
        if self.sensitivity != "all" and self.unit not in ("all", "node-swap"):
            raise UsageError(f"--sensitivity belongs to the unit node-swap, not to {self.unit}: leave it out")

    @property
    def trials(self) -> int:
        """Runs in each world."""
        return self.samples or (100_000 if self.thorough else ENOUGH)


def audit(arguments: list[str]) -> int:
    """Attack, print what came out, and say by the exit code whether it is as documented."""
    config = parse_options(AuditConfig, arguments, "dpps audit")
    config.check()
    if config.attack:
        return _illustrate(config)
    kinds, trials = (False, True) if config.secure_noise else (False,), config.trials
    if config.sensitivity != "all":  # which means node-swap
        chosen = [c for c in cases() if c.name == "node-swap" and c.kind.startswith(config.sensitivity)]
    else:
        chosen = [c for c in (*cases(), *pair_cases()) if config.unit in ("all", c.name)]
    jobs = [(case, secure) for case in chosen for secure in kinds if secure or not case.secure_only]
    total = sum(work(case, trials) * case.seconds for case, _ in jobs)
    if not config.json:
        runs = sum(work(case, trials) for case, _ in jobs)
        long = f"{max(total, 1):.0f} s" if total < 100 else f"{total / 60:.0f} minutes"
        plain_console(stderr=True).print(f"{len(jobs)} audits, {runs:,} runs: about {long} of an idle core.")
    # the networks under attack are no runs of the user's, who needs no advice about them
    with _bar(total) as begin, only_from(logging.ERROR, logging.getLogger("dpps")):
        findings = [
            audit_case(case, trials=trials, seed=config.seed, secure_noise=secure, progress=begin(case))
            for case, secure in jobs
        ]
    # whether noise shared by partners cancels: node-swap has none
    paired = config.unit != "node-swap" and config.sensitivity == "all"
    means = [audit_mean(trials, config.seed, secure_noise=secure) for secure in kinds if paired]
    if config.json:
        found = {"findings": [_finding(f) for f in findings], "means": [asdict(m) for m in means]}
        print(json.dumps({**found, "epsilon": _about(config)}))
    else:
        console = plain_console()
        _print_findings(console, findings)
        _print_means(console, means)
        if config.epsilon is not None:
            console.print(_about(config))
    right = [f.as_expected for f in findings] + [m.as_expected for m in means]
    return DONE if all(right) else FAILED


@contextmanager
def _bar(total: float) -> Iterator[Callable[[Case], Progress]]:
    """A bar on a terminal, once it has taken longer than two seconds."""
    console, begun = plain_console(stderr=True, soft_wrap=False), time.monotonic()
    bar = bars.Progress(
        bars.TextColumn("{task.description}"),
        bars.TaskProgressColumn(),
        bars.BarColumn(),
        bars.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task("", total=total)

    def begin(case: Case) -> Progress:
        bar.update(task, description=f"{case.name}, {case.kind}")

        def advance(count: int) -> None:
            bar.advance(task, count * case.seconds)
            if not bar.live.is_started and time.monotonic() - begun > _PATIENCE:
                bar.start()

        return advance

    try:
        yield begin
    finally:
        bar.stop()


def _print_findings(console: Console, findings: list[Finding]) -> None:
    numbers = ("runs", "epsilon\nclaimed", "at\nleast", "twin\nat least")
    title = "Epsilon of two rounds, bounded from below"
    table = plain_table(("claim", "noise"), numbers, title=title, box=box.SIMPLE_HEAD)
    table.columns[0].min_width = 20
    table.add_column("verdict")
    for f in findings:
        colour = "red" if not f.as_expected else "yellow" if f.case.leaks else "green"
        colour = "yellow" if f.trials_needed else colour
        table.add_row(
            f"{f.case.name}, {f.case.kind}",
            f.noise,
            f"{f.bound.trials:,}",
            f"{f.case.claim:g}" + (f" ({f.case.delta:g})" if f.case.delta else ""),
            f"{f.bound.epsilon:.3f}",
            "" if f.twin is None else f"{f.twin.epsilon:.3f}",
            f"[{colour}]{f.verdict}[/]{', twin caught' if f.caught else ''}",
        )
    console.print(table)
    console.print(
        f"Runs are in either world; delta stands in brackets; a bound is too high with probability {ALPHA:g} at most."
    )
    console.print("The twin is the same code with its noise cut by a third: it must be caught.")
    if needed := [f.trials_needed for f in findings if f.trials_needed]:
        console.print(
            f"[yellow]Too few runs[/] to catch {len(needed)} of the twins, which says nothing about the code: repeat with --samples {max(needed)}."
        )


def _print_means(console: Console, means: list[MeanFinding]) -> None:
    for m in means:
        twin = ""
        if m.twin is not None:
            caught = "caught" if m.caught else "MISSED"
            twin = f"; twin in which both partners add: at least {m.twin:.3g}, {caught}"
        colour, verdict = ("green", "cancels") if m.as_expected else ("red", "FAILS")
        console.print(
            f"Pairs, {m.noise} noise: variance of the mean over the promised one {m.low:.3f} to {m.high:.3f} ({m.trials:,} means){twin}: "
            f"[{colour}]{verdict}[/]"
        )


def _about(config: AuditConfig) -> str | None:
    """What the audit says about the epsilon of a real run."""
    if config.epsilon is None:
        return None
    most = certifiable(config.trials)
    tested = f"the same code was tested at epsilon {CLAIM:g}"
    if config.epsilon > most:
        return f"{label(config.epsilon)}: beyond testing ({config.trials:,} runs can show at most {most:.1f}); {tested}"
    return f"{label(config.epsilon)}: not tested by itself; {tested}, where an error shows best"


def _finding(f: Finding) -> dict[str, Any]:
    return {
        "unit": f.case.name,
        "mechanism": f.case.kind,
        "noise": f.noise,
        "claim": f.case.claim,
        "delta": f.case.delta,
        "alpha": ALPHA,
        "samples": f.bound.trials,
        "hits": f.bound.hits,
        "false_alarms": f.bound.false,
        "epsilon_lower": f.bound.epsilon,
        "twin_epsilon_lower": None if f.twin is None else f.twin.epsilon,
        "twin_caught": None if f.twin is None else f.caught,
        "samples_needed": f.trials_needed,
        "verdict": f.verdict,
        "as_expected": f.as_expected,
    }


def _illustrate(config: AuditConfig) -> int:
    images, probes = invert(seed=config.seed)
    if config.plot:
        draw_inversion(config.plot, images, probes)
    if config.json:
        facts = ("setting", "correlation", "identified", "images", "candidates")
        print(json.dumps({"probes": [{name: getattr(p, name) for name in facts} for p in probes]}))
        return DONE
    numbers = ("correlation (median)", f"picked out of {probes[0].candidates:,}")
    title = "Training images read off messages (batch of one, first layer shared)"
    table = plain_table(("messages sent with",), numbers, title=title)
    for p in probes:
        table.add_row(p.setting, f"{p.correlation:.3f}", f"{p.identified} of {p.images}")
    console = plain_console()
    console.print(table)
    if config.plot:
        console.print(f"picture   {config.plot}")
    return DONE


@dataclass(frozen=True)
class AttackConfig:
    """What a curious neighbour reconstructs of nodes that never sent it anything.

    The nodes average private values by gossip. One of them follows the protocol, keeps all it hears and solves for the
    others' values: gossip is linear and its weights are public. Then the same with noise on what is sent.

    Examples:
      dpps attack                              ten nodes in a ring
      dpps attack --images --plot attack.png   private images
      dpps attack --topology exp --nodes 16    a graph that mixes too fast
    """

    topology: Annotated[str, arg(metavar="{" + ",".join(TOPOLOGIES.names()) + "}")] = "ring"
    """Who sends to whom."""
    nodes: int = 10
    """Number of nodes."""
    attacker: int = 0
    """The curious node."""
    rounds: int = 10
    """Rounds during which it listens."""
    epsilon: tuple[float, ...] = (10.0, 3.0, 1.0)
    """Epsilons to try, at delta 1e-5.

    Of all that a node sends.
    """
    images: bool = False
    """Private images instead of one number per node.

    Digits of mnist-mini, instead of a number from 0 to 100.
    """
    plot: Annotated[Path | None, arg(metavar="FILE")] = None
    """Picture of truth and reconstruction (--images; .png, .svg)."""
    seed: int = 0
    """Seed of values and independent noise.

    Noise that cancels is keyed by the operating system.
    """
    json: bool = False
    """Print JSON."""


def attack(arguments: list[str]) -> int:
    """Attack, print what came out, draw it."""
    config = parse_options(AttackConfig, arguments, "dpps attack")
    if not config.epsilon:
        raise UsageError("--epsilon is empty: give one or several numbers, such as 10 3 1")
    if config.seed < 0:
        raise UsageError(f"--seed is {config.seed}: it must be 0 or more")
    if config.plot and not config.images:
        raise UsageError("--plot draws images: add --images")
    if config.plot:
        check_picture(config.plot)
    topology = parse(config.topology, config.nodes)
    found = reconstruct(
        topology,
        attacker=config.attacker,
        rounds=config.rounds,
        epsilons=config.epsilon,
        images=config.images,
        seed=config.seed,
    )
    if config.plot:
        draw_reconstruction(config.plot, found, f"What node {config.attacker} of {topology!r} reconstructs")
    if config.json:
        print(json.dumps(_attack(found)))
        return DONE
    console = plain_console()
    console.print(f"[bold]Node {config.attacker} of {topology!r} listens for {config.rounds} rounds[/]\n")
    _print_attack(console, found)
    if config.plot:
        console.print(f"picture   {config.plot}")
    return DONE


def _print_attack(console: Console, attack: Attack) -> None:
    known = attack.knowledge
    beyond = [i for i in known.recovered if i not in known.neighbours]
    console.print(f"hears              {_nodes(known.neighbours)}")
    console.print(
        f"recovers exactly   {_nodes(known.recovered)}" + (" (without noise)" if known.recovered else "")
    )
    console.print(f"  never heard      {_nodes(beyond)}")
    console.print(f"in sums at most    {_nodes(known.hidden)}")
    console.print(
        f"equations          of rank {known.rank} for {len(attack.truth)} values, its own included\n"
    )
    numbers = ["epsilon", "error", "least\nsquares", "error of\nthe mean"]
    if attack.candidates:
        numbers += ["corre-\nlation", f"picked of\n{attack.candidates:,}"]
    table = plain_table(("noise",), numbers, title="Error of what it reconstructs", box=box.SIMPLE_HEAD)
    for o in attack.outcomes:
        epsilon = "" if o.noise == "none" else f"{o.epsilon:g}"
        row = [o.noise, epsilon, *map(_short, (o.error, o.theory, o.mean_error))]
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


def _short(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2g}" if abs(value) < 1 else f"{value:.1f}"


def _nodes(nodes: Sequence[int]) -> str:
    if not nodes:
        return "nobody"
    shown = ", ".join(map(str, nodes[:20]))
    return shown + (f" and {len(nodes) - 20} more" if len(nodes) > 20 else "")


def _attack(attack: Attack) -> dict[str, Any]:
    known = attack.knowledge
    facts = ("noise", "mean_error", "correlation", "identified", "images")
    outcomes = [
        {name: getattr(o, name) for name in facts}
        | {name: finite_or_none(getattr(o, name)) for name in ("epsilon", "error", "theory")}
        for o in attack.outcomes
    ]
    return {
        "attacker": known.attacker,
        "hears": known.neighbours,
        "recovered": known.recovered,
        "hidden": known.hidden,
        "rank": known.rank,
        "delta": DELTA,
        "candidates": attack.candidates,
        "outcomes": outcomes,
    }


@dataclass(frozen=True)
class LedgerConfig:
    """How much privacy a data set has spent, over all runs of this user whose messages left.

    Example: dpps ledger /srv/data --delta 1e-5
    """

    data: Positional[Annotated[Path, arg(metavar="DATA")]]
    """What was given as --node-data, or a run's folder.

    The folder or file, wherever it is now. The folder of a run stands for the data of its nodes.
    """
    node: Annotated[int | None, arg(metavar="K")] = None
    """Whose data, if a run's folder has several nodes."""
    delta: float = 1e-5
    """Delta of the total."""
    json: bool = False
    """Print JSON."""


def ledger(arguments: list[str]) -> int:
    """Add up and print."""
    from dpps.peers.store import read_whole

    config = parse_options(LedgerConfig, arguments, "dpps ledger")
    if not 0 < config.delta < 1:
        raise UsageError(f"--delta is {config.delta}: it must lie between 0 and 1")
    runs = spent(notes_of(config.data, config.node), read_whole)
    totals = {unit: together(runs, unit, config.delta) for unit in sorted({run.note.unit for run in runs})}
    if config.json:
        listed = [
            {**asdict(r.note), "messages": _messages(r), "epsilon": alone(r, config.delta)} for r in runs
        ]
        found = {
            "epsilon": {unit: t.epsilon for unit, t in totals.items()},
            "records_per_user": {unit: t.records_per_user for unit, t in totals.items()},
            "remarks": {unit: t.remark for unit, t in totals.items() if t.remark},
        }
        print(json.dumps({"data": str(config.data), "delta": config.delta, "runs": listed, **found}))
        return DONE
    console = wide_console()
    if not runs:
        console.print(f"{config.data}: no run with real noise is recorded for this data on this machine.")
        return DONE
    titles = ("started", "run", "unit", "messages", f"epsilon at delta {config.delta:g}")
    table = plain_table(titles, box=box.SIMPLE)
    for run in runs:
        note, messages = run.note, _messages(run)
        cells = (str(messages), _epsilon(alone(run, config.delta)))
        if messages is None:
            kept = "not known"
            if note.promised is not None:
                kept = f"the promise counts, {note.promised:.4g} at delta {note.delta:g}"
            cells = ("?", f"ledger gone or not whole: {kept}")
        table.add_row(note.started, note.ledger.removesuffix("/ledger.jsonl"), note.unit, *cells)
    console.print(table)
    for unit, sum_ in totals.items():
        many = sum_.records_per_user
        owned = f" (up to {many} records of a person)" if many > 1 else ""
        remark = f" ({sum_.remark})" if sum_.remark else f" at delta {config.delta:g}"
        known = (
            f"not known: {sum_.remark}"
            if sum_.epsilon is None
            else f"epsilon {_epsilon(sum_.epsilon)}{remark}"
        )
        console.print(f"together, for the unit {unit}{owned}: {known}")
    return DONE


def _messages(run: Spent) -> int | None:
    return None if run.charges is None else sum(charge.count for charge in run.charges)


def _epsilon(value: float | None) -> str:
    return "not known" if value is None else f"{value:.4g}"
