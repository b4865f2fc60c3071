"""Whole runs in several processes: equal to a simulation, and nothing is lost when something dies."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from dpps.cli import main
from tests.support import processes
from tests.support.processes import Trainers, needs_proc
from tests.support.transport import COMMON, NODES, PRIVATE, SEEDED, furthest, summary_in, write_node_data


def test_training_equals_simulation(undisturbed: Path, tmp_path: Path) -> None:
    """Gradients of a block of nodes may differ in the last bits from those of all nodes: a float tolerance."""
    options = [o for o in SEEDED if o != "--seeded-noise"]
    assert main(["train", *options, "--epochs", "2", "--out", str(tmp_path / "one")]) == 0
    assert furthest(undisturbed, tmp_path / "one") < 1e-5
    alone, together = summary_in(tmp_path / "one"), summary_in(undisturbed)
    parts = [summary_in(undisturbed / f"rank-{rank}")["accuracy_by_node"] for rank in range(2)]
    assert [*parts[0], *parts[1]] == pytest.approx(alone["accuracy_by_node"], abs=0.2)  # type: ignore[misc]
    assert together["privacy"]["epsilon"] == alone["privacy"]["epsilon"]  # type: ignore[index]
    assert str(together["privacy"]["statement"]).startswith("No privacy")  # type: ignore[index]
    assert "simulation" not in together["privacy"]["statement"]  # type: ignore[index]


def test_unseeded_runs_differ_and_keep_metrics_at_home(tmp_path: Path) -> None:
    for name in ("a", "b"):
        trainers = Trainers(2, tmp_path / name, *COMMON, *PRIVATE, "--epochs", "1")
        assert trainers.wait() == [0, 0], trainers.said()
        for rank, said in enumerate(trainers.said()):
            assert re.search(rf"^rank {rank}: accuracy +[0-9.]+ % .* 2 nodes$", said, re.MULTILINE), said
            assert re.search(rf"^rank {rank}: privacy +epsilon [0-9.]+", said, re.MULTILINE), said
    assert furthest(tmp_path / "a", tmp_path / "b") > 1e-4
    summary = summary_in(tmp_path / "a")
    assert summary["test_accuracy"] is None
    assert summary["final_loss"] is None
    assert not {"scores", "comparisons", "baselines"} & summary.keys()  # measured without noise
    assert summary_in(tmp_path / "a" / "rank-1")["test_accuracy"] is not None
    assert "No privacy" not in summary["privacy"]["statement"]  # type: ignore[index]
    assert "seed" not in summary["privacy"]["statement"]  # type: ignore[index]


def test_killed_and_resumed(undisturbed: Path, tmp_path: Path) -> None:
    out, rng = tmp_path / "run", np.random.default_rng()
    options = [*SEEDED, "--epochs", "2", "--checkpoint-every", "3", "--timeout", "120"]
    trainers = Trainers(2, out, *options, hold_before=49)
    victim, moment = int(rng.integers(2)), int(rng.integers(5, 45))
    trainers.until(moment)
    trainers.all[victim].kill()
    trainers.let_go()
    codes = trainers.wait()
    assert codes[1 - victim] == 1, (codes, victim, moment)
    assert re.search(rf"rank {victim} .*lost|rank {victim}, ", trainers.said()[1 - victim])
    sent = [trainers.charged(r) for r in range(2)]
    again = Trainers(2, out, *options, "--resume")
    assert again.wait() == [0, 0], (victim, moment, again.said())
    assert furthest(undisturbed, out) == 0.0, (victim, moment)
    # every message of the first attempt stays charged, and what was repeated is charged again
    assert all(again.charged(r) >= max(50, sent[r]) for r in range(2))
    total = summary_in(out)["privacy"]["epsilon_sum"]  # type: ignore[index]
    assert total == pytest.approx(100 * max(again.charged(r) for r in range(2)))


def _stop(trainers: Trainers, *ranks: int, after: int) -> None:
    """Ask these ranks to stop; all of them do."""
    trainers.until(after)
    for rank in ranks:
        os.kill(trainers.all[rank].pid or 0, signal.SIGTERM)
    trainers.let_go()
    assert trainers.wait() == [3, 3], trainers.said()


def test_stopped_together_and_resumed(undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = [*SEEDED, "--epochs", "2"]
    _stop(Trainers(2, out, *options, hold_before=40), 1, after=10)
    found = [[p.name for p in (out / f"rank-{r}" / "checkpoint").iterdir()] for r in range(2)]
    assert found[0] == found[1]
    assert len(found[0]) == 1
    again = Trainers(2, out, *options, "--resume")
    assert again.wait() == [0, 0], again.said()
    assert furthest(undisturbed, out) == 0.0
    assert [again.charged(r) for r in range(2)] == [50, 50], "nothing was repeated"


def test_damaged_checkpoint_takes_everybody_back(undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = [*SEEDED, "--epochs", "2", "--checkpoint-every", "4"]
    _stop(Trainers(2, out, *options, hold_before=40), 0, 1, after=15)
    newest = max((out / "rank-1" / "checkpoint").iterdir()) / "tensors.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    again = Trainers(2, out, *options, "--resume")
    assert again.wait() == [0, 0], again.said()
    assert "damaged" in again.said()[1]
    assert furthest(undisturbed, out) == 0.0
    assert again.charged(0) == again.charged(1) > 50


def test_lost_ledger_stops_the_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    _stop(Trainers(2, out, *SEEDED, "--epochs", "2", hold_before=40), 0, after=3)
    (out / "rank-1").rename(tmp_path / "elsewhere")
    again = Trainers(2, out, *SEEDED, "--epochs", "2", "--resume")
    assert again.wait() == [1, 1]
    assert all("rank 1 " in said for said in again.said())


@pytest.mark.parametrize(
    ("victim", "named"), [(1, r"rank 1 \(127.0.0.1\) .*no answer"), (0, r"rank 0, .*127.0.0.1:")]
)
def test_hung_process_is_named(tmp_path: Path, victim: int, named: str) -> None:
    options = [*SEEDED, "--epochs", "4", "--checkpoint-every", "2", "--timeout", "10"]
    trainers = Trainers(3, tmp_path / "run", *options, hold_before=99)
    trainers.until(8)
    os.kill(trainers.all[victim].pid or 0, signal.SIGSTOP)
    trainers.let_go()
    survivors = [r for r in range(3) if r != victim]
    for r in survivors:
        trainers.all[r].join(processes.PATIENCE)
    codes = trainers.wait(1)
    assert [codes[r] for r in survivors] == [1, 1]
    for r in survivors:
        assert re.search(named, trainers.said()[r]), trainers.said()
        assert not any(f"rank {s} (127.0.0.1)" in trainers.said()[r] for s in survivors)


def _ends(function: Callable[..., None], *arguments: tuple[Any, ...]) -> list[int | None]:
    """The exit codes of processes that call the function with these arguments each."""
    started = [processes.context.Process(target=function, args=each) for each in arguments]
    for process in started:
        process.start()
    for process in started:
        process.join(processes.PATIENCE)
    return [process.exitcode for process in started]


def test_other_options_are_named(tmp_path: Path) -> None:
    port = processes.free_port()
    options = [[*SEEDED, "--epochs", "2", "--out", str(tmp_path / "run")] for _ in range(3)]
    options[1][options[1].index("--epochs") + 1] = "3"
    logs = [tmp_path / f"log-{r}" for r in range(3)]
    places = [processes.Rendezvous(r, 3, "127.0.0.1", port) for r in range(3)]
    assert _ends(processes._train, *zip(places, options, logs, [{}] * 3, strict=True)) == [2, 2, 2]
    for log in logs:
        assert re.search(r"rank 1 .*configuration: epochs is 3,.* 2;", log.read_text())
    assert not (tmp_path / "run").exists()


def test_a_stranger_without_the_secret(tmp_path: Path) -> None:
    """Through the command line; nothing is written."""
    port, logs = processes.free_port(), [tmp_path / f"log-{r}" for r in range(2)]
    options = [*SEEDED, "--epochs", "2", "--out", str(tmp_path / "run")]
    places = [processes.Rendezvous(r, 2, "127.0.0.1", port) for r in range(2)]
    secrets = [{"DPPS_SECRET": secret * 2} for secret in ("0123456789abcdef", "fedcba9876543210")]
    assert _ends(processes._train, *zip(places, [options] * 2, logs, secrets, strict=True)) == [2, 2]
    for log in logs:
        assert re.fullmatch(r"dpps: rank \d: rank \d .*\$DPPS_SECRET .*rank \d\n", log.read_text())
    assert not (tmp_path / "run").exists()


def _torchrun(out: Path, *options: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """`torchrun --nproc-per-node 2 -m dpps train`, as the documents start it; at a port of its own, so that tests can run together."""
    place = ["--master-addr", "127.0.0.1", "--master-port", str(processes.free_port())]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *place]
    command = [*torchrun, "-m", "dpps", "train", *options, "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_torchrun_stopped_on_request(undisturbed: Path, tmp_path: Path, number: signal.Signals) -> None:
    """All processes finish the same round and write a checkpoint; --resume ends as processes that were started by hand, and never
    stopped."""
    out = tmp_path / "train"  # the word is an option's value here, not the command
    options = [*SEEDED, "--epochs", "2"]
    with _torchrun(out, *options, env=processes.holding(40, tmp_path / "gate", needs="RANK")) as agent:
        _until_charged(out, 10, agent)
        agent.send_signal(number)
        said, _ = agent.communicate(timeout=processes.PATIENCE)
    assert agent.returncode == 1, said.decode()  # torchrun's own
    assert said.decode().count("dpps resume") == 2, said.decode()
    charged = [(out / f"rank-{r}" / "ledger.jsonl").read_bytes().count(b"\n") - 1 for r in range(2)]
    found = [[p.name for p in (out / f"rank-{r}" / "checkpoint").iterdir()] for r in range(2)]
    assert charged[0] == charged[1] < 50
    assert found == [[f"round-{charged[0]:09}"]] * 2
    with _torchrun(out, *options, "--resume") as agent:
        said, _ = agent.communicate(timeout=processes.PATIENCE)
    assert agent.returncode == 0, said.decode()
    assert furthest(undisturbed, out) == 0.0
    assert all(f"rank {rank}: privacy" in said.decode() for rank in range(2))


def _until_charged(out: Path, rounds: int, started: subprocess.Popen[bytes]) -> None:
    ledgers = [out / f"rank-{r}" / "ledger.jsonl" for r in range(2)]
    while not all(ledger.exists() and ledger.read_bytes().count(b"\n") > rounds for ledger in ledgers):
        assert started.poll() is None
        time.sleep(0.002)


def test_own_data_never_moves(tmp_path: Path) -> None:
    """Each node reads its own files only, npz or csv."""
    write_node_data(tmp_path, examples=60)
    options = ["--node-data", str(tmp_path / "node-{rank}"), "--classes", "2", "--nodes", "4"]
    trainers = Trainers(2, tmp_path / "run", *options, "--batch-size", "10", *PRIVATE, "--epochs", "2")
    assert trainers.wait() == [0, 0], trainers.said()
    summary = summary_in(tmp_path / "run")
    assert summary["rounds"] == 12
    assert summary["own_accuracy_by_node"] == []
    homes = [summary_in(tmp_path / "run" / f"rank-{rank}") for rank in range(2)]
    assert [len(home["own_accuracy_by_node"]) for home in homes] == [NODES // 2] * 2  # type: ignore[arg-type]


def _fill_the_disk(place: processes.Rendezvous, options: list[str], log: Path) -> None:
    """As `dpps train`, on a disk that is full from the second checkpoint on."""
    import errno

    import dpps.runs.folder

    write, written = dpps.runs.folder.write_synced, []

    def fail_later(path: Path, data: bytes) -> None:
        written.append(path)
        if len(written) > 2 and place.rank == 1:  # two files make a checkpoint
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    dpps.runs.folder.write_synced = fail_later
    processes._train(place, options, log, {})


def test_a_full_disk_is_told_and_costs_no_checkpoint(undisturbed: Path, tmp_path: Path) -> None:
    out, port = tmp_path / "run", processes.free_port()
    options = [*SEEDED, "--epochs", "2", "--checkpoint-every", "5", "--out", str(out)]
    logs = [tmp_path / f"log-{r}" for r in range(2)]
    places = [processes.Rendezvous(r, 2, "127.0.0.1", port) for r in range(2)]
    ends = _ends(_fill_the_disk, *zip(places, [options] * 2, logs, strict=True))
    assert ends == [1, 1], [log.read_text() for log in logs]
    assert re.search("round 10 .*No space.*round-000000005", logs[1].read_text())
    assert "rank 1 stopped" in logs[0].read_text()
    again = Trainers(2, out, *SEEDED, "--epochs", "2", "--checkpoint-every", "5", "--resume")
    assert again.wait() == [0, 0], again.said()
    assert furthest(undisturbed, out) == 0.0


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
    command += ["--log-dir", str(tmp_path / "torchrun"), "--max-restarts", "2", "-m", "dpps", "train"]
    options = [*SEEDED, "--epochs", "2", "--checkpoint-every", "3", "--out", str(out)]
    with (tmp_path / "log").open("wb") as log:
        agent = subprocess.Popen([*command, *options], stdout=log, stderr=log)
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
