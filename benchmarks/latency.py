"""What a round of `dpps train` costs between four hosts that hear each other after L seconds, in units of L.

Four hosts, one node each, rows of 31 kB (7,850 parameters), one round after another without a pause. Targets: at most 2.5 L for a round of the units record
and contribution, at most 4.5 L for one of node-swap, whose nodes tell each other a number before they draw their noise. One L is what a message takes.

Everything counts that happens between the first round and the last but for evaluations: gradients, noise, ledger, sending. What the
network alone takes is the difference to the same run without latency, which stands behind it.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from lan import Lan, permitted

HOSTS, DELAYS = 4, (0.0, 0.02, 0.1)
TARGETS = {"record": 2.5, "contribution": 2.5, "node-swap": 4.5}
UNITS = {
    "record": "--unit record --epsilon 3",
    "contribution": "--unit contribution --budget 1 --noise-rate 0.01",
    "node-swap": "--unit node-swap --sensitivity certified --budget 1 --noise-rate 1e-6",
}
OPTIONS = f"--nodes {HOSTS} --batch-size 50 --epochs 1 --quiet --timeout 60"


def train(lan: Lan, unit: str, out: Path) -> tuple[float, int]:
    """A run on all hosts: the seconds of its rounds, and how many there were."""
    meeting = {"WORLD_SIZE": str(HOSTS), "MASTER_ADDR": lan.address(0), "MASTER_PORT": "29500"}
    command = [
        sys.executable,
        "-m",
        "dpps",
        "train",
        *OPTIONS.split(),
        *UNITS[unit].split(),
        "--out",
        str(out),
    ]
    log = out.with_suffix(".log")
    with log.open("wb") as file:
        started = [
            lan.start(
                host,
                command,
                env={**os.environ, **meeting, "RANK": str(host), "OMP_NUM_THREADS": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            for host in range(HOSTS)
        ]
        codes = [process.wait(600) for process in started]
        if any(codes):
            raise SystemExit(log.read_text())
    summary = json.loads((out / "summary.json").read_text())
    return summary["seconds"]["total"] - summary["seconds"]["evaluation"], summary["rounds"]


def main() -> None:
    """Every unit at every latency."""
    if not permitted():
        print(
            "latency: not measured, for it needs Linux, iproute2 and the right to make network namespaces (root)"
        )
        return
    with Lan(HOSTS) as lan, tempfile.TemporaryDirectory() as folder:
        for unit, target in TARGETS.items():
            still = 0.0
            for delay in DELAYS:
                lan.delay = delay
                seconds, rounds = train(lan, unit, Path(folder) / f"{unit}-{delay}")
                each = seconds / rounds
                still = still if delay else each
                print(f"round, {unit:<13} L = {1e3 * delay:4.0f} ms {1e3 * each:7.1f} ms", end="", flush=True)
                in_l = (
                    f"   {each / delay:5.2f} L   {(each - still) / delay:5.2f} L more   at most {target} L"
                    if delay
                    else ""
                )
                print(in_l, flush=True)


if __name__ == "__main__":
    main()
