"""`dpps evaluate`."""

import json
from pathlib import Path

import numpy as np
import pytest

from dpps.cli import DONE, WRONG, main
from dpps.runs import Options, Run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("runs") / "x"
    return Run.from_options(Options(out=out, nodes=3, batch_size=500, epochs=1, quiet=True)).fit(1)


@pytest.fixture(scope="module")
def labelled(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    x, labels = run.results.tests
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


def test_wrong_requests(run, labelled, tmp_path, capsys):
    np.savez(tmp_path / "new.npz", x=np.zeros((2, 28, 28)))
    assert main(["evaluate", str(run.out), "--input", str(tmp_path / "new.npz")]) == WRONG
    assert "array 'y'" in capsys.readouterr().err
    assert main(["evaluate", str(run.out), "--input", str(labelled), "--metrics", "acuracy"]) == WRONG
    assert "accuracy" in capsys.readouterr().err
    assert main(["evaluate", str(run.out), "--input", str(labelled), "--metrics", "rmse"]) == WRONG
    assert "'rmse'" in capsys.readouterr().err
    assert main(["evaluate", str(run.out), "--input", str(labelled), "--node", "9"]) == WRONG
    assert "nodes 0, 1, 2" in capsys.readouterr().err
