"""`dpps train` stopped, killed and gone on with: nothing is lost, nothing is overwritten unasked."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from safetensors.numpy import load_file

from dpps.cli import main
from tests.support import processes

QUICK = ["--nodes", "4", "--epochs", "1", "--batch-size", "500", "--quiet"]


def train(out: Path, *options: str) -> dict:
    assert main(["train", *QUICK, "--out", str(out), *options]) == 0
    return json.loads((out / "summary.json").read_text())


def test_overwrite_and_resume_are_asked_for(tmp_path, capsys):
    out = tmp_path / "run"
    train(out)
    (out / "mine.txt").write_text("precious")
    assert main(["train", *QUICK, "--out", str(out)]) == 2
    assert "add --resume or --overwrite" in capsys.readouterr().err
    train(out, "--overwrite")
    assert (out / "mine.txt").read_text() == "precious"
    assert main(["train", *QUICK, "--out", str(out), "--resume", "--seed", "9"]) == 2
    assert "(seed)" in capsys.readouterr().err


LONGER = [
    "--nodes",
    "4",
    "--epochs",
    "12",
    "--batch-size",
    "250",
    "--checkpoint-every",
    "5",
    "--quiet",
    "--unit",
    "node-swap",
    "--budget",
    "5",
    "--sync-every",
    "5",
]


def command(out: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "dpps", "train", *LONGER, "--out", str(out), *options]


def finish(out: Path, *options: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command(out, *options), env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def stop(out: Path, number: int, checkpoints: int = 1) -> tuple[int, str]:
    """Start a run, signal it when it has so many checkpoints; its exit code and what it printed."""
    environment = processes.holding(100, out.parent / f"{out.name}.gate") | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command(out), env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        while len(list((out / "checkpoint").glob("round-*"))) < checkpoints:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        shown, _ = process.communicate()
        return process.returncode, shown


def test_a_lost_or_older_ledger_stops_a_resumed_run(tmp_path, capsys):
    out = tmp_path / "run"
    code, _ = stop(out, signal.SIGTERM)
    assert code == 3
    ledger = out / "ledger.jsonl"
    whole = ledger.read_bytes()
    for damaged in (None, b"".join(whole.splitlines(keepends=True)[:3])):
        ledger.unlink()
        if damaged is not None:
            ledger.write_bytes(damaged)
        assert main(["train", *LONGER, "--out", str(out), "--resume"]) == 1
        assert "ledger.jsonl" in capsys.readouterr().err
        if damaged is None:
            assert not ledger.exists()  # never started afresh
            ledger.touch()
    ledger.write_bytes(whole)
    assert main(["train", *LONGER, "--out", str(out), "--resume"]) == 0


def test_the_ledger_of_messages_that_left_is_never_deleted(tmp_path):
    train(tmp_path / "run", "--secure-noise")
    train(tmp_path / "run", "--secure-noise", "--overwrite")
    assert len(list((tmp_path / "run").glob("ledger-until-*.jsonl"))) == 1


def same_models(a: Path, b: Path) -> bool:
    """Bit for bit; what the files say of privacy differs where rounds were repeated, which are charged again."""
    pairs = [[load_file(out / "models" / f"node-{k}.safetensors") for out in (a, b)] for k in range(4)]
    return all(x.keys() == y.keys() and all((x[n] == y[n]).all() for n in x) for x, y in pairs)


def test_sigterm_stops_resumably_kill_loses_nothing_and_a_damaged_checkpoint_is_passed_over(tmp_path):
    whole = tmp_path / "whole"
    finish(whole)
    for number, expected in ((signal.SIGTERM, 3), (signal.SIGKILL, -9)):
        out = tmp_path / number.name
        code, shown = stop(out, number, checkpoints=2)
        assert code == expected
        assert ("--resume" in shown) == (number == signal.SIGTERM)
        if number == signal.SIGKILL:
            newest = max((out / "checkpoint").glob("round-*")) / "tensors.safetensors"
            newest.write_bytes(newest.read_bytes()[:100])
        resumed = finish(out, "--resume")
        assert ("round-000000010" in resumed.stderr) == (number == signal.SIGKILL)
        assert same_models(out, whole)
        assert (out / "rounds.csv").read_text() == (whole / "rounds.csv").read_text()
