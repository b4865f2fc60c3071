"""`dpps attack` as a user meets it."""

import json

import pytest

from dpps.audit import leaks
from dpps.cli import main


@pytest.fixture(autouse=True)
def few_runs(monkeypatch):
    monkeypatch.setattr(leaks, "_REPEATS", {False: 3, True: 1})


def test_it_says_who_is_recovered_and_how_well(capsys):
    assert main(["attack", "--nodes", "6", "--rounds", "3", "--epsilon", "3"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert all(nodes in said for nodes in (" 1, 5 ", " 1, 2, 3, 4, 5 ", " 2, 3, 4 "))
    assert "independent 3" in said
    assert "cancelling 3" in said


def test_for_programs_with_images_and_a_picture(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "attack.svg"
    options = [
        "--images",
        "--topology",
        "exp",
        "--nodes",
        "4",
        "--epsilon",
        "2",
        "--plot",
        str(file),
        "--json",
    ]
    assert main(["attack", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recovered"] == [3]
    assert found["hidden"] == [1, 2]
    assert [o["noise"] for o in found["outcomes"]] == ["none", "independent", "cancelling"]
    assert found["outcomes"][0]["epsilon"] is None
    assert found["outcomes"][0]["identified"] == 1
    assert file.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--attacker", "10"], "0 to 9"),
        (["--rounds", "0"], "rounds is 0"),
        (["--epsilon", "0"], "above 0"),
        (["--epsilon"], "--epsilon"),
        (["--topology", "rong"], "ring"),
        (["--nodes", "1"], "2 or more"),
        (["--nodes", "1000"], "512 or fewer"),
        (["--seed", "-1"], "0 or more"),
        (["--plot", "x.png"], "add --images"),
        (["--images", "--plot", "x.pdf"], ".png or .svg"),
        (["--images", "--plot", "nowhere/x.png"], "nowhere"),
    ],
)
def test_it_refuses_in_one_line(options, said, capsys):
    assert main(["attack", *options]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
