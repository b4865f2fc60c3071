"""What `dpps train` does once the last round is over: a model card, and baselines when asked for."""

import json
from pathlib import Path

import pytest

from dpps.cli import DONE, WRONG, main
from dpps.report import read_folder

QUICK = ["train", "--nodes", "4", "--epochs", "1", "--batch-size", "500", "--quiet"]


def test_baselines_stand_in_summary_report_and_two_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "run"
    assert main([*QUICK, "--out", str(out), "--baselines"]) == DONE
    shown = capsys.readouterr().out
    assert {"gain", "cost"} <= {line.split(" ")[0] for line in shown.splitlines()}
    from dpps.runs import OWN_EYES

    assert OWN_EYES in shown
    found = json.loads((out / "summary.json").read_text())["baselines"]
    assert set(found) == {"no privacy", "alone"}
    assert len(found["alone"]["accuracy_by_node"]) == 4
    record = read_folder(out, "run")
    assert record.baselines["no privacy"].by_epoch == found["no privacy"]["accuracy_by_epoch"]
    assert "aseline" not in (out / "model-card.md").read_text()


def test_the_private_run_is_the_same_with_and_without_baselines(tmp_path: Path):
    for name, options in (("plain", []), ("compared", ["--baselines"])):
        assert main([*QUICK, "--out", str(tmp_path / name), *options]) == DONE
    summaries = [json.loads((tmp_path / n / "summary.json").read_text()) for n in ("plain", "compared")]
    assert "baselines" not in summaries[0]
    assert summaries[0]["privacy"] == summaries[1]["privacy"]
    files = [(tmp_path / n / "models" / "node-1.safetensors").read_bytes() for n in ("plain", "compared")]
    assert files[0] == files[1]


def test_baselines_are_refused_where_messages_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    options = ["--out", str(tmp_path / "run"), "--baselines"]
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main([*QUICK, *options]) == WRONG
    assert "--baselines" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
