"""From a table to predictions, for every task, by commands alone: a date, an id, texts, gaps, decimal commas, a number as target."""

import csv
import json

import pytest

from dpps.cli import main
from dpps.data import read_schema
from tests.support.hospitals import write_clinics

TASKS = {
    "regression": (["--label", "stay"], "rmse", ["prediction"]),
    "survival": (["--time", "stay", "--event", "died"], "c-index", ["risk"]),
    "classification": (
        ["--label", "ill"],
        "accuracy",
        ["prediction", "probability of no", "probability of yes"],
    ),
}


@pytest.mark.parametrize("task", TASKS)
def test_from_file_to_report(task, tmp_path, capsys):
    template, schema, out = write_clinics(tmp_path), str(tmp_path / "schema.toml"), str(tmp_path / "run")
    target, headline, columns = TASKS[task]
    first = str(tmp_path / "clinic-0" / "train.csv")
    assert main(["data", "describe", first, "--task", task, *target, "--out", schema]) == 0
    found = read_schema(schema)
    assert found.task.name == task
    kinds = {column.name: column.kind for column in found.columns}
    assert kinds["admitted"] == "date"
    assert kinds["id"] == "ignore"
    assert not {column.name for column in found.task.columns} & set(kinds)
    assert (tmp_path / "schema.toml").read_text().count("# guessed") > 5
    words = ["--nodes", "3", "--node-data", str(template), "--schema", schema, "--model", "linear"]
    words += ["--shared", "all", "--epsilon", "8", "--seed", "0"]
    assert main(["train", *words, "--baselines", "--out", out, "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert headline in shown
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["task"] == task
    assert summary["privacy"]["epsilon"] <= 8
    scores, compared = summary["scores"]["own"][headline], summary["comparisons"]["own"]
    assert scores == compared["private"]
    assert compared["both"]["pooled"]["value"] == pytest.approx(
        compared["private"]["pooled"]["value"] - compared["alone"]["pooled"]["value"]
    )
    assert [node["examples"] for node in scores["by_node"]] == [60] * 3
    gain = scores["pooled"]["value"] - compared["constant"]["pooled"]["value"]
    assert (-gain if task == "regression" else gain) > {"regression": 1.0}.get(task, 0.1)
    new, written = str(tmp_path / "clinic-1" / "test.csv"), tmp_path / "predictions.csv"
    assert main(["predict", out, "--input", new, "--output", str(written)]) == 0
    rows = list(csv.DictReader(written.read_text().splitlines()))
    assert len(rows) == 60
    assert list(rows[0])[1 : 1 + len(columns)] == columns
    capsys.readouterr()
    assert main(["evaluate", out, "--input", new, "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["nodes"]["1"][headline] == pytest.approx(scores["by_node"][1]["value"], abs=1e-6)
    assert main(["report", out]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert headline in page.lower()
    assert 'id="joining"' in page


def test_a_metric_of_another_task_is_refused(tmp_path, capsys):
    template, schema = write_clinics(tmp_path), str(tmp_path / "schema.toml")
    first = str(tmp_path / "clinic-0" / "train.csv")
    assert main(["data", "describe", first, "--task", "regression", "--label", "stay", "--out", schema]) == 0
    words = ["--nodes", "3", "--node-data", str(template), "--schema", schema, "--model", "linear"]
    capsys.readouterr()
    for more, value in ((["--metrics", "auroc"], "auroc"), (["--class-weights", "1,2"], "--class-weights")):
        assert main(["train", *words, *more]) == 2
        assert value in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--task", "survival", "--label", "stay"], "--time"),
        (["--task", "survival", "--time", "stay"], "--event"),
        (["--task", "regression", "--label", "ward"], "'ward'"),
        (["--task", "regression", "--time", "stay"], "--label"),
        (["--task", "classification", "--label", "stay"], "'stay'"),
        (["--task", "survival", "--time", "stay", "--event", "ill"], "'ill'"),
        (["--task", "clustering", "--label", "stay"], "'clustering'"),
    ],
)
def test_what_a_task_needs_is_told_in_one_line(words, named, tmp_path, capsys):
    write_clinics(tmp_path)
    first = str(tmp_path / "clinic-0" / "train.csv")
    code = main(["data", "describe", first, *words, "--out", str(tmp_path / "s.toml")])
    error = capsys.readouterr().err.strip()
    if named == "'ill'":  # yes and no are read as 1 and 0
        assert code == 0
        return
    assert code == 2
    assert named in error
    assert "\n" not in error
