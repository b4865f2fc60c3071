"""`dpps predict`."""

import csv
from pathlib import Path

import numpy as np
import pytest

import dpps
from dpps.cli import DONE, WRONG, main

COLUMNS = ["age", "pressure", "sugar"]


def write(path: Path, x: np.ndarray, y: np.ndarray | None = None, names: list[str] | None = None) -> Path:
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
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def test_own_columns(hospitals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
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


def test_a_node_is_chosen(hospitals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    new = write(tmp_path / "new.csv", np.ones((2, 3)))
    out = tmp_path / "p.csv"
    assert (
        main(["predict", str(hospitals / "run"), "--input", str(new), "--output", str(out), "--node", "2"])
        == DONE
    )
    assert "node 2" in capsys.readouterr().out


def test_a_card_stands_beside_the_models(hospitals: Path):
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
def test_wrong_files(hospitals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], x, names, told):
    new, out = write(tmp_path / "new.csv", x, None, names), tmp_path / "p.csv"
    assert main(["predict", str(hospitals / "run"), "--input", str(new), "--output", str(out)]) == WRONG
    assert told in capsys.readouterr().err
    assert not out.exists()


def test_wrong_requests(hospitals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run, new = str(hospitals / "run"), str(write(tmp_path / "new.csv", np.ones((2, 3))))
    assert main(["predict", run, "--input", "nowhere.csv", "--output", str(tmp_path / "p.csv")]) == WRONG
    assert "nowhere.csv" in capsys.readouterr().err
    assert main(["predict", str(tmp_path), "--input", new, "--output", str(tmp_path / "p.csv")]) == WRONG
    assert "--out" in capsys.readouterr().err
    assert main(["predict", run, "--input", new, "--output", str(tmp_path / "no" / "p.csv")]) == WRONG
    assert "--output" in capsys.readouterr().err


def test_texts_and_gaps_by_a_schema(tmp_path: Path):
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


def test_files_that_hold_no_predictions_are_kept(hospitals, tmp_path, capsys):
    new = write(tmp_path / "new.csv", np.zeros((2, 3)), names=COLUMNS)
    before = new.read_bytes()
    command = ["predict", str(hospitals / "run"), "--input", str(new), "--output"]
    assert main([*command, str(new)]) == WRONG
    assert "--output" in capsys.readouterr().err
    assert new.read_bytes() == before
    for _ in range(2):  # predictions are replaced
        assert main([*command, str(tmp_path / "p.csv")]) == DONE
