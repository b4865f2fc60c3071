"""Twelve epochs of the paper's MLP on full MNIST with `dpps train`, as a user runs it: 720 rounds, evaluation, files.

Claim: the whole command takes at most 720 x 0.011 s = 7.92 s on two idle cores. That is a sixtieth of the authors' code, which
takes 0.66 s a round (ten processes): theirs was measured elsewhere, on a similar machine with two cores; ours is measured here.
How fast this machine is just then shows in the bare matrix products of a round, timed between the runs: 2.3 ms there.
Needs MNIST in $DPPS_DATA or the user cache.
"""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pooch
from learners import learner
from measure import Row, Spread, dpps, main, times
from training import Products

RECIPE = (
    "--model mlp --algorithm partpsp --shared 1 --nodes 10 --topology exp --unit node-swap --sensitivity paper "
    "--c-prime 0.78 --decay 0.55 --budget 5 --noise-rate 0.001 --sync-every 5 --batch-size 100 --lr-shared 0.1 "
    "--lr-local 0.1 --lr-step 5 --quiet"
)
"""The authors' settings, with the paper's sensitivity, which needs synchronisation to stay finite."""

AUTHORS, AIM, PRODUCTS = 0.66, 0.011, 0.0023  # seconds a round


def train(data: str, epochs: int, threads: int) -> dict[str, float]:
    """Seconds of one command: the whole, and its parts as the run itself recorded them."""
    with tempfile.TemporaryDirectory() as folder:
        command = dpps(f"train --data {data} --epochs {epochs} {RECIPE} --out", folder)
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        begun = time.perf_counter()
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        whole = time.perf_counter() - begun
        summary = json.loads((Path(folder) / "summary.json").read_text())
    parts = summary["seconds"]
    rounds = parts["gradients"] + parts["protocol"]
    return {
        "count": summary["rounds"],
        "the whole command": whole,
        "rounds only": rounds,
        "evaluation only": parts["evaluation"],
        "start, data and files": whole - rounds - parts["evaluation"],
    }


def is_here(data: str) -> bool:
    """Whether the data set can be read without downloading it."""
    folders = (os.environ.get("DPPS_DATA"), pooch.os_cache("dpps"))
    return data == "mnist-mini" or any(
        folder and any((Path(folder) / data).glob("train-images*")) for folder in folders
    )


def rows(quick: bool) -> Iterator[Row]:
    """The command as a whole, then its parts."""
    data, epochs, repetitions, threads = ("mnist-mini", 1, 1, 1) if quick else ("mnist", 12, 3, 2)
    if not is_here(data):
        note = (
            "MNIST is neither in $DPPS_DATA nor in the user cache; any `dpps train --data mnist` downloads it"
        )
        yield Row(f"dpps train, MLP, {data}, {epochs} epochs", note=note)
        return
    nodes, batch = (2, 4) if quick else (10, 100)
    products = Products(learner(nodes, batch, 2 * batch))
    runs, yardstick = [], times((products,), 100)[0]
    for _ in range(repetitions):
        runs.append(train(data, epochs, threads))
        yardstick += times((products,), 100)[0]
    count = int(runs[0].pop("count"))
    for part in runs[0]:
        whole = part == "the whole command"
        yield Row(
            f"dpps train, MLP, {data}, {count} rounds: {part}",
            Spread.of([run[part] for run in runs]),
            target=AIM * count if whole else None,
            note=f"the authors' code, measured elsewhere: {AUTHORS * count:.0f} s" if whole else "",
            threads=threads,
        )
    yield Row(
        f"between these runs: bare matrix products of a round, N={nodes}, batch {batch}",
        Spread.of(yardstick),
        note=f"{PRODUCTS * 1e3:g} ms on the machine that the limit comes from",
    )


if __name__ == "__main__":
    main(rows)
