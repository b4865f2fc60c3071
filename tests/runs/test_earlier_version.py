"""Runs of 0.2 can be continued and reported; what this version cannot do is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dpps
from dpps.cli import main
from dpps.errors import RunError, UsageError
from dpps.privacy import LedgerFile, Unit
from dpps.report.read import _rounds
from dpps.runs import Options

HERE = Path(__file__).parent
KEPT: dict[str, Any] = json.loads((HERE / "options-of-0.2.json").read_text())
"""What 0.2 wrote into run.json for `dpps train`."""
UNIT = dpps.Record(epsilon=3.0)
LOSSES = [0.69994378, 0.68850666, 0.71333766, 0.70952749, 0.6854391, 0.70106095, 0.67697334, 0.67550462]
"""Of the run below, had 0.2 gone on with it after round 5."""


def test_a_run_is_recognised() -> None:
    assert Options.from_json(KEPT["config"], "out", "no run").fingerprint() == KEPT["fingerprint"]


def arguments(unit: Unit | None = UNIT) -> tuple[Any, ...]:
    """Of the run in Python that 0.2 began and stopped."""
    generator = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(40, 3, generator=generator), torch.randint(0, 2, (40,), generator=generator))
        for _ in range(3)
    ]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    algorithm = dpps.PartPSP(model, shared=["0"], batch_size=10, lr_shared=0.3, lr_local=0.2)
    return algorithm, data, {"topology": "ring", "privacy": unit, "seed": 5}


@pytest.mark.parametrize(
    ("unit", "was"),
    [
        (UNIT, "096bd190f5340108"),
        (replace(UNIT, trust=dpps.Pairs(1)), "b37059dddac7e5fc"),
        (dpps.Contribution(epsilon=3.0), "f3e9881d3e5467ef"),
        (dpps.NodeSwap(), "a800bcc3b75a28d2"),
        (dpps.NodeSwap(sensitivity=dpps.Paper(0.78, 0.55)), "ec7d4fbad69051c8"),
        (None, "a85e14b18e289ce5"),
    ],
)
def test_a_run_in_python_is_recognised(unit: Unit | None, was: str) -> None:
    algorithm, data, more = arguments(unit)
    assert dpps.Run(algorithm, data, **more).description.fingerprint == was


def test_a_run_goes_on_with_the_same_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    shutil.copytree(HERE / "run-of-0.2", folder)
    algorithm, data, more = arguments()
    run = dpps.Run.open(folder, algorithm, data, **more).fit(epochs=2)
    assert [log.loss for log in run.log] == pytest.approx(LOSSES, abs=1e-4)
    assert LedgerFile.read(folder / "ledger.jsonl").messages == 8
    assert run.privacy.epsilon == pytest.approx(2.9997301233891713)
    assert main(["report", str(folder)]) == 0
    assert len(dpps.load(folder, model=algorithm.model)) == 3


def test_a_ledger_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = LedgerFile.create(path, {"rows": [0], "version": 4}, durable=True)
    ledger.close()
    for read in (LedgerFile.read, LedgerFile.read_header):
        with pytest.raises(RunError, match=r"format 4.*use the version"):
            read(path)


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
