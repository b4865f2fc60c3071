"""What a new user gets wrong with data of one's own: each is one line that says what and where, and exit code 2."""

from pathlib import Path

import pytest

from dpps.cli import WRONG, main

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
    "a category nobody declared": ("50,no,yes", "50,never,yes", "line 3, column 2 (smoker) is 'never'"),
    "a class nobody declared": ("50,no,yes", "50,no,maybe", "line 3, column 3 (ill) is 'maybe'"),
    "no label": ("50,no,yes", "50,no,", "line 3, column 3 (ill)"),
    "a cell too many": ("50,no,yes", "50,no,yes,1", "line 3: 4 cells"),
    "a cell too few": ("50,no,yes", "50,no", "line 3: 2 cells"),
    "a column that is missing": ("smoker", "smoke", "'smoker'"),
    "a column twice": ("smoker", "age", "columns 1 and 2"),
    "an open quote": ("50,no,yes", '50,"no,yes', "line 3"),
    "only a header": ("\n40,yes,no\n50,no,yes\n60,?,yes", "", "n0/train.csv"),
    "one column": (TABLE, "ill\nyes\n", "1 column"),
    "empty": (TABLE, "", "n0/train.csv"),
}
SCHEMAS = {  # another schema
    "no TOML": ('label = "ill"', "label = ill", "TOML"),
    "no label": ('label = "ill"\n', "", "label"),
    "one class": ('["no", "yes"]\n[[', '["no"]\n[[', "2 or more"),
    "a kind that does not exist": ('"number"', '"numeric"', "'number'"),
    "a range the wrong way round": ("[0, 120]", "[120, 0]", "[120, 0]"),
    "an entry that does not exist": ("range =", "rnge =", "'range'"),
    "no columns": (SCHEMA, 'label = "ill"\nclasses = ["no", "yes"]\n', "columns"),
    "a column twice": ('"smoker"', '"age"', "'age'"),
}
COMMANDS = {
    "no such option": (f"{TRAIN} --epocs 3", "--epochs"),
    "no number": (f"{TRAIN} --epsilon much", "--epsilon is 'much'"),
    "no such folder": (TRAIN.replace("n{rank}", "m{rank}"), "m0"),
    "one folder for all": (TRAIN.replace("n{rank}", "n0"), "{rank}"),
    "no such schema": (TRAIN.replace("s.toml", "t.toml"), "t.toml"),
    "schema and classes": (f"{TRAIN} --classes 2", "--classes"),
    "an option of named data": (f"{TRAIN} --split label:2", "--split"),
    "a metric that does not exist": (f"{TRAIN} --metrics auc", "'auroc'"),
    "a metric of numbers": (f"{TRAIN} --metrics rmse", "'rmse'"),
    "a model without its function": (f"{TRAIN} --model os:nothing", "--model os:nothing"),
    "a model in no module": (f"{TRAIN} --model nowhere:make", "ModuleNotFoundError"),
    "sizes of other nodes": (f"{TRAIN} --declared-sizes 3,3,3", "3"),
    "averaging too much": (f"{TRAIN} --averaging 2", "(0, 1]"),
    "noise said twice": (f"{TRAIN} --epsilon 3 --noise-multiplier 1", "noise"),
    "a label that is not there": ("data describe n0/train.csv --label il --out t.toml", "'ill'"),
    "no label named": ("data describe n0/train.csv --out t.toml", "--label"),
    "a file of another kind": ("data describe s.toml --label x --out t.toml", "s.toml"),
    "a schema that is there": ("data describe n0/train.csv --label ill --out s.toml", "--overwrite"),
    "no folder for the schema": ("data describe n0/train.csv --label ill --out no/s.toml", "no/s.toml"),
    "predictions of no run": ("predict n0 --input n0/train.csv --output p.csv", "models"),
    "predictions into no folder": ("predict n0 --input n0/train.csv --output no/p.csv", "no/p.csv"),
    "a report of no run": ("report n0", "run.json"),
    "no run at all": ("evaluate", "--input PATH"),
}
CASES = [
    *(pytest.param(TRAIN, "n0/train.csv", *case, id=name) for name, case in FILES.items()),
    *(pytest.param(TRAIN, "s.toml", *case, id=f"schema: {name}") for name, case in SCHEMAS.items()),
    *(pytest.param(words, None, "", "", told, id=name) for name, (words, told) in COMMANDS.items()),
]


@pytest.mark.parametrize(("words", "file", "old", "new", "told"), CASES)
def test_each_mistake_is_one_line(words, file, old, new, told, tmp_path: Path, monkeypatch, capsys):
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
