"""What the parser refuses is one line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from tyro.conf import Positional

from dpps.cli import parse_options
from dpps.errors import UsageError


@dataclass(frozen=True)
class Options:
    """For tests."""

    file: Positional[Path]
    """A file."""
    nodes: int = 10
    """How many."""
    delta: float | None = None
    """A number or nothing."""
    norm: Literal["batch", "group"] = "batch"
    """One of two."""
    quiet: bool = False
    """Say nothing."""


def test_right_words_are_taken():
    found = parse_options(
        Options, ["a.csv", "--nodes", "3", "--quiet"], "dpps x", Options(Path("b"), delta=0.1)
    )
    assert found == Options(Path("a.csv"), 3, 0.1, quiet=True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("a --ndoes 3", "--nodes"),
        ("a --nodes x", "--nodes is 'x'"),
        ("a --delta x", "--delta is 'x'"),
        ("a --norm layer", "'batch', 'group'"),
        ("a --nodes", "--nodes"),
        ("a --quiet 3", " 3: "),
        ("", "PATH"),
    ],
)
def test_wrong_words_are_one_line(words, told, capsys):
    with pytest.raises(UsageError) as caught:
        parse_options(Options, words.split(), "dpps x")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "─" not in str(caught.value)
    assert "---" not in str(caught.value)
    assert "dpps x --help" in str(caught.value)
    assert capsys.readouterr() == ("", "")


def test_help_is_printed(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_options(Options, ["--help"], "dpps x")
    assert not caught.value.code
    assert "--nodes" in capsys.readouterr().out
