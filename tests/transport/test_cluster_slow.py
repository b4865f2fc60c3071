"""Whole runs in several processes for longer: killed at random, brought back by torchrun, and left alone for many rounds."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from tests.support.processes import Trainers, needs_proc
from tests.support.transport import NODES, PRIVATE, SEEDED, furthest, summary_in, write_node_data


@pytest.mark.slow
def test_ten_random_kills(undisturbed: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng()
    options = [*SEEDED, "--epochs", "2", "--checkpoint-every", "3", "--timeout", "120"]
    for attempt in range(10):
        out, victim, moment = tmp_path / str(attempt), int(rng.integers(2)), int(rng.integers(1, 50))
        trainers = Trainers(2, out, *options)
        trainers.until(moment, victim)
        time.sleep(float(rng.uniform(0, 0.02)))
        trainers.all[victim].kill()
        codes, sent = trainers.wait(), [trainers.charged(r) for r in range(2)]
        if codes != [0, 0]:
            again = Trainers(2, out, *options, "--resume")
            assert again.wait() == [0, 0], (victim, moment, again.said())
        assert furthest(undisturbed, out) == 0.0, (victim, moment)
        charged = [trainers.charged(r) for r in range(2)]
        assert all(c >= max(50, s) for c, s in zip(charged, sent, strict=True))
        assert summary_in(out)["privacy"]["epsilon_sum"] == pytest.approx(100 * max(charged))  # type: ignore[index]


@needs_proc
@pytest.mark.slow
def test_torchrun_brings_a_run_back(undisturbed: Path, tmp_path: Path) -> None:
    """Its elastic restart goes on from the last common checkpoint, without --resume."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = [*SEEDED, "--epochs", "2", "--checkpoint-every", "3", "--out", str(out)]
    with (tmp_path / "log").open("wb") as log:
        agent = subprocess.Popen(
            [
                *command,
                "--log-dir",
                str(tmp_path / "torchrun"),
                "--max-restarts",
                "2",
                "-m",
                "dpps",
                "train",
                *options,
            ],
            stdout=log,
            stderr=log,
        )
    while not (out / "rank-1" / "checkpoint").exists():
        assert agent.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.005)
    workers = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    os.kill(int(workers[1]), signal.SIGKILL)
    assert agent.wait(180) == 0, (tmp_path / "log").read_text()
    assert furthest(undisturbed, out) == 0.0


class Watched:
    """Resident memory (kB) and open files of a process, looked at now and then."""

    def __init__(self, process: int) -> None:
        self._folder = Path(f"/proc/{process}")
        self.memory: list[int] = []
        self.handles: list[int] = []

    def look(self) -> None:
        resident = re.search(r"VmRSS:\s+(\d+)", (self._folder / "status").read_text())
        assert resident is not None, "it has ended"
        self.memory.append(int(resident[1]))
        self.handles.append(len(list((self._folder / "fd").iterdir())))


@needs_proc
@pytest.mark.slow
def test_soak(tmp_path: Path) -> None:
    """Training for 5,000 rounds in 4 processes, with noise, ledger and checkpoints: memory is flat in the last half, no file handles grow."""
    rounds, every = 5000, 100
    write_node_data(tmp_path, examples=100)
    options = ["--node-data", str(tmp_path / "node-{rank}"), "--classes", "2", "--nodes", "4", "--quiet"]
    options += [*PRIVATE, "--batch-size", "10", "--epochs", str(rounds // 10), "--sync-every", "10"]
    trainers = Trainers(NODES, tmp_path / "run", *options, "--checkpoint-every", "300")
    watched = [Watched(process.pid or 0) for process in trainers.all]
    for seen in range(every, rounds, every):
        trainers.until(seen, pause=0.2)
        for process in watched:
            process.look()
    assert trainers.wait(120) == [0] * NODES, trainers.said()
    assert [trainers.charged(r) for r in range(NODES)] == [rounds] * NODES
    for process in watched:
        print(f"memory {process.memory}\nhandles {process.handles}")
        half = len(process.memory) // 2
        assert max(process.memory[half:]) <= 1.05 * process.memory[half]
        # a checkpoint holds one for a moment
        assert median(process.handles[half:]) <= median(process.handles[:half])
