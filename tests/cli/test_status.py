"""`dpps status`: for people and for programs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dpps.cli import DONE, main
from dpps.peers import write_status
from tests.support.peers import status


def test_for_people(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    write_status(tmp_path, status())
    assert main(["status", str(tmp_path)]) == DONE
    said = capsys.readouterr().out
    assert "hospital-a (this one)" in said
    assert "round 17 of 100" in said
    for shown in ("epsilon 1.24", "of 3, delta 1e-05", "record"):
        assert shown in said
    assert "refused <b>somebody</b>" in said
    assert "never" in said  # one of them was not heard of


def test_a_run_that_does_not_go_on_is_not_called_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpps.peers.status.LATE", -1.0)
    write_status(tmp_path, replace(status(), unit="none", message="waits"))
    assert main(["status", str(tmp_path)]) == DONE
    said = capsys.readouterr().out
    assert "not running" in said
    assert "waits" in said
    assert "privacy" not in said  # nothing was promised


def test_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_status(tmp_path, status())
    assert main(["status", str(tmp_path), "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found["alive"] is True
    assert found["epsilon"] == status().epsilon
    assert len(found["members"]) == 8
