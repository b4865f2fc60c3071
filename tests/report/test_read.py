"""What is read of a run: from its folder, from memory, and its options."""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.run import get_args_parser
from torch.utils.data import TensorDataset

import dpps
from dpps import report
from dpps.cli import main, parse_options
from dpps.errors import RunError, UsageError
from dpps.privacy import LedgerFile, Release, Unit
from dpps.report import (
    Accuracy,
    RunRecord,
    by_round,
    command,
    data_name,
    options_shown,
    read_folder,
    read_run,
    render,
)
from dpps.runs import Options

# What is read of a run: whole, unfinished, distributed, damaged


def spent(record: RunRecord) -> list[tuple[int, float]]:
    return by_round(record.unit, record.charges, record.privacy.epsilon)


def charge_again(ledger: Path, count: int) -> None:
    """Charge the first messages once more, as a run does that repeats rounds after a crash."""
    header = LedgerFile.read_header(ledger)
    lines = [json.loads(line) for line in ledger.read_text().splitlines()[1 : 1 + count]]
    with LedgerFile.open(ledger, header, durable=True) as opened:
        for line in lines:
            opened.charge(Release.from_json(line, opened.rows))


def test_rounds_charged_twice_count_twice(copied: Callable[[str], Path]) -> None:
    folder = copied("node-swap")
    (folder / "summary.json").unlink()
    before = read_folder(folder, "run")
    charge_again(folder / "ledger.jsonl", 1)
    after = read_folder(folder, "run")
    assert spent(after)[0][1] == pytest.approx(2 * spent(before)[0][1])
    assert after.privacy.epsilon == pytest.approx(spent(after)[-1][1])


def test_distributed_run(copied: Callable[[str], Path], tmp_path: Path) -> None:
    """Rank 0 writes the summary of all; every process has records of its own, and one has paid more."""
    out = tmp_path / "out"
    for rank in (10, 9):
        shutil.copytree(copied("node-swap"), out / f"rank-{rank}")
        shutil.rmtree(tmp_path / "node-swap")
    charge_again(out / "rank-10" / "ledger.jsonl", 2)
    summary = json.loads((out / "rank-9" / "summary.json").read_text())
    summary |= {
        "test_accuracy": None,
        "accuracy_by_epoch": [],
        "accuracy_by_node": [],
        "bytes_sent_by_rank": [1] * 3,
    }
    (out / "summary.json").write_text(json.dumps(summary))
    record = read_folder(out, "run")
    assert record.part == "rank-9"
    assert record.private_noise
    assert not record.simulated
    assert spent(record)[0][1] == pytest.approx(2 * record.rounds[0].epsilon)
    assert record.command is not None
    assert record.command.startswith("torchrun --nproc-per-node 3 -m dpps train --out again --nodes 5")
    page = render([record])
    assert "rank-9" in page
    assert "not private" not in page.split('id="privacy"')[0]
    (out / "summary.json").unlink()  # as on the machine of another rank
    assert read_folder(out, "run").accuracy == read_folder(out / "rank-9", "run").accuracy != Accuracy()


def test_unfinished_run_is_shown_as_such(copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied("node-swap")
    finished = read_folder(folder, "run")
    (folder / "summary.json").unlink()
    lines = (folder / "rounds.csv").read_text().splitlines()
    cut = "4,0.1,0.2,0.2,0.1,5000.0,1.5"  # killed while writing
    (folder / "rounds.csv").write_text("\n".join(lines[:5]) + f"\n{cut}")
    record = read_folder(folder, "run")
    assert len(record.rounds) == 4
    # the ledger has all that was sent
    assert record.privacy.epsilon == pytest.approx(finished.privacy.epsilon)
    page = report.write([folder], tmp_path / "page.html").read_text()
    assert "unfinished" in page


def test_unfinished_run_takes_accuracy_from_its_checkpoint(copied: Callable[[str], Path]) -> None:
    folder = copied("node-swap")
    (folder / "summary.json").unlink()
    kept = folder / "checkpoint" / "round-000000004"
    kept.mkdir(parents=True)
    rounds = [[0, 1.0, 2.0, 2.0, 0.1, 5.0, 1.5, 100, {"paper": 3.0}]]
    (kept / "meta.json").write_text(
        json.dumps({"accuracy_by_epoch": [12.5], "seconds": {}, "rounds": rounds})
    )
    record = read_folder(folder, "run")
    assert record.accuracy.latest == 12.5
    assert record.rounds[0].watched == {"paper": 3.0}


def test_what_is_refused(copied: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing .*run\.json"):
        report.write([tmp_path / "nothing"], tmp_path / "page.html")
    with pytest.raises(UsageError, match="--out"):
        report.write([], tmp_path / "page.html")
    folder = copied("none")
    with pytest.raises(UsageError, match="same run"):
        report.write([folder, folder], tmp_path / "page.html")
    with pytest.raises(RunError, match=r"no/such/page\.html"):
        report.write([folder], tmp_path / "no" / "such" / "page.html")
    (folder / "rounds.csv").write_text("round,real,estimated,used,scale,epsilon,loss\n")
    with pytest.raises(UsageError, match=r"none/rounds\.csv"):
        report.write([folder], tmp_path / "page.html")
    (folder / "rounds.csv").unlink()
    with pytest.raises(UsageError, match=r"none/rounds\.csv .*No such file"):
        report.write([folder], tmp_path / "page.html")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("summary.json", '{"a":', "summary.json .*line 1"),
        ("summary.json", "[]", "summary.json"),
        (
            "rounds.csv",
            "round,real,estimated,used,scale,epsilon,loss\n0,,x,,,,\n1,,,,0,0,1\n",
            "rounds.csv .*line 2",
        ),
        ("ledger.jsonl", "{}\n{}\n", "ledger.jsonl"),
    ],
)
def test_damaged_files(
    copied: Callable[[str], Path], tmp_path: Path, file: str, text: str, message: str
) -> None:
    folder = copied("node-swap")
    (folder / file).write_text(text)
    with pytest.raises(RunError, match=message):
        report.write([folder], tmp_path / "page.html")


def test_options_of_another_version(copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied("none")
    summary = json.loads((folder / "summary.json").read_text())
    summary["config"]["warp"] = 9
    (folder / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(UsageError, match="option warp"):
        report.write([folder], tmp_path / "page.html")


def test_baselines_have_the_names_of_the_summary(copied: Callable[[str], Path]) -> None:
    folder = copied("record")
    summary = json.loads((folder / "summary.json").read_text())
    summary["baselines"] = {
        "no privacy": {"test_accuracy": 91.5, "accuracy_by_epoch": [85.0, 91.5]},
        "alone": {"test_accuracy": 70.0, "accuracy_by_node": [60.0, 65.0, 70.0, 75.0, 80.0]},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    record = read_folder(folder, "run")
    assert record.baselines["no privacy"] == Accuracy(91.5, [85.0, 91.5])
    assert record.baselines["alone"].by_node[-1] == 80.0
    assert read_folder(folder, "run").labels == summary["split"]


# Runs made in Python are reported, compared and found by `dpps ledger` as those of the command line are


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


# Which options had an effect, what the data are called, and the command that repeats a run


@given(
    unit=st.sampled_from(["record", "contribution", "node-swap", "none"]),
    epsilon=st.sampled_from([None, 0.5, 3.0]),
    others=st.fixed_dictionaries(
        {},
        optional={
            "nodes": st.integers(2, 50),
            "topology": st.sampled_from(["ring", "4-out", "base-2"]),
            "clip": st.floats(0.1, 10),
            "mechanism": st.sampled_from(["laplace", "gaussian"]),
            "split": st.sampled_from(["dirichlet:0.5", "label:2"]),
            "shared": st.sampled_from(["2", "all", "layer1,layer 2"]),
            "track_real": st.booleans(),
            "seed": st.integers(0, 99),
            "lr_shared": st.sampled_from([0.1, 1.0, 0.03]),
            "data_dir": st.just(Path("some where")),
            "out": st.just(Path("x")),
        },
    ),
)
def test_command_repeats_the_configuration(unit: str, epsilon: float | None, others: dict[str, Any]) -> None:
    try:
        config = Options(unit=unit, epsilon=epsilon, **others).resolve()
    except UsageError:  # options that have no meaning together
        assume(False)
    words = shlex.split(command(config))
    assert words[:2] == ["dpps", "train"]
    again = parse_options(Options, words[2:], "dpps train").resolve()
    assert again.fingerprint() == config.fingerprint()
    assert again.data_dir == config.data_dir


def test_command_says_only_what_matters() -> None:
    assert command(Options(out=Path("x"), overwrite=True).resolve()) == "dpps train"
    assert command(Options(epsilon=3.0, epochs=2).resolve()) == "dpps train --epochs 2"


def test_options_of_other_units_are_not_listed() -> None:
    record = options_shown(Options().resolve(), False)
    assert not {"budget", "noise-rate", "sensitivity", "c-prime", "decay", "mechanism", "norm"} & set(record)
    assert {"epsilon", "delta", "clip", "records-per-user", "seed"} <= set(record)
    assert record["noise"] == "seeded (simulation)"
    swap = options_shown(Options(unit="node-swap", sensitivity="paper").resolve(), True)
    assert {"budget", "noise-rate", "sensitivity", "c-prime", "decay"} <= set(swap)
    assert not {"records-per-user", "epsilon"} & set(swap)
    assert swap["noise"].startswith("secure")
    none = options_shown(Options(unit="none").resolve(), False)
    assert not {"delta", "clip", "epsilon", "noise", "sync-every", "dropouts", "track-real", "out"} & set(
        none
    )
    sgp = options_shown(Options(algorithm="sgp", unit="none").resolve(), False)
    assert "shared" not in sgp


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("hospitals/node-{rank}", "hospitals"),
        ("/srv/clinic-{rank}", "clinic"),
        ("/srv/diabetes/data/{rank}", "diabetes"),
        ("node-{rank}", "own data"),
    ],
)
def test_own_data_have_their_own_name(folder: str, name: str) -> None:
    config = Options(node_data=Path(folder), classes=2).resolve()
    assert data_name(config) == options_shown(config, True)["data"] == name
    assert not {"split", "hold-out", "node-data"} & set(options_shown(config, True))
    assert data_name(Options()) == "mnist-mini"


def test_options_that_follow_from_where_a_run_is_carried_out_are_part_of_its_command(tmp_path):
    """--metrics, which is no part of the command, has changed how much is held out: the command says how much."""
    config = Options(node_data=tmp_path / "node-{rank}", classes=2, metrics="f1", nodes=3)
    assert "--hold-out 0.2" in command(config)
    assert "--metrics" not in command(config)


def test_the_command_of_a_distributed_run_is_one_that_torchrun_takes() -> None:
    config = Options(nodes=6, topology="ring", epsilon=2.0).resolve()
    words = shlex.split(command(config, processes=3))
    assert words[0] == "torchrun"
    started = get_args_parser().parse_args(words[1:])
    assert (started.nproc_per_node, started.module, started.training_script) == ("3", True, "dpps")
    assert started.training_script_args[0] == "train"
    again = parse_options(Options, started.training_script_args[1:], "dpps train").resolve()
    assert again.fingerprint() == config.fingerprint()
    assert again.out is not None
