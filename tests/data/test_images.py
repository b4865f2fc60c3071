"""Folders of images, one sub-folder for every class."""

import csv
import json
import tomllib

import numpy as np
import pytest
import torch
from PIL import Image

import dpps
from dpps.cli import DONE, WRONG, main
from dpps.data import (
    ImageSchema,
    guess_image_schema,
    image_files,
    labelled_images,
    parse_schema,
    unlabelled_images,
)
from dpps.errors import UsageError

SCHEMA = ImageSchema(("dark", "light"), (1, 8, 8))


def draw(path, light, size=(8, 8), mode="L"):
    """A noisy image, dark or light."""
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(sum(path.name.encode()))
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    values = random.integers(0, 100, size=shape) + (150 if light else 0)
    Image.fromarray(values.astype(np.uint8)).save(path)


def write_folder(folder, count=12):
    for k in range(count):
        draw(folder / ("light" if k % 2 else "dark") / f"{k:03}.png", bool(k % 2))
    return folder


def test_sizes_and_colours_become_those_of_the_schema(tmp_path):
    draw(tmp_path / "dark" / "a.png", False, (16, 4), "RGB")
    draw(tmp_path / "light" / "b.JPG", True)
    (tmp_path / "light" / ".hidden").write_text("not an image")
    x, labels = labelled_images(tmp_path, SCHEMA)
    assert x.shape == (2, 1, 8, 8)
    assert labels.tolist() == [0, 1]
    assert float(x[0].mean()) < 0.4 < float(x[1].mean()) <= 1
    colour, _ = labelled_images(tmp_path, ImageSchema(("dark", "light"), (3, 4, 16)))
    pixels = np.asarray(Image.open(tmp_path / "dark" / "a.png"))
    assert torch.equal(colour[0], torch.from_numpy(pixels.transpose(2, 0, 1).copy()).float() / 255)
    assert torch.equal(unlabelled_images(tmp_path, SCHEMA), x)
    assert [f.name for f in image_files(tmp_path)] == ["a.png", "b.JPG"]


def test_a_class_that_a_node_lacks_does_not_shift_the_others(tmp_path):
    draw(tmp_path / "light" / "b.png", True)
    assert labelled_images(tmp_path, SCHEMA)[1].tolist() == [1]


def test_the_schema_is_guessed_and_read_again(tmp_path):
    write_folder(tmp_path / "train")
    assert guess_image_schema(tmp_path) == SCHEMA
    draw(tmp_path / "train" / "dark" / "colour.png", False, mode="RGB")
    assert guess_image_schema(tmp_path).shape == (3, 8, 8)
    assert parse_schema(tomllib.loads(SCHEMA.to_toml()), "s") == SCHEMA


def test_in_python(tmp_path):
    write_folder(tmp_path / "images")
    (tmp_path / "schema.toml").write_text(SCHEMA.to_toml())
    found = dpps.data.image_dataset(tmp_path / "images", tmp_path / "schema.toml")
    assert len(found) == 12
    assert found[0][0].shape == (1, 8, 8)
    with pytest.raises(UsageError, match=r"schema\.toml .*dpps\.data\.image_dataset"):
        dpps.data.table_dataset(tmp_path / "t.csv", tmp_path / "schema.toml")


def test_from_folders_to_predictions(tmp_path, capsys):
    for node in range(2):
        write_folder(tmp_path / f"node-{node}" / "train", 40)
        write_folder(tmp_path / f"node-{node}" / "test", 10)
    schema, out = str(tmp_path / "schema.toml"), str(tmp_path / "run")
    assert main(["data", "describe", str(tmp_path / "node-0"), "--out", schema]) == DONE
    options = f"--node-data {tmp_path}/node-{{rank}} --schema {schema} --nodes 2 --topology ring".split()
    learn = ["--model", "linear", "--shared", "all", "--unit", "none", "--epochs", "30", "--batch-size", "20"]
    assert main(["train", *options, *learn, "--quiet", "--out", out]) == DONE
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["own_accuracy"] == 100
    new, to = str(tmp_path / "node-0" / "test"), str(tmp_path / "predictions.csv")
    assert main(["predict", out, "--input", new, "--output", to]) == DONE
    with open(to) as file:
        rows = list(csv.DictReader(file))
    assert {row["example"].split("/")[0] == row["prediction"] for row in rows} == {True}
    capsys.readouterr()
    assert main(["evaluate", out, "--input", new, "--json"]) == DONE
    assert json.loads(capsys.readouterr().out)["mean"]["accuracy"] == 1
    words = ["plan", *options, "--model", "linear", "--shared", "all", "--declared-sizes", "40", "--json"]
    assert main(words) == DONE


def test_wrong_folders_are_told(tmp_path, capsys):
    draw(tmp_path / "dark" / "a.png", False)
    draw(tmp_path / "darc" / "a.png", False)
    with pytest.raises(UsageError, match=r"darc .*\('dark', 'light'\)"):
        labelled_images(tmp_path, SCHEMA)
    (tmp_path / "darc" / "a.png").rename(tmp_path / "dark" / "b.png")
    (tmp_path / "darc").rmdir()
    (tmp_path / "dark" / "b.png").write_bytes(b"no image")
    with pytest.raises(UsageError, match=r"b\.png .*UnidentifiedImageError"):
        labelled_images(tmp_path, SCHEMA)
    whole = (tmp_path / "dark" / "a.png").read_bytes()
    (tmp_path / "dark" / "b.png").write_bytes(whole[: len(whole) - 30])
    with pytest.raises(UsageError, match=r"b\.png .*truncated"):
        labelled_images(tmp_path, SCHEMA)
    Image.fromarray(np.zeros((8, 8), np.uint16)).save(tmp_path / "dark" / "b.png")
    with pytest.raises(UsageError, match=r"b\.png .*I;16.*8 bits"):
        labelled_images(tmp_path, SCHEMA)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"empty .*\('dark', 'light'\)"):
        labelled_images(tmp_path / "empty", SCHEMA)
    with pytest.raises(UsageError, match="absent "):
        labelled_images(tmp_path / "absent", SCHEMA)
    assert main(["data", "describe", str(tmp_path), "--label", "x", "--out", str(tmp_path / "s")]) == WRONG
    assert "--label x" in capsys.readouterr().err
    for name in ("a", "b"):
        (tmp_path / "tables" / name).mkdir(parents=True)
        (tmp_path / "tables" / name / "train.csv").touch()
    assert main(["data", "describe", str(tmp_path / "tables"), "--out", str(tmp_path / "s")]) == WRONG
    told = capsys.readouterr().err
    assert ".jpeg" in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('classes = ["a"]\nimages = [1, 8, 8]', r"schema.toml: classes .*\['a'\]"),
        ('classes = ["a", "b"]\nimages = [2, 8, 8]', "channels"),
        ('classes = ["a", "b"]\nimages = [1, 8, 8]\nlabel = "x"', "schema.toml.*'label'"),
    ],
)
def test_wrong_schemas_are_told(text, told):
    with pytest.raises(UsageError, match=told):
        parse_schema(tomllib.loads(text), "schema.toml")
