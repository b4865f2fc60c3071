"""What a round of `dpps train` costs between four hosts that hear each other after L seconds, in units of L.

Four hosts, one node each, rows of 31 kB (7,850 parameters), one round after another without a pause. Claims: at most 2.5 L for a round of the units record
and contribution, at most 4.5 L for one of node-swap, whose nodes tell each other a number before they draw their noise. One L is what a message takes.

Everything counts that happens between the first round and the last but for evaluations: gradients, noise, ledger, sending. What the
network alone takes is the difference to the same run without latency, which stands behind it.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from measure import Row, Spread, dpps, main

sys.path.append(str(Path(__file__).parents[1] / "tests" / "system"))
from lan import Lan, permitted

HOSTS, DELAYS = 4, (0.0, 0.02, 0.1)
TARGETS = {"record": 2.5, "contribution": 2.5, "node-swap": 4.5}
UNITS = {
    "record": "--unit record --epsilon 3",
    "contribution": "--unit contribution --budget 1 --noise-rate 0.01",
    "node-swap": "--unit node-swap --sensitivity certified --budget 1 --noise-rate 1e-6",
}
OPTIONS = f"--nodes {HOSTS} --batch-size 50 --epochs 1 --quiet --timeout 60"


def train(lan: Lan, unit: str, out: Path) -> float:
    """A run on all hosts: the seconds of one round."""
    meeting = {"WORLD_SIZE": str(HOSTS), "MASTER_ADDR": lan.address(0), "MASTER_PORT": "29500"}
    command, log = dpps(f"train {OPTIONS} {UNITS[unit]} --out", out), out.with_suffix(".log")
    environment = {**os.environ, **meeting, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        output: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT}
        started = [
            lan.start(host, command, env=environment | {"RANK": str(host)}, **output) for host in range(HOSTS)
        ]
        codes = [process.wait(600) for process in started]
        if any(codes):
            raise SystemExit(log.read_text())
    return of_round(out)


def of_round(out: Path) -> float:
    """Seconds of a round of the run in this folder, without totals of epsilon for the log."""
    summary = json.loads((out / "summary.json").read_text())
    return float(summary["seconds"]["gradients"] + summary["seconds"]["protocol"]) / int(summary["rounds"])


def by_latency(lan: Lan, what: str, target: float, measure: Callable[[], float]) -> Iterator[Row]:
    """One row for each latency; what a round takes is judged in units of L."""
    still = 0.0
    for delay in DELAYS:
        lan.delay = delay
        seconds = Spread.of([measure()])
        if not delay:
            still = seconds
            yield Row(f"{what}, no latency", seconds)
            continue
        more = f"{(seconds - still) / delay:.2f} L more than without latency"
        in_l = Spread.of([seconds / delay])
        yield Row(
            f"{what}, L = {1e3 * delay:.0f} ms", seconds, "L", Spread.of([delay]), in_l, target, note=more
        )


def refusal(quick: bool) -> str:
    """Why hosts cannot be made here; empty if they can."""
    if quick:
        return "takes minutes"
    needs = "needs Linux, iproute2 and the right to make network namespaces (root)"
    return "" if permitted() else needs


def rows(quick: bool) -> Iterator[Row]:
    """Every unit at every latency."""
    if refusal(quick):
        yield Row("round between hosts", note=refusal(quick))
        return
    with Lan(HOSTS) as lan, tempfile.TemporaryDirectory() as folder:
        for unit, target in TARGETS.items():
            measure = lambda unit=unit: train(lan, unit, Path(folder) / f"{unit}-{lan.delay}")  # noqa: E731
            yield from by_latency(lan, f"round of dpps train between hosts, unit {unit}", target, measure)


if __name__ == "__main__":
    main(rows, threads=1)
