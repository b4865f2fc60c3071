"""Runs made in Python are reported, compared and found by `dpps ledger` as those of the command line are."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import dpps
from dpps.cli import main
from dpps.privacy import Unit
from dpps.report import read_folder, read_run


def _data(seed: int = 0) -> list[TensorDataset]:
    draw = torch.Generator().manual_seed(seed)
    return [
        TensorDataset(torch.randn(40, 6, generator=draw), torch.randint(0, 3, (40,), generator=draw))
        for _ in range(3)
    ]


def _fit(
    folder: Path, unit: Unit | None, data: list[TensorDataset] | None = None, secure: bool = False
) -> dpps.Run:
    torch.manual_seed(0)
    algorithm = dpps.PartPSP(dpps.models.MLP((6, 4, 3)), shared=["layer1"], batch_size=10)
    run = dpps.Run(
        algorithm,
        data or _data(),
        topology=dpps.Ring(3),
        privacy=unit,
        folder=folder,
        seed=0,
        secure_noise=secure,
    )
    return run.fit(epochs=2)


UNITS = [
    None,
    dpps.Record(epsilon=3.0, clip=0.5),
    dpps.Record(noise_multiplier=2.0, records_per_user=2),
    dpps.Record(epsilon=3.0, trust=dpps.Pairs(1)),
    dpps.Contribution(clip=1.0, round_epsilon=0.5),
    dpps.Contribution(clip=1.0, mechanism="gaussian", noise_multiplier=3.0),
    dpps.NodeSwap(budget=5.0, sensitivity=dpps.Paper(0.78, 0.55)),
]


@pytest.mark.parametrize("unit", UNITS, ids=str)
def test_the_folder_says_what_the_run_in_memory_says(unit: Unit | None, tmp_path: Path) -> None:
    run = _fit(tmp_path / "run", unit)
    kept, live = read_folder(tmp_path / "run", "run"), read_run(run, "run")
    names = ("title", "nodes", "network", "options", "private_noise", "simulated", "estimator")
    for name in (*names, "sync_every", "command", "shared_parameters", "bytes_sent"):
        assert getattr(kept, name) == getattr(live, name), name
    assert json.dumps(kept.privacy.to_json()) == json.dumps(live.privacy.to_json())
    assert list(kept.accuracy.by_node) == list(live.accuracy.by_node)
    assert [log.round for log in kept.rounds] == [log.round for log in live.rounds]
    if unit is not None:
        assert kept.unit is not None
        assert kept.unit.total([c for _, c in kept.charges]) == unit.total([c for _, c in live.charges])


def test_it_is_reported_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _fit(tmp_path / "mine", dpps.Record(epsilon=3.0))
    options = ["--nodes", "3", "--batch-size", "100", "--epochs", "1", "--unit", "none", "--quiet"]
    assert main(["train", *options, "--out", "theirs"]) == 0
    assert main(["report", "mine"]) == 0
    assert (tmp_path / "mine" / "report.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "mine" / "model-card.md").exists()
    assert main(["report", "mine", "theirs"]) == 0
    assert (tmp_path / "comparison.html").exists()


def test_what_it_spends_of_its_data_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the content of the tensors, whatever their order; runs of other data, and simulations, do not count."""
    monkeypatch.setenv("DPPS_STATE", str(tmp_path / "state"))
    unit = dpps.Record(noise_multiplier=2.0)
    _fit(tmp_path / "one", unit, secure=True)
    shuffled = [
        TensorDataset(*(t[torch.randperm(40, generator=torch.Generator().manual_seed(1))] for t in d.tensors))
        for d in _data()
    ]
    _fit(tmp_path / "two", unit, shuffled, secure=True)
    _fit(tmp_path / "other", unit, _data(1), secure=True)
    _fit(tmp_path / "simulated", unit)
    assert main(["ledger", str(tmp_path / "one")]) == 2
    assert "--node 0" in capsys.readouterr().err
    assert main(["ledger", str(tmp_path / "one"), "--node", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [Path(run["ledger"]).parent.name for run in found["runs"]] == ["one", "two"]
    assert [run["node"] for run in found["runs"]] == [1, 1]
    assert found["epsilon"]["record"] > found["runs"][0]["epsilon"] > 0
