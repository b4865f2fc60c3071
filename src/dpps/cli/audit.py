"""`dpps audit`."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from rich import box
from rich import progress as bars
from rich.console import Console
from rich.table import Table

from dpps.cli import DONE, FAILED
from dpps.errors import UsageError
from dpps.privacy.accountant import label
from dpps.privacy.audit import ALPHA, CLAIM, Case, Finding, Progress, audit, cases, certifiable, work

_PATIENCE = 2.0  # seconds without a bar


@dataclass(frozen=True)
class AuditConfig:
    """Attack the shipped mechanism and bound its epsilon from below.

    Everything that is sent over two rounds is recorded and an observer guesses the input from it. The noise is rescaled to
    epsilon 1 over the two rounds: a claim holds if the bound stays below 1, and every claim has a twin, with the noise cut by
    a third, that must be caught. Exit code 1 if anything is not as documented.

    Examples:
      dpps audit                              everything, some minutes
      dpps audit --unit record --samples 5000
      dpps audit --attack --plot images.png   read training images off messages, with and without noise
    """

    unit: Literal["all", "contribution", "record", "node-swap"] = "all"
    """Whose claim."""
    sensitivity: Literal["all", "certified", "paper", "worst-case"] = "all"
    """Where the sensitivity comes from in the unit node-swap."""
    samples: int = 100_000
    """Runs in either world. 5,000 catch the twins; known leaks have their own number."""
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

    def __post_init__(self) -> None:
        if self.plot and not self.attack:
            raise UsageError("--plot belongs to --attack: add it")
        if self.epsilon is not None and not self.epsilon > 0:
            raise UsageError(f"--epsilon is {self.epsilon}: it must be above 0")
        if self.sensitivity != "all" and self.unit not in ("all", "node-swap"):
            raise UsageError(f"--sensitivity belongs to the unit node-swap, not to {self.unit}: leave it out")


def main(arguments: list[str]) -> int:
    """Attack, print what came out, and say by the exit code whether it is as documented."""
    config = tyro.cli(AuditConfig, args=arguments, prog="dpps audit")
    console = Console(highlight=False, soft_wrap=True)
    if config.attack:
        return _illustrate(config, console)
    chosen = _chosen(config)
    jobs = [
        (case, secure) for case in chosen for secure in ((False, True) if config.secure_noise else (False,))
    ]
    with _bar(sum(work(case, config.samples) for case, _ in jobs)) as advance:
        findings = [
            audit(case, trials=config.samples, seed=config.seed, secure_noise=secure, progress=advance)
            for case, secure in jobs
        ]
    if config.json:
        print(json.dumps({"findings": [_plain(f) for f in findings], "epsilon": _about(config)}))
    else:
        _show(console, findings)
        if config.epsilon is not None:
            console.print(_about(config))
    return DONE if all(f.as_expected for f in findings) else FAILED


def _chosen(config: AuditConfig) -> list[Case]:
    """The cases asked for; asking for a sensitivity means node-swap."""
    if config.sensitivity != "all":
        return [c for c in cases() if c.name == "node-swap" and c.kind.startswith(config.sensitivity)]
    return [c for c in cases() if config.unit in ("all", c.name)]


@contextmanager
def _bar(total: int) -> Iterator[Progress]:
    """A bar on a terminal, once it has taken longer than two seconds."""
    console, begun = Console(stderr=True), time.monotonic()
    bar = bars.Progress(
        bars.TextColumn("runs"),
        bars.MofNCompleteColumn(),
        bars.BarColumn(),
        bars.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task("", total=total)

    def advance(count: int) -> None:
        bar.advance(task, count)
        if not bar.live.is_started and time.monotonic() - begun > _PATIENCE:
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()


def _show(console: Console, findings: list[Finding]) -> None:
    table = Table(
        title="Epsilon of two rounds, bounded from below", title_justify="left", box=box.SIMPLE_HEAD
    )
    table.add_column("claim")
    table.add_column("noise")
    for name in ("runs", "epsilon\nclaimed", "at\nleast", "twin\nat least"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for f in findings:
        colour = "red" if not f.as_expected else "yellow" if f.case.leaks else "green"
        table.add_row(
            f"{f.case.name}, {f.case.kind}",
            f.noise,
            f"{f.bound.trials:,}",
            f"{f.case.claim:g}" + (f" ({f.case.delta:g})" if f.case.delta else ""),
            f"{f.bound.epsilon:.3f}",
            "" if f.twin is None else f"{f.twin.epsilon:.3f} {'caught' if f.caught else 'MISSED'}",
            f"[{colour}]{f.verdict}[/]",
        )
    console.print(table)
    console.print(
        f"Runs are in either world; delta stands in brackets; a bound is too high with probability {ALPHA:g} at most."
    )
    console.print("The twin is the same code with its noise cut by a third: it must be caught.")


def _about(config: AuditConfig) -> str | None:
    """What the audit says about the epsilon of a real run."""
    if config.epsilon is None:
        return None
    most = certifiable(config.samples)
    tested = f"the same code was tested at epsilon {CLAIM:g}"
    if config.epsilon > most:
        return f"{label(config.epsilon)}: beyond testing ({config.samples:,} runs can show at most {most:.1f}); {tested}"
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
        "verdict": f.verdict,
        "as_expected": f.as_expected,
    }


def _illustrate(config: AuditConfig, console: Console) -> int:
    from dpps.privacy.inversion import invert, picture

    images, probes = invert(seed=config.seed)
    if config.plot:
        picture(config.plot, images, probes)
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
