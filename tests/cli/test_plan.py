"""dpps plan and topology."""

import json
from pathlib import Path

import pytest

from dpps.cli import main
from dpps.data import Column, Schema
from dpps.tasks import Classification

# `dpps plan`


def test_plan_answers_both_ways(capsys):
    assert main(["plan", "--epsilon", "3", "--json"]) == 0
    forward = json.loads(capsys.readouterr().out)
    assert main(["plan", "--noise-multiplier", str(forward["noise_multiplier"]), "--json"]) == 0
    back = json.loads(capsys.readouterr().out)
    assert back["epsilon"] == pytest.approx(3, rel=2e-3)
    assert main(["plan", "--unit", "node-swap", "--budget", "5", "--parameters", "7850"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "1.897" in shown  # 0.55 (1 + 2 x 0.78 x 0.001 x 7850 / 5)
    from dpps.privacy import SUM_OF_ROUNDS, label

    assert label(600_000) in shown
    assert SUM_OF_ROUNDS in shown
    assert "total" not in shown


def test_every_model_has_a_suggestion_with_reasons(capsys):
    assert main(["plan", "--model", "cnn", "--shared", "all", "--noise-multiplier", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["suggested"]
    assert (found["batch_size"], found["epochs"], found["clip"]) == (100, 12, 1.0)
    assert found["reasons"][-1].endswith(" 0.1")


def test_plan_states_what_it_computes_and_no_accuracy_measured_elsewhere(capsys):
    """An accuracy measured at another commit is no answer about this one; the signal-to-noise ratio of the run is."""
    options = ["--data", "mnist", "--features", "scattering", "--model", "linear", "--shared", "all"]
    assert main(["plan", *options, "--noise-multiplier", "5.3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "expected_accuracy" not in found
    assert found["signal_to_noise_of_run"] == pytest.approx(
        found["signal_to_noise_averaged"] * found["rounds"] ** 0.5
    )


@pytest.fixture
def schema(tmp_path, monkeypatch):
    """A public schema of two columns and two classes, in the folder where the commands run."""
    monkeypatch.chdir(tmp_path)
    columns = (Column("age", "number", (0.0, 120.0)), Column("smoker", "category", values=("no", "yes")))
    Path("s.toml").write_text(
        Schema(columns, Classification(("no", "yes"), "ill"), ("",)).to_toml(), encoding="utf-8"
    )
    return "s.toml"


def test_a_schema_and_declared_sizes_are_all_that_a_plan_of_own_data_needs(schema, capsys):
    """Nobody has the other nodes' files: the plan is that of the schema's columns and classes, with or without --node-data."""
    own = ["--nodes", "2", "--schema", schema, "--model", "linear", "--shared", "all"]
    plan = ["plan", *own, "--declared-sizes", "400,600", "--noise-multiplier", "5", "--json"]
    assert main(plan) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["data"] == "own data"
    assert main([*plan, "--node-data", "n{rank}"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert main([*plan[:1], *plan[-5:], "--nodes", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["data"] == "mnist-mini"


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        (["--schema", "s.toml"], "--declared-sizes"),
        (["--schema", "s.toml", "--node-data", "n{rank}"], "--declared-sizes"),
        (["--node-data", "n{rank}", "--classes", "2", "--declared-sizes", "400"], "--schema"),
        (["--classes", "2", "--declared-sizes", "400"], "--schema"),
        (["--schema", "s.toml", "--declared-sizes", "400", "--data", "mnist"], "--data"),
    ],
)
def test_a_plan_names_the_one_option_that_is_missing_or_too_many(schema, options, missing, refused):
    said = refused(["plan", "--nodes", "2", *options], missing)
    assert "--node-data" not in said or "--node-data" in options


# `dpps topology`


def test_topology_reports_and_draws(tmp_path, capsys):
    assert main(["topology", "exp", "--nodes", "10", "--json", "--plot", str(tmp_path / "exp.svg")]) == 0
    report = json.loads(capsys.readouterr().out)
    names = "nodes period degree doubly_stochastic connected_within diameter contraction exact_average_after"
    assert set(report) == set(names.split())
    assert (report["period"], report["connected_within"], report["exact_average_after"]) == (4, 4, None)
    assert "<svg" in (tmp_path / "exp.svg").read_text()
