"""Runs of 0.2 can be continued and reported; what this version cannot do is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from dpps.errors import UsageError
from dpps.report.read import _rounds
from dpps.runs import Options

KEPT: dict[str, Any] = json.loads((Path(__file__).parent / "run-of-0.2.json").read_text())
"""What 0.2 wrote into run.json."""


def test_a_run_is_recognised() -> None:
    assert Options.from_json(KEPT["config"], "out", "no run").fingerprint() == KEPT["fingerprint"]


@pytest.mark.parametrize(
    ("name", "value"), [("schedule", "cosine"), ("averaging", 0.5), ("share-metrics", True)]
)
def test_what_is_gone_is_refused_unless_it_was_not_used(name: str, value: object) -> None:
    with pytest.raises(UsageError):
        Options.from_json({**KEPT["config"], name: value}, "out", "no run")


def test_rounds_without_totals_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rounds.csv"
    path.write_text("round,real,estimated,used,scale,epsilon,loss\n0,,1.0,1.0,0.5,,2.3\n")
    assert [log.epsilon_total for log in _rounds(path)] == [None]
