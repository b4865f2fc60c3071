"""What is not installed is named, with the extra that brings it."""

import sys

import pytest

import dpps
from dpps import cli
from dpps.errors import UsageError, needs_extra, unknown
from dpps.topology import draw


def test_drawing_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"dpps\[plots\]"):
        draw(dpps.Ring(3), tmp_path / "ring.svg")


def test_paper_asks_for_the_extra_before_it_computes(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["paper", "factors", "--quick", "--out", str(tmp_path / "paper")]) == cli.WRONG
    assert "'dpps[plots]'" in capsys.readouterr().err
    assert not (tmp_path / "paper").exists()
    assert cli.main(["paper"]) == cli.DONE


def test_other_failures_are_not_touched():
    with pytest.raises(KeyError), needs_extra("plots"):
        raise KeyError("x")
    assert "'ring'" in str(unknown("topology", "rin", ["ring", "exp"]))
