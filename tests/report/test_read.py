"""What is read of a run: from its folder, from memory, and its options."""

import json
import shlex
import shutil
from pathlib import Path

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
from dpps.privacy import LedgerFile, Privacy, Release
from dpps.report import command, data_name, options_shown, read_folder, read_run, render
from dpps.runs import Options, Summary
from tests.support.hospitals import write_hospitals
from tests.support.learning import toy_data

# What is read of a run: whole, unfinished, distributed, damaged


def charge_again(ledger, count):
    """Charge the first messages once more, as a run does that repeats rounds after a crash."""
    header = LedgerFile.read_header(ledger)
    lines = [json.loads(line) for line in ledger.read_text().splitlines()[1 : 1 + count]]
    with LedgerFile.open(ledger, header, durable=True) as opened:
        for line in lines:
            opened.charge(Release.from_json(line, opened.rows))


def test_rounds_charged_twice_count_twice(copied):
    folder = copied("node-swap")
    (folder / "summary.json").unlink()
    before = read_folder(folder, "run")
    charge_again(folder / "ledger.jsonl", 1)
    after = read_folder(folder, "run")
    assert after.spent()[0] == pytest.approx(2 * before.spent()[0])
    assert after.summary.privacy.epsilon == pytest.approx([*after.spent().values()][-1])


def test_distributed_run(copied, tmp_path):
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
    run = read_folder(out, "run")
    assert run.part == "rank-9"
    assert run.spent()[0] == pytest.approx(2 * (run.log[0].epsilon or 0))
    assert run.command is not None
    assert run.command.startswith("torchrun --nproc-per-node 3 -m dpps train --out again --nodes 5")
    assert "rank-9" in render([run])
    (out / "summary.json").unlink()  # as on the machine of another rank
    assert read_folder(out, "run").summary == read_folder(out / "rank-9", "run").summary


def test_unfinished_run_is_shown_as_such(copied, tmp_path):
    folder = copied("node-swap")
    finished = read_folder(folder, "run")
    (folder / "summary.json").unlink()
    lines = (folder / "rounds.csv").read_text().splitlines()
    cut = "4,0.1,0.2,0.2,0.1,5000.0,1.5"  # killed while writing
    (folder / "rounds.csv").write_text("\n".join(lines[:5]) + f"\n{cut}")
    run = read_folder(folder, "run")
    assert len(run.log) == run.summary.rounds == 4
    # the ledger has all that was sent
    assert run.summary.privacy.epsilon == pytest.approx(finished.summary.privacy.epsilon)
    assert run.summary.privacy.simulated
    assert finished.finished
    assert not run.finished
    assert 'class="banner"' in report.write([folder], tmp_path / "page.html").read_text()


def test_unfinished_run_takes_accuracy_from_its_checkpoint(copied):
    folder = copied("node-swap")
    (folder / "summary.json").unlink()
    kept = folder / "checkpoint" / "round-000000004"
    kept.mkdir(parents=True)
    (kept / "meta.json").write_text(json.dumps({"accuracy_by_epoch": [12.5], "seconds": {}}))
    assert read_folder(folder, "run").summary.headline == ("test", 12.5)


def test_what_is_refused(copied, tmp_path):
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
def test_damaged_files(copied, tmp_path, file, text, message):
    folder = copied("node-swap")
    (folder / file).write_text(text)
    with pytest.raises(RunError, match=message):
        report.write([folder], tmp_path / "page.html")


def test_runs_of_another_version_are_read_or_refused(copied, tmp_path):
    """What an earlier summary did not say yet is left out; an option that nobody knows, or no summary at all, is refused."""
    folder = copied("record")
    summary = json.loads((folder / "summary.json").read_text())
    later = ("own_statistics", "gradients", "weights_left_fresh", "chosen")
    (folder / "summary.json").write_text(json.dumps({k: v for k, v in summary.items() if k not in later}))
    assert read_folder(folder, "run").summary.test_accuracy == summary["test_accuracy"]
    (folder / "summary.json").write_text(json.dumps({**summary, "config": {**summary["config"], "warp": 9}}))
    with pytest.raises(UsageError, match="warp"):
        report.write([folder], tmp_path / "page.html")
    (folder / "summary.json").write_text(json.dumps({"config": summary["config"], "privacy": {}}))
    with pytest.raises(UsageError, match="epsilon"):
        report.write([folder], tmp_path / "page.html")


def test_a_summary_is_read_as_it_was_written(folders):
    for folder in folders.values():
        found = json.loads((folder / "summary.json").read_text())
        assert json.loads(json.dumps(Summary.from_json(found).to_json())) == found


def test_nodes_are_called_what_their_folders_are_called(tmp_path, monkeypatch):
    """A link is called what it points to, so that numbered folders can have names."""
    monkeypatch.chdir(tmp_path)
    write_hospitals(tmp_path)
    for k, name in enumerate(("Westmead", "Charité")):
        (tmp_path / f"node-{k}").rename(tmp_path / name)
        (tmp_path / f"node-{k}").symlink_to(name)
    assert main(["data", "describe", "node-2/train.csv", "--label", "diagnosis", "--out", "s.toml"]) == 0
    own = ["--nodes", "3", "--node-data", "node-{rank}", "--schema", "s.toml", "--baselines"]
    options = ["--model", "linear", "--shared", "all", "--epochs", "2", "--quiet"]
    assert main(["train", *own, *options, "--out", "run"]) == 0
    run = read_folder(tmp_path / "run", "run")
    assert run.summary.node_names == ["Westmead", "Charité", "node-2"]
    assert run.summary.comparisons == Summary.from_json(run.summary.to_json()).comparisons
    card = report.write_card(tmp_path / "run", tmp_path / "card.md").read_text(encoding="utf-8")
    for text in (render([run]), card):
        assert "Westmead, Charité, node-2" in text


# Runs made in Python are reported, compared and found by `dpps ledger` as those of the command line are


def _fit(folder, unit, data=None, secure=False):
    torch.manual_seed(0)
    algorithm = dpps.PartPSP(dpps.models.MLP((6, 4, 3)), shared=["layer1"], batch_size=10)
    run = dpps.Run(
        algorithm,
        data or toy_data(3),
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
def test_the_folder_says_what_the_run_in_memory_says(unit, tmp_path):
    run = _fit(tmp_path / "run", unit)
    kept, live = read_folder(tmp_path / "run", "run"), read_run(run, "run")
    for name in ("title", "options", "command", "data", "part"):
        assert getattr(kept, name) == getattr(live, name), name
    written = {name: value for name, value in live.summary.to_json().items() if name != "seconds"}
    assert json.loads(json.dumps(written)).items() <= kept.summary.to_json().items()
    assert [log.round for log in kept.log] == [log.round for log in live.log]
    if unit is not None:
        assert kept.unit is not None
        assert kept.unit.total([c for _, c in kept.charges]) == unit.total([c for _, c in live.charges])


def test_it_is_reported_and_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _fit(tmp_path / "mine", dpps.Record(epsilon=3.0))
    options = ["--nodes", "3", "--batch-size", "100", "--epochs", "1", "--unit", "none", "--quiet"]
    assert main(["train", *options, "--out", "theirs"]) == 0
    assert main(["report", "mine"]) == 0
    assert (tmp_path / "mine" / "report.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "mine" / "model-card.md").exists()
    assert main(["report", "mine", "theirs"]) == 0
    assert (tmp_path / "comparison.html").exists()


def test_what_it_spends_of_its_data_is_noted(tmp_path, monkeypatch, capsys):
    """By the content of the tensors, whatever their order; runs of other data, and simulations, do not count."""
    monkeypatch.setenv("DPPS_STATE", str(tmp_path / "state"))
    unit = dpps.Record(noise_multiplier=2.0)
    _fit(tmp_path / "one", unit, secure=True)
    shuffled = [
        TensorDataset(*(t[torch.randperm(40, generator=torch.Generator().manual_seed(1))] for t in d.tensors))
        for d in toy_data(3)
    ]
    _fit(tmp_path / "two", unit, shuffled, secure=True)
    _fit(tmp_path / "other", unit, toy_data(3, seed=1), secure=True)
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
def test_command_repeats_the_configuration(unit, epsilon, others):
    try:
        config = Options(unit=unit, epsilon=epsilon, **others).resolve()
    except UsageError:  # options that have no meaning together
        assume(False)
    words = shlex.split(command(config))
    assert words[:2] == ["dpps", "train"]
    again = parse_options(Options, words[2:], "dpps train").resolve()
    assert again.fingerprint() == config.fingerprint()
    assert again.data_dir == config.data_dir


def test_command_says_only_what_matters():
    assert command(Options(out=Path("x"), overwrite=True).resolve()) == "dpps train"
    assert command(Options(epsilon=3.0, epochs=2).resolve()) == "dpps train --epochs 2"


def shown(simulated, **options):
    config = Options(**options).resolve()
    privacy = Privacy(config.unit, "", None, None, None, 0.0, "", "", simulated=simulated)
    return options_shown(config, Summary(rounds=1, privacy=privacy, config=config.to_json(), versions={}))


def test_options_of_other_units_are_not_listed():
    record = shown(True)
    assert not {"budget", "noise-rate", "sensitivity", "c-prime", "decay", "mechanism", "norm"} & set(record)
    assert {"epsilon", "delta", "clip", "records-per-user", "seed"} <= set(record)
    swap = shown(False, unit="node-swap", sensitivity="paper")
    assert {"budget", "noise-rate", "sensitivity", "c-prime", "decay"} <= set(swap)
    assert not {"records-per-user", "epsilon"} & set(swap)
    assert swap["noise"] != record["noise"]
    none = shown(False, unit="none")
    unused = {"delta", "clip", "epsilon", "noise", "sync-every", "dropouts", "track-real", "out"}
    assert not unused & set(none)
    assert "shared" not in shown(False, algorithm="sgp", unit="none")


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("hospitals/node-{rank}", "hospitals"),
        ("/srv/clinic-{rank}", "clinic"),
        ("/srv/diabetes/data/{rank}", "diabetes"),
        ("node-{rank}", "own data"),
    ],
)
def test_own_data_have_their_own_name(folder, name):
    config = Options(node_data=Path(folder), classes=2).resolve()
    listed = shown(False, node_data=Path(folder), classes=2)
    assert data_name(config) == listed["data"] == name
    assert not {"split", "hold-out", "node-data"} & set(listed)
    assert data_name(Options()) == "mnist-mini"


def test_options_that_follow_from_where_a_run_is_carried_out_are_part_of_its_command(tmp_path):
    """--metrics, which is no part of the command, has changed how much is held out: the command says how much."""
    config = Options(node_data=tmp_path / "node-{rank}", classes=2, metrics="f1", nodes=3)
    assert "--hold-out 0.2" in command(config)
    assert "--metrics" not in command(config)


def test_the_command_of_a_distributed_run_is_one_that_torchrun_takes():
    config = Options(nodes=6, topology="ring", epsilon=2.0).resolve()
    words = shlex.split(command(config, processes=3))
    assert words[0] == "torchrun"
    started = get_args_parser().parse_args(words[1:])
    assert (started.nproc_per_node, started.module, started.training_script) == ("3", True, "dpps")
    assert started.training_script_args[0] == "train"
    again = parse_options(Options, started.training_script_args[1:], "dpps train").resolve()
    assert again.fingerprint() == config.fingerprint()
    assert again.out is not None
