"""dpps predict, evaluate and report."""

import csv
import json
import webbrowser

import numpy as np
import pytest

import dpps
from dpps import cli
from dpps.cli import DONE, main
from dpps.report import read_folder
from dpps.runs import Options, Run
from tests.support.hospitals import write_hospitals

# `dpps predict`


COLUMNS = ["age", "pressure", "sugar"]


def write(path, x, y=None, names=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        if names:
            writer.writerow(names)
        writer.writerows(
            x.tolist() if y is None else [[*row, int(label)] for row, label in zip(x, y, strict=True)]
        )
    return path


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory):
    base, rng = tmp_path_factory.mktemp("hospitals"), np.random.default_rng(0)
    for node in range(3):
        x = rng.normal(size=(90, 3))
        write(base / f"node-{node}" / "train.csv", x, x.sum(1) > 0, [*COLUMNS, "ill"])
    options = [
        "--nodes",
        "3",
        "--node-data",
        f"{base}/node-{{rank}}",
        "--classes",
        "2",
        "--model",
        "linear",
        "--shared",
        "all",
    ]
    options += [
        "--unit",
        "none",
        "--epochs",
        "20",
        "--batch-size",
        "30",
        "--lr-shared",
        "1",
        "--quiet",
        "--topology",
        "ring",
    ]
    assert main(["train", *options, "--out", str(base / "run")]) == DONE
    return base


def test_own_columns(hospitals, tmp_path, capsys):
    x = np.array([[2.0, 1.0, 1.0], [-1.0, -2.0, -1.0], [3.0, 0.0, 0.0]])
    expected = None
    for labels, names in ((None, COLUMNS), (None, None), (np.array([0, 0, 0]), [*COLUMNS, "ill"])):
        new, out = write(tmp_path / "new.csv", x, labels, names), tmp_path / "predictions.csv"
        assert main(["predict", str(hospitals / "run"), "--input", str(new), "--output", str(out)]) == DONE
        with out.open() as file:
            rows = list(csv.DictReader(file))
        assert list(rows[0]) == ["example", "prediction", "probability of 0", "probability of 1"]
        assert [row["prediction"] for row in rows] == ["1", "0", "1"]
        assert expected in (None, rows)
        expected = rows
        assert float(rows[0]["probability of 1"]) > 0.9
        assert out.stat().st_mode & 0o077 == 0
    assert "node 0 of 3" in capsys.readouterr().out


def test_a_node_is_chosen(hospitals, tmp_path, capsys):
    new = write(tmp_path / "new.csv", np.ones((2, 3)))
    out = tmp_path / "p.csv"
    assert (
        main(["predict", str(hospitals / "run"), "--input", str(new), "--output", str(out), "--node", "2"])
        == DONE
    )
    assert "node 2" in capsys.readouterr().out


def test_a_card_stands_beside_the_models(hospitals):
    card = (hospitals / "run" / "model-card.md").read_text()
    assert card.startswith("# Model card")
    assert "epsilon" not in card
    assert list(dpps.load(hospitals / "run")) == [0, 1, 2]


@pytest.mark.parametrize(
    ("x", "names", "told"),
    [
        (np.ones((2, 5)), None, "5 columns"),
        (np.ones((2, 3)), ["age", "sugar", "pressure"], "column 2 is 'sugar' and was 'pressure'"),
        (np.full((2, 3), np.nan), COLUMNS, "'nan'"),
    ],
)
def test_wrong_files(hospitals, tmp_path, refused, x, names, told):
    new, out = write(tmp_path / "new.csv", x, None, names), tmp_path / "p.csv"
    refused(["predict", hospitals / "run", "--input", new, "--output", out], told)
    assert not out.exists()


def test_wrong_requests_to_predict(hospitals, tmp_path, refused):
    run, new, out = hospitals / "run", write(tmp_path / "new.csv", np.ones((2, 3))), tmp_path / "p.csv"
    refused(["predict", run, "--input", "nowhere.csv", "--output", out], "nowhere.csv")
    refused(["predict", tmp_path, "--input", new, "--output", out], "--out")
    refused(["predict", run, "--input", new, "--output", tmp_path / "no" / "p.csv"], "--output")


def test_texts_and_gaps_by_a_schema(tmp_path):
    """Three hospitals, strings, missing values and other orders of columns: no edit of the files is needed."""
    rng = np.random.default_rng(1)
    for node, order in enumerate(((0, 1, 2), (2, 0, 1), (1, 2, 0))):
        ages = rng.integers(20, 90, size=60)
        rows = [[str(a), rng.choice(["yes", "no"]), "ill" if a > 55 else "well"] for a in ages]
        rows[0][0] = "NA"
        folder = tmp_path / f"node-{node}"
        folder.mkdir()
        with (folder / "train.csv").open("w", newline="") as file:
            writer = csv.writer(file, delimiter=";")
            for row in (["age", "smokes", "state"], *rows):
                writer.writerow([row[k] for k in order])
    (tmp_path / "schema.toml").write_text(
        'label = "state"\nclasses = ["well", "ill"]\n[[columns]]\nname = "age"\nkind = "number"\nrange = [20, 90]\n'
        '[[columns]]\nname = "smokes"\nkind = "category"\nvalues = ["yes", "no"]\n'
    )
    options = [
        "--nodes",
        "3",
        "--node-data",
        f"{tmp_path}/node-{{rank}}",
        "--schema",
        f"{tmp_path}/schema.toml",
        "--model",
        "linear",
    ]
    options += [
        "--unit",
        "none",
        "--epochs",
        "60",
        "--batch-size",
        "20",
        "--lr-shared",
        "2",
        "--quiet",
        "--shared",
        "all",
    ]
    assert main(["train", *options, "--out", str(tmp_path / "run")]) == DONE
    (tmp_path / "schema.toml").unlink()  # the models know it
    new, out = tmp_path / "new.csv", tmp_path / "predictions.csv"
    new.write_text("smokes,age\nyes,85\nno,22\n")
    assert main(["predict", str(tmp_path / "run"), "--input", str(new), "--output", str(out)]) == DONE
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["prediction"] for row in rows] == ["ill", "well"]
    assert list(rows[0]) == ["example", "prediction", "probability of well", "probability of ill"]


def test_files_that_hold_no_predictions_are_kept(hospitals, tmp_path, refused):
    new = write(tmp_path / "new.csv", np.zeros((2, 3)), names=COLUMNS)
    before = new.read_bytes()
    command = ["predict", str(hospitals / "run"), "--input", str(new), "--output"]
    refused([*command, new], "--output")
    assert new.read_bytes() == before
    for _ in range(2):  # predictions are replaced
        assert main([*command, str(tmp_path / "p.csv")]) == DONE


# `dpps evaluate`


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "x"
    return Run.from_options(Options(out=out, nodes=3, batch_size=500, epochs=1, quiet=True)).fit(1)


@pytest.fixture(scope="module")
def labelled(run, tmp_path_factory):
    x, labels = run.tests
    path = tmp_path_factory.mktemp("data") / "test.npz"
    np.savez(path, x=(x * 255).round().numpy().astype(np.uint8), y=labels.numpy())
    return path


def test_the_test_set_gives_the_accuracy_of_the_summary(run, labelled, capsys):
    assert main(["evaluate", str(run.out), "--input", str(labelled), "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    by_node = [100 * found["nodes"][str(k)]["accuracy"] for k in range(3)]
    assert by_node == pytest.approx(run.accuracy_by_node, abs=0.11)  # bytes round inputs
    assert 100 * found["mean"]["accuracy"] == pytest.approx(run.accuracy, abs=0.11)


def test_a_table_of_metrics(run, labelled, capsys):
    options = ["--metrics", "accuracy, auroc", "--node", "1"]
    assert main(["evaluate", str(run.out), "--input", str(labelled), *options]) == DONE
    shown = capsys.readouterr().out
    assert "auroc" in shown
    assert "mean" not in shown  # of one node


def test_a_table_of_many_metrics_fits_a_terminal(run, labelled, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["evaluate", str(run.out), "--input", str(labelled)]) == DONE
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    assert "log-loss" in shown


def test_a_row_for_every_class(run, labelled, capsys):
    options = ["--input", str(labelled), "--node", "1", "--per-class"]
    assert main(["evaluate", str(run.out), *options, "--json"]) == DONE
    rows = json.loads(capsys.readouterr().out)["classes"]["1"]
    assert [row["class"] for row in rows] == [str(k) for k in range(10)]
    right = sum(row["recall"] * row["examples"] for row in rows)
    assert 100 * right / sum(row["examples"] for row in rows) == pytest.approx(
        run.accuracy_by_node[1], abs=0.11
    )
    assert main(["evaluate", str(run.out), *options]) == DONE
    assert "precision" in capsys.readouterr().out


def test_wrong_requests_to_evaluate(run, labelled, tmp_path, refused):
    np.savez(tmp_path / "new.npz", x=np.zeros((2, 28, 28)))
    refused(["evaluate", run.out, "--input", tmp_path / "new.npz"], "array 'y'")
    measured = ["evaluate", run.out, "--input", labelled]
    refused([*measured, "--metrics", "acuracy"], "accuracy")
    refused([*measured, "--metrics", "rmse"], "'rmse'")
    refused([*measured, "--node", "9"], "nodes 0, 1, 2")


# `dpps report`


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("runs")
    for name in ("one", "two"):
        config = Options(out=base / name, nodes=5, batch_size=250, epochs=1, unit="none", quiet=True)
        Run.from_options(config).fit(1)
    return [base / "one", base / "two"]


def test_command_line(folders, tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.chdir(tmp_path)
    one, two = map(str, folders)
    assert cli.main(["report", one]) == cli.DONE
    said = capsys.readouterr().out
    for name in ("report.html", "model-card.md"):
        assert str(folders[0] / name) in said
        assert (folders[0] / name).exists()
    assert opened == []
    assert cli.main(["report", one, two, "--open"]) == cli.DONE
    assert opened == [(tmp_path / "comparison.html").as_uri()]
    assert cli.main(["report", one, "--out", "mine.html"]) == cli.DONE
    assert (tmp_path / "mine.html").exists()
    assert cli.main(["report", one, "--out", "mine.md"]) == cli.DONE
    assert (tmp_path / "mine.md").read_text().startswith("# Model card")


def test_a_comparison_is_not_overwritten(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "comparison.html").write_text("of other runs")
    for name in ("comparison-2.html", "comparison-3.html"):
        assert cli.main(["report", *map(str, folders)]) == cli.DONE
        assert name in capsys.readouterr().out
    assert (tmp_path / "comparison.html").read_text() == "of other runs"


def test_wrong_requests_to_report(folders, refused):
    refused(["report", "nowhere"], "run.json")
    refused(["report", *folders, "--out", "card.md"], "--out card.md")


def test_a_report_does_not_need_the_files_that_the_run_was_given(tmp_path, monkeypatch):
    """Neither the directory of `dpps train`, nor the schema, which the folder keeps; the command repeats the options as they were."""
    template = write_hospitals(tmp_path / "there").relative_to(tmp_path / "there")
    monkeypatch.chdir(tmp_path / "there")
    assert cli.main(["data", "describe", "node-2/train.csv", "--label", "diagnosis", "--out", "s.toml"]) == 0
    own = ["--nodes", "3", "--node-data", str(template), "--schema", "s.toml"]
    options = ["--model", "linear", "--shared", "all"]
    assert cli.main(["train", *own, *options, "--quiet", "--out", "run"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cli.main(["report", "../there/run"]) == 0
    (tmp_path / "there" / "s.toml").unlink()
    (tmp_path / "there" / "run").rename(tmp_path / "moved")
    assert cli.main(["report", "../moved"]) == 0
    command = read_folder(tmp_path / "moved", "run").command
    assert command is not None
    assert "--schema s.toml" in command
    assert f"--node-data '{template}'" in command
