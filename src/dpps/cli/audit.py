"""`dpps audit`."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich import progress as bars
from rich.console import Console
from rich.table import Table

from dpps.audit import (
    ALPHA,
    CLAIM,
    ENOUGH,
    LEAST,
    Case,
    Finding,
    MeanFinding,
    Progress,
    audit,
    audit_mean,
    cases,
    certifiable,
    check_picture,
    draw_inversion,
    invert,
    pair_cases,
    work,
)
from dpps.cli import DONE, FAILED
from dpps.cli.arguments import parse_options
from dpps.cli.console import plain_console
from dpps.errors import UsageError
from dpps.logs import only_from
from dpps.privacy.accountant import label

_PATIENCE = 2.0  # seconds without a bar
_THOROUGH = 100_000
_OF_ATTACK = ("attack", "plot", "seed", "json")


@dataclass(frozen=True)
class AuditConfig:
    """Attack the shipped mechanism and bound its epsilon from below.

    Everything that is sent over two rounds is recorded and an observer guesses the input from it. The noise is rescaled to
    epsilon 1 over the two rounds: a claim holds if the bound stays below 1, and every claim has a twin, with the noise cut by
    a third, that must be caught. Exit code 1 if anything is not as documented.

    Examples:
      dpps audit                              two minutes on an idle machine
      dpps audit --thorough                   100,000 runs in either world instead of 10,000
      dpps audit --unit record --samples 5000
      dpps audit --attack --plot images.png   read training images off messages, with and without noise
    """

    unit: Literal["all", "contribution", "record", "node-swap"] = "all"
    """Whose claim."""
    sensitivity: Literal["all", "certified", "paper", "worst-case"] = "all"
    """Where the sensitivity comes from in the unit node-swap."""
    thorough: bool = False
    """100,000 runs in either world of every claim: bounds within 5 % of the truth."""
    samples: int | None = None
    """Runs in either world of every claim that is chosen; by default 10,000, which catch the twins. Known leaks have their own number."""
    secure_noise: bool = True
    """Also audit the noise of messages that really leave (integer grid, key from the operating system)."""
    epsilon: float | None = None
    """Epsilon of your run: says whether it could be tested as it is."""
    seed: int = 0
    """Of seeded noise and sampling."""
    attack: bool = False
    """Instead: read training images off real messages, with and without noise."""
    plot: Path | None = None
    """With --attack: picture of what was read (.png or .svg)."""
    json: bool = False
    """For programs."""

    def check(self) -> None:
        """Refuse what is wrong. (Not at construction: the parser would wrap the message.)"""
        if self.attack:
            idle = [
                f for f in fields(self) if f.name not in _OF_ATTACK and getattr(self, f.name) != f.default
            ]
            if idle:
                option = idle[0].name.replace("_", "-")
                raise UsageError(
                    f"--attack reads images off messages and would ignore --{option}: leave one out"
                )
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


def main(arguments: list[str]) -> int:
    """Attack, print what came out, and say by the exit code whether it is as documented."""
    config = parse_options(AuditConfig, arguments, "dpps audit")
    config.check()
    console = plain_console()
    if config.attack:
        return _illustrate(config, console)
    chosen = _chosen(config)
    jobs = [
        (case, secure)
        for case in chosen
        for secure in ((False, True) if config.secure_noise else (False,))
        if secure or not case.secure_only
    ]
    total = sum(work(case, _samples(config)) * case.seconds for case, _ in jobs)
    if not config.json:
        _announce(config, jobs, total)
    findings = []
    # the networks under attack are no runs of the user's, who needs no advice about them
    with _bar(total) as advance, only_from(logging.ERROR, logging.getLogger("dpps")):
        for case, secure in jobs:
            trials = _samples(config)
            told = advance(case)
            findings.append(audit(case, trials=trials, seed=config.seed, secure_noise=secure, progress=told))
    means = _means(config)
    if config.json:
        found = {"findings": [_plain(f) for f in findings], "means": [asdict(m) for m in means]}
        print(json.dumps({**found, "epsilon": _about(config)}))
    else:
        _show(console, findings)
        _show_means(console, means)
        if config.epsilon is not None:
            console.print(_about(config))
    right = [f.as_expected for f in findings] + [m.as_expected for m in means]
    return DONE if all(right) else FAILED


def _means(config: AuditConfig) -> list[MeanFinding]:
    """Whether noise shared by partners cancels: not asked where the unit has no partners."""
    if config.unit == "node-swap" or config.sensitivity != "all":
        return []
    kinds = (False, True) if config.secure_noise else (False,)
    return [audit_mean(_samples(config), config.seed, secure_noise=secure) for secure in kinds]


def _chosen(config: AuditConfig) -> list[Case]:
    """The cases asked for; asking for a sensitivity means node-swap."""
    if config.sensitivity != "all":
        return [c for c in cases() if c.name == "node-swap" and c.kind.startswith(config.sensitivity)]
    return [c for c in (*cases(), *pair_cases()) if config.unit in ("all", c.name)]


def _samples(config: AuditConfig) -> int:
    if config.samples is not None:
        return config.samples
    return _THOROUGH if config.thorough else ENOUGH


def _announce(config: AuditConfig, jobs: list[tuple[Case, bool]], total: float) -> None:
    """What will be done, and how long it takes."""
    runs = sum(work(case, _samples(config)) for case, _ in jobs)
    long = f"{max(total, 1):.0f} s" if total < 100 else f"{total / 60:.0f} minutes"
    said = f"{len(jobs)} audits, {runs:,} runs: about {long} of an idle core."
    plain_console(stderr=True).print(said)


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


def _show(console: Console, findings: list[Finding]) -> None:
    table = Table(
        title="Epsilon of two rounds, bounded from below", title_justify="left", box=box.SIMPLE_HEAD
    )
    table.add_column("claim", min_width=20)
    table.add_column("noise")
    for name in ("runs", "epsilon\nclaimed", "at\nleast", "twin\nat least"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for f in findings:
        colour = (
            "yellow"
            if f.trials_needed
            else "red"
            if not f.as_expected
            else "yellow"
            if f.case.leaks
            else "green"
        )
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
    needed = [f.trials_needed for f in findings if f.trials_needed]
    if needed:
        console.print(
            f"[yellow]Too few runs[/] to catch {len(needed)} of the twins, which says nothing about the code: repeat with --samples {max(needed)}."
        )


def _show_means(console: Console, means: list[MeanFinding]) -> None:
    for m in means:
        twin = (
            ""
            if m.twin is None
            else f"; twin in which both partners add: at least {m.twin:.3g}, {'caught' if m.caught else 'MISSED'}"
        )
        colour, verdict = ("green", "cancels") if m.as_expected else ("red", "FAILS")
        console.print(
            f"Pairs, {m.noise} noise: variance of the mean over the promised one {m.low:.3f} to {m.high:.3f} ({m.trials:,} means){twin}: "
            f"[{colour}]{verdict}[/]"
        )


def _about(config: AuditConfig) -> str | None:
    """What the audit says about the epsilon of a real run."""
    if config.epsilon is None:
        return None
    samples = _samples(config)
    most = certifiable(samples)
    tested = f"the same code was tested at epsilon {CLAIM:g}"
    if config.epsilon > most:
        return f"{label(config.epsilon)}: beyond testing ({samples:,} runs can show at most {most:.1f}); {tested}"
    return f"{label(config.epsilon)}: not tested by itself; {tested}, where an error shows best"


def _plain(f: Finding) -> dict[str, Any]:
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


def _illustrate(config: AuditConfig, console: Console) -> int:
    images, probes = invert(seed=config.seed)
    if config.plot:
        draw_inversion(config.plot, images, probes)
    if config.json:
        facts = ("setting", "correlation", "identified", "images", "candidates")
        print(json.dumps({"probes": [{name: getattr(p, name) for name in facts} for p in probes]}))
        return DONE
    table = Table(
        title="Training images read off messages (batch of one, first layer shared)", title_justify="left"
    )
    table.add_column("messages sent with")
    table.add_column("correlation (median)", justify="right")
    table.add_column(f"picked out of {probes[0].candidates:,}", justify="right")
    for p in probes:
        table.add_row(p.setting, f"{p.correlation:.3f}", f"{p.identified} of {p.images}")
    console.print(table)
    if config.plot:
        console.print(f"picture   {config.plot}")
    return DONE
