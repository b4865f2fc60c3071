"""dpps data describe, and runs on data of one's own."""

import json
import os
import pty
import subprocess
import sys

import pytest

from dpps.cli import WRONG, main
from dpps.cli.data import ask_ranges
from dpps.data import guess_schema, read_schema, read_table
from tests.support.hospitals import SIZES, write_hospitals

# From files as they come to a run, without an edit


def train(template, schema, out, *more):
    options = ["--nodes", "3", "--topology", "exp", "--node-data", str(template), "--schema", str(schema)]
    return main(
        ["train", *options, "--model", "linear", "--shared", "all", "--quiet", "--out", str(out), *more]
    )


@pytest.fixture
def described(tmp_path, capsys):
    template, schema = write_hospitals(tmp_path / "hospitals"), tmp_path / "schema.toml"
    file = tmp_path / "hospitals" / "node-2" / "train.csv"
    assert main(["data", "describe", str(file), "--label", "diagnosis", "--out", str(schema)]) == 0
    assert "PUBLIC" in capsys.readouterr().out
    return template, schema


def test_three_hospitals_train_with_no_edit_of_their_files(described, tmp_path):
    template, schema = described
    assert train(template, schema, tmp_path / "run") == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [sum(counts) for counts in summary["split"]] == list(SIZES)
    assert summary["privacy"]["epsilon"] <= 3
    assert summary["schema"] == read_schema(schema).to_toml()
    assert main(["report", str(tmp_path / "run")]) == 0


def test_with_declared_sizes_the_rule_chooses_batch_and_rate(described, tmp_path, capsys):
    template, schema = described
    sizes = ["--declared-sizes", ",".join(map(str, SIZES))]
    assert train(template, schema, tmp_path / "run", *sizes) == 0
    config = json.loads((tmp_path / "run" / "summary.json").read_text())["config"]
    assert 0 < float(config["batch-size"]) <= 1  # a part of each node's own
    assert (config["clip"], config["momentum"]) == (
        pytest.approx(0.35 * read_schema(schema).length, rel=0.01),
        0.0,
    )
    words = ["--node-data", str(template), "--schema", str(schema), "--model", "linear", "--shared", "all"]
    capsys.readouterr()
    assert main(["plan", "--nodes", "3", *words, *sizes, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] == pytest.approx(3, rel=2e-3)


def test_it_learns_without_noise_and_metrics_are_told(described, tmp_path, capsys):
    template, schema = described
    for node in range(3):
        folder = tmp_path / "hospitals" / f"node-{node}"
        (folder / "test.csv").write_bytes((folder / "train.csv").read_bytes())
    assert (
        train(
            template,
            schema,
            tmp_path / "run",
            "--unit",
            "none",
            "--epochs",
            "60",
            "--batch-size",
            "30",
            "--metrics",
            "accuracy, auroc",
        )
        == 0
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["own_accuracy"] > 75
    (own,) = summary["metrics_by_node"].values()
    assert [100 * share for share in own["accuracy"]] == pytest.approx(summary["own_accuracy_by_node"])
    assert all(value > 0.75 for value in own["auroc"])
    shown = capsys.readouterr().out
    assert f" {', '.join(f'{value:.3f}' for value in own['auroc'])} " in shown


def test_without_test_files_part_of_the_examples_answers_what_joining_gained(described, tmp_path, capsys):
    template, schema = described
    assert train(template, schema, tmp_path / "plain") == 0
    assert "--hold-out" in capsys.readouterr().out
    assert train(template, schema, tmp_path / "run", "--baselines", "--epochs", "3") == 0
    shown = capsys.readouterr().out
    assert {"accuracy", "gain", "cost"} <= {line.split(" ")[0] for line in shown.splitlines()}
    assert "±" in shown
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert all(sum(counts) < size for counts, size in zip(summary["split"], SIZES, strict=True))
    assert main(["report", str(tmp_path / "run")]) == 0
    page = " ".join((tmp_path / "run" / "report.html").read_text().split())
    assert f"<strong>{summary['own_accuracy']:.1f} %</strong>" in page
    both = summary["comparisons"]["own"]["both"]
    assert 100 * both["mean"]["value"] == pytest.approx(
        summary["own_accuracy"] - summary["baselines"]["alone"]["own_accuracy"]
    )
    assert all(
        f"{100 * node['value']:+.1f} ± {100 * node['margin']:.1f} points" in page for node in both["by_node"]
    )
    assert train(template, schema, tmp_path / "none", "--hold-out", "0.001") == 2
    assert "--hold-out 0.001" in capsys.readouterr().err


def test_a_run_goes_on_with_the_same_schema_only(described, tmp_path, capsys):
    template, schema = described
    assert train(template, schema, tmp_path / "run") == 0
    schema.write_text(schema.read_text().replace("[0, 100]", "[0, 120]"))
    assert train(template, schema, tmp_path / "run", "--resume") == 2
    assert "--schema" in capsys.readouterr().err


@pytest.mark.parametrize(("label", "hint"), [("age", True), ("ill", False)])
def test_a_quantity_taken_for_classes_is_pointed_out(tmp_path, capsys, label, hint):
    file = tmp_path / "train.csv"
    rows = "".join(f"{20 + k % 30},{k % 7 / 2 + k},{k % 2}\n" for k in range(90))
    file.write_text(f"age,weight,ill\n{rows}")
    assert main(["data", "describe", str(file), "--label", label, "--out", str(tmp_path / "s.toml")]) == 0
    assert ("--task regression" in capsys.readouterr().out) is hint


def test_a_schema_that_is_there_is_not_written_over(described, tmp_path, capsys):
    _, schema = described
    file = str(tmp_path / "hospitals" / "node-0" / "train.csv")
    words = ["data", "describe", file, "--label", "diagnosis", "--out", str(schema)]
    assert main(words) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0


# What a new user gets wrong with data of one's own: each is one line that says what and where, and exit code 2


TABLE = "age,smoker,ill\n40,yes,no\n50,no,yes\n60,?,yes\n"
SCHEMA = """label = "ill"
classes = ["no", "yes"]
[[columns]]
name = "age"
kind = "number"
range = [0, 120]
[[columns]]
name = "smoker"
kind = "category"
values = ["no", "yes"]
"""
TRAIN = "train --nodes 2 --topology ring --node-data n{rank} --schema s.toml --quiet"

FILES = {  # another content of the first node's table
    "a number that is none": ("40,yes,no", "forty,yes,no", "line 2, column 1 (age) is 'forty'"),
    "a class nobody declared": ("50,no,yes", "50,no,maybe", "line 3, column 3 (ill) is 'maybe'"),
    "a cell too many": ("50,no,yes", "50,no,yes,1", "line 3: 4 cells"),
    "an open quote": ("50,no,yes", '50,"no,yes', "line 3"),
    "empty": (TABLE, "", "n0/train.csv"),
}
SCHEMAS = {  # another schema
    "no TOML": ('label = "ill"', "label = ill", "TOML"),
    "an entry that does not exist": ("range =", "rnge =", "'range'"),
}
COMMANDS = {
    "no such command": ("data descrbe", "'describe'"),
    "no such file": ("data describe absent.csv --label x", "absent.csv"),
    "a schema without data": ("train --schema s.toml", "--node-data"),
    "data without a schema": ("train --node-data n{rank}", "--schema"),
    "a metric misspelled": ("train --metrics acuracy", "'accuracy'"),
    "no such folder": (TRAIN.replace("n{rank}", "m{rank}"), "m0"),
    "one folder for all": (TRAIN.replace("n{rank}", "n0"), "{rank}"),
    "no such schema": (TRAIN.replace("s.toml", "t.toml"), "dpps data describe FILE"),
    "schema and classes": (f"{TRAIN} --classes 2", "--classes"),
    "an option of named data": (f"{TRAIN} --split label:2", "--split"),
    "a metric that does not exist": (f"{TRAIN} --metrics auc", "'auroc'"),
    "a metric of numbers": (f"{TRAIN} --metrics rmse", "'rmse'"),
    "a model without its function": (f"{TRAIN} --model os:nothing", "--model os:nothing"),
    "a model in no module": (f"{TRAIN} --model nowhere:make", "ModuleNotFoundError"),
    "sizes of other nodes": (f"{TRAIN} --declared-sizes 3,3,3", "3"),
    "a label that is not there": ("data describe n0/train.csv --label il --out t.toml", "'ill'"),
    "a file of another kind": ("data describe s.toml --label x --out t.toml", "s.toml"),
    "a schema that is there": ("data describe n0/train.csv --label ill --out s.toml", "--overwrite"),
    "no folder for the schema": ("data describe n0/train.csv --label ill --out no/s.toml", "no/s.toml"),
    "no run at all": ("evaluate", "--input FILE"),
}
CASES = [
    *(pytest.param(TRAIN, "n0/train.csv", *case, id=name) for name, case in FILES.items()),
    *(pytest.param(TRAIN, "s.toml", *case, id=f"schema: {name}") for name, case in SCHEMAS.items()),
    *(pytest.param(words, None, "", "", told, id=name) for name, (words, told) in COMMANDS.items()),
]


@pytest.mark.parametrize(("words", "file", "old", "new", "told"), CASES)
def test_each_mistake_is_one_line(words, file, old, new, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for node in ("n0", "n1"):
        (tmp_path / node).mkdir()
        (tmp_path / node / "train.csv").write_text(TABLE)
    (tmp_path / "s.toml").write_text(SCHEMA)
    if file is not None:
        before = (tmp_path / file).read_text()
        assert old in before
        (tmp_path / file).write_text(before.replace(old, new, 1))
    assert main(words.split()) == WRONG
    shown = capsys.readouterr().err.strip()
    assert told in shown
    assert "\n" not in shown
    assert len(shown) < 500
    assert not (tmp_path / "runs").exists()


# Ranges that a person gives

PATIENTS = "age,months,died,cost\n" + "".join(f"{20 + 3 * k},{k % 50}.5,{k % 2},{k * k}\n" for k in range(60))


def answering(*answers):
    """A person who types this, then nothing but Enter; and what was asked."""
    waiting, asked = list(answers), []

    def ask(question):
        asked.append(question)
        return waiting.pop(0) if waiting else ""

    return ask, asked


def marked(text):
    """The lines of a schema that say that they were guessed."""
    return [line for line in text.splitlines() if line.endswith("# guessed")]


def guessed(tmp_path, **roles):
    (tmp_path / "t.csv").write_text(PATIENTS)
    return guess_schema(read_table(tmp_path / "t.csv"), **roles)


def test_ranges_are_asked_for_and_only_those_left_open_are_marked(tmp_path):
    schema = guessed(tmp_path)
    ask, asked = answering("0 120", "", "0 to 1e6")
    found, known = ask_ranges(schema, ask)
    assert [question.split()[0] for question in asked] == ["age", "months", "cost"]
    ranges = {column.name: column.range for column in found.columns if column.kind == "number"}
    assert ranges["age"] == (0, 120)
    assert ranges["cost"] == (0, 1e6)
    assert ranges["months"] == next(c.range for c in schema.columns if c.name == "months")
    lines = [line for line in marked(found.to_toml("  # guessed", known)) if line.startswith("range")]
    assert len(lines) == 1
    assert "120" not in lines[0]


def test_what_is_no_range_is_asked_for_again(tmp_path, capsys):
    ask, asked = answering("120 0", "old", "1", "1 2 3", "nan 5", "0, 120")
    found, _ = ask_ranges(guessed(tmp_path), ask)
    assert found.columns[0].range == (0, 120)
    assert [question.split()[0] for question in asked].count("age") == 6
    assert len(capsys.readouterr().out.strip().splitlines()) == 1 + 5


@pytest.mark.parametrize(
    ("roles", "answer", "key", "wanted"),
    [
        ({"task": "regression", "label": "cost"}, "0 5000", "range", (0, 5000)),
        ({"task": "survival", "time": "months", "event": "died"}, "12 24 60", "edges", (12, 24, 60)),
    ],
)
def test_a_target_has_ranges_and_edges_too(tmp_path, roles, answer, key, wanted):
    schema = guessed(tmp_path, **roles)
    numbers = [column for column in schema.columns if column.kind == "number"]
    ask, _ = answering(*([""] * len(numbers)), answer)
    found, known = ask_ranges(schema, ask)
    assert found.task.declaration()[key] == wanted
    text = found.to_toml("  # guessed", known)
    assert not [line for line in marked(text.split("[[columns]]")[0]) if line.startswith(key)]
    assert [line for line in marked(schema.to_toml("  # guessed")) if line.startswith(key)]


def test_it_asks_on_a_terminal_and_nowhere_else(tmp_path):
    (tmp_path / "t.csv").write_text(PATIENTS)
    command = [sys.executable, "-m", "dpps", "data", "describe", "t.csv", "--out"]
    ours, theirs = pty.openpty()
    with subprocess.Popen([*command, "asked.toml"], cwd=tmp_path, stdin=theirs, stdout=theirs) as process:
        os.close(theirs)
        os.write(ours, b"0 120\n\n\n")
        assert process.wait(300) == 0
    os.close(ours)
    assert read_schema(tmp_path / "asked.toml").columns[0].range == (0, 120)
    subprocess.run([*command, "drafted.toml"], cwd=tmp_path, stdin=subprocess.DEVNULL, check=True)
    drafted = read_schema(tmp_path / "drafted.toml").columns[0].range
    assert drafted != (0, 120)
    assert len(marked((tmp_path / "drafted.toml").read_text())) > len(
        marked((tmp_path / "asked.toml").read_text())
    )
