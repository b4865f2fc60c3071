"""What `dpps train` writes and says: files, units, seeds, splits, and what is whose."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpps.cli import main
from dpps.privacy import Charge, total
from dpps.runs import Options

QUICK = ["--nodes", "4", "--epochs", "1", "--batch-size", "500", "--quiet"]


def train(out: Path, *options: str) -> dict:
    assert main(["train", *QUICK, "--out", str(out), *options]) == 0
    return json.loads((out / "summary.json").read_text())


def test_a_run_writes_the_files_of_the_contract(tmp_path, capsys):
    summary = train(tmp_path / "run", "--track-real")
    shown = capsys.readouterr().out
    assert "accuracy" in shown
    assert "epsilon 3" in shown
    assert str(tmp_path / "run") in shown
    assert set(summary) >= {
        *(
            "test_accuracy",
            "accuracy_by_epoch",
            "rounds",
            "shared_parameters",
            "real_sensitivity_mean",
            "real_sensitivity_max",
        ),
        *(
            "estimated_sensitivity_mean",
            "estimated_sensitivity_max",
            "rounds_real_above_estimated",
            "privacy",
        ),
        *("bytes_sent_per_node", "seconds", "config", "versions"),
    }
    assert set(summary["privacy"]) == {
        *(
            "unit",
            "mechanism",
            "epsilon_per_round_max",
            "epsilon_sum",
            "epsilon_by_node",
            "epsilon",
            "delta",
            "accountant",
            "statement",
            "simulated",
            "epsilon_spent",
            "epsilon_replacement",
        ),
    }
    assert set(summary["seconds"]) == {"total", "gradients", "protocol", "evaluation"}
    with (tmp_path / "run" / "rounds.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["round", "real", "estimated", "used", "scale", "epsilon", "loss"]
    assert len(rows) == summary["rounds"] == 5
    assert summary["shared_parameters"] == 7850
    assert [sum(node) for node in summary["split"]] == [2500] * 4


def test_the_epsilon_of_the_summary_follows_from_the_ledger_alone(tmp_path):
    summary = train(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()[1:]]
    assert len(lines) == summary["rounds"]
    events = [
        (line["event"]["sampling_probability"], line["event"]["event"]["noise_multiplier"]) for line in lines
    ]
    charges = [Charge.gaussian(noise_multiplier=sigma, sampling=q) for q, sigma in events]
    assert total(charges, 1e-5).epsilon == pytest.approx(summary["privacy"]["epsilon"], abs=1e-3)
    # and by a call of dp-accounting that shares no code with this package
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(value_discretization_interval=1e-4)
    for q, sigma in events:
        accountant.compose(PoissonSampledDpEvent(q, GaussianDpEvent(sigma)))
    assert accountant.get_epsilon(1e-5) == pytest.approx(summary["privacy"]["epsilon"], abs=1e-3)


@pytest.mark.parametrize(
    ("options", "unit", "words"),
    [
        (["--unit", "node-swap", "--sync-every", "3"], "node-swap", "epsilon 25000"),
        (["--unit", "node-swap", "--sensitivity", "paper"], "node-swap", "measured"),
        (["--unit", "contribution", "--epsilon", "8"], "contribution", "epsilon 8"),
        (["--unit", "contribution", "--mechanism", "gaussian"], "contribution", "epsilon 3"),
        (["--unit", "none"], "none", "No protection"),
        (["--algorithm", "sgp"], "none", "No protection"),
        (
            ["--algorithm", "sgpdp", "--unit", "node-swap", "--sensitivity", "oracle", "--sync-every", "2"],
            "node-swap",
            "measured",
        ),
        (["--algorithm", "pedfl", "--unit", "node-swap", "--budget", "1"], "node-swap", "measured"),
        (["--secure-noise"], "record", "epsilon 3"),
        (["--records-per-user", "2"], "record", "up to 2"),
    ],
)
def test_units_and_algorithms(tmp_path, options, unit, words):
    privacy = train(tmp_path / "run", *options)["privacy"]
    assert privacy["unit"] == unit
    assert words in privacy["statement"]
    assert ("simulation" in privacy["statement"]) == ("--secure-noise" not in options and unit != "none")


def test_seeds_repeat_bit_for_bit(tmp_path):
    models = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        train(tmp_path / name, "--seed", seed)
        models.append((tmp_path / name / "models" / "node-3.safetensors").read_bytes())
    assert models[0] == models[1] != models[2]


def test_splits_and_their_own_held_out_data(tmp_path):
    summary = train(tmp_path / "run", "--split", "label:2", "--batch-size", "100")
    assert all(sum(count > 0 for count in node) == 2 for node in summary["split"])
    assert summary["own_accuracy"] > summary["test_accuracy"]  # what local heads are for


def test_a_configuration_file_gives_defaults_and_the_command_line_wins(tmp_path, capsys):
    file = tmp_path / "run.toml"
    assert main(["train", "--nodes", "7", "--print-config"]) == 0
    file.write_text(capsys.readouterr().out)
    assert Options.from_toml(file) == Options(nodes=7)
    summary = train(tmp_path / "run", "--config", str(file), "--nodes", "3")
    assert summary["config"]["nodes"] == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('nodes = "many"', "nodes is 'many'"),
        ("epsilon = true", "epsilon is True"),
        ("quiet = 1", "quiet is 1"),
        ('norm = "bath"', "norm is 'bath'.*'batch'.*'group'"),
        ("out = 3", "out is 3"),
        ("ndoes = 3", "'ndoes'.*'nodes'"),
        ("nodes =", "run.toml.*TOML"),
    ],
)
def test_a_wrong_configuration_file_is_refused_by_name(tmp_path, capsys, text, message):
    import re

    file = tmp_path / "run.toml"
    file.write_text(text)
    assert main(["train", "--config", str(file)]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_tensorboard_events_are_written_when_asked_for(tmp_path):
    arguments = [
        sys.executable,
        "-m",
        "dpps",
        "train",
        *QUICK,
        "--out",
        str(tmp_path / "run"),
        "--tensorboard",
    ]
    subprocess.run(arguments, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True)
    (events,) = (tmp_path / "run" / "tensorboard").glob("events*")
    content = events.read_bytes()
    assert all(name in content for name in (b"loss", b"sensitivity/used", b"noise/scale"))


def test_runs_on_own_data_are_called_so(tmp_path):
    for node in range(4):
        folder = tmp_path / f"node-{node}"
        folder.mkdir()
        rows = [f"{k % 3},{k % 5},{k % 2}" for k in range(20)]
        (folder / "train.csv").write_text("\n".join(["a,b,label", *rows]) + "\n")
    options = ["--node-data", str(tmp_path / "node-{rank}"), "--classes", "2", "--batch-size", "10"]
    summary = train(tmp_path / "run", *options)
    assert summary["config"]["data"] == "own data"
    assert main(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"{tmp_path.name}, mlp, partpsp on 4 nodes" in page  # by the folder that holds the nodes' files
    assert "mnist-mini" not in page


def test_a_second_comparison_does_not_take_the_place_of_the_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        train(tmp_path / name)
    assert main(["report", "a", "b"]) == 0
    first = (tmp_path / "comparison.html").read_bytes()
    assert main(["report", "b", "a"]) == 0
    assert (tmp_path / "comparison.html").read_bytes() == first
    assert (tmp_path / "comparison-2.html").read_bytes() != first


def test_the_share_of_clipped_examples_is_in_the_summary_and_a_useless_clip_is_told(tmp_path, capsys):
    assert 0.01 < train(tmp_path / "a")["clipped_share"] <= 1
    assert train(tmp_path / "b", "--clip", "1e9")["clipped_share"] == 0
    assert "1e+09" in capsys.readouterr().err


def test_the_sum_of_node_swap_is_never_called_a_total(tmp_path, capsys):
    from dpps.privacy import SUM_OF_ROUNDS

    train(tmp_path / "run", "--unit", "node-swap", "--budget", "5", "--sync-every", "2")
    assert SUM_OF_ROUNDS in " ".join(capsys.readouterr().out.split())
    for command in ("plan", "train"):
        assert main([command, "--help"]) == 0
        said = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert "node-swap" in said
        assert SUM_OF_ROUNDS in said


@pytest.mark.parametrize("unit", ["record", "contribution", "node-swap"])
def test_the_statement_says_what_is_for_the_nodes_own_eyes(tmp_path, unit):
    from dpps.privacy.statement import OWN_EYES

    summary = train(tmp_path / "run", "--unit", unit, "--sync-every", "2")
    assert OWN_EYES in summary["privacy"]["statement"]
