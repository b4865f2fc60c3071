"""`dpps ledger`: what two runs of the same data have spent."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpps.cli import FAILED, WRONG, main
from dpps.runs import STATE


def _train(folder: Path, out: str, *more: str) -> int:
    words = f"--nodes 2 --topology exp --model linear --shared all --classes 2 --batch-size 10 --epochs 1 --seed 3 --out {folder / out}"
    noise = ["--unit", "contribution", "--epsilon", "20"]
    return main(
        ["train", *words.split(), "--node-data", str(folder / "node-{rank}"), *noise, "--quiet", *more]
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(STATE, str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "400")  # cells of the table in one line each
    random = np.random.default_rng(0)
    for node in range(2):
        (tmp_path / f"node-{node}").mkdir()
        x = random.normal(size=(20, 3))
        np.savez(tmp_path / f"node-{node}" / "train.npz", x=x.astype(np.float32), y=(x[:, 0] > 0).astype(int))
    return tmp_path


def _told(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["ledger", str(folder / "node-1"), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_runs_of_the_same_data_add_up(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _train(folder, "simulated") == 0
    assert main(["ledger", str(folder / "node-1")]) == 0
    assert "epsilon" not in capsys.readouterr().out.splitlines()[-1], "a simulation sends nothing"
    assert _train(folder, "one", "--secure-noise") == 0
    assert _train(folder, "two", "--secure-noise") == 0
    found = _told(folder, capsys)
    each = [run["epsilon"] for run in found["runs"]]
    assert [run["messages"] for run in found["runs"]] == [2, 2]
    assert len(each) == 2
    assert max(each) < found["epsilon"]["contribution"] <= sum(each) * (1 + 1e-9)
    assert main(["ledger", str(folder / "node-1")]) == 0
    assert "contribution: epsilon" in capsys.readouterr().out.splitlines()[-1]
    assert main(["ledger", str(folder / "absent")]) == 2
    assert main(["ledger", str(folder), "--delta", "2"]) == 2


def test_a_run_that_is_replaced_still_counts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _train(folder, "run", "--secure-noise", "--batch-size", "5") == 0
    assert _train(folder, "run", "--secure-noise", "--overwrite") == 0
    assert [run["messages"] for run in _told(folder, capsys)["runs"]] == [4, 2]
    shutil.rmtree(folder / "run")
    assert _train(folder, "run", "--secure-noise") == 0
    found = _told(folder, capsys)
    assert [(run["messages"], run["promised"]) for run in found["runs"]] == [(None, 20), (None, 20), (2, 20)]
    assert main(["ledger", str(folder / "node-1"), "--delta", "1e-5"]) == 0
    out = capsys.readouterr().out
    assert out.count("20 at delta 1e-05") == 2
    assert "--delta" in out.splitlines()[-1]
    assert main(["ledger", str(folder / "node-1"), "--delta", "1e-4"]) == 0
    assert "contribution: epsilon" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("how", ["older", "damaged", "without a witness"])
def test_of_a_ledger_that_is_not_whole_the_promise_counts(
    folder: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    assert _train(folder, "run", "--secure-noise") == 0
    ledger = folder / "run" / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    if how == "without a witness":
        ledger.with_name("ledger.jsonl.witness").unlink()
    else:
        ledger.write_bytes(b"".join(lines[:2] if how == "older" else [lines[0], lines[2]]))
    found = _told(folder, capsys)
    assert [(run["messages"], run["epsilon"]) for run in found["runs"]] == [(None, 20)]


def test_no_run_stays_without_a_note(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "file").touch()
    monkeypatch.setenv(STATE, str(folder / "file" / "state"))
    assert _train(folder, "run", "--secure-noise") == FAILED
    assert "$DPPS_STATE" in capsys.readouterr().err
    monkeypatch.setenv(STATE, str(folder / "state"))
    assert _train(folder, "run", "--secure-noise") == 0, "the same command starts afresh"
    assert len(_told(folder, capsys)["runs"]) == 1
    notes = folder / "state" / "data-ledgers.jsonl"
    notes.unlink()
    for _ in range(2):
        assert _train(folder, "run", "--secure-noise", "--resume") == WRONG, "it is finished"
        assert [run["messages"] for run in _told(folder, capsys)["runs"]] == [2], (
            "noted when it is opened again"
        )
        assert notes.read_text().count("\n") == 2, "once for each of two nodes"
