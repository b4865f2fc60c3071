"""What commands print is what they were given."""

import logging

import pytest

from dpps.cli import WRONG, main
from dpps.cli.console import log_lines, plain_console


def test_names_between_colons_are_no_pictures(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_models_x.py").write_text("def x(shape, classes): raise ValueError('no')\n")
    assert main(["train", "--model", "own_models_x:x", "--quiet"]) == WRONG
    assert "--model own_models_x:x: " in capsys.readouterr().err


def test_long_lines_stay_one_line(capsys):
    plain_console().print("word " * 100)
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("train --threads 2", "OMP_NUM_THREADS"),
        ("tune --threads=2", "OMP_NUM_THREADS"),
        ("plan --threads 2", "OMP_NUM_THREADS"),
        ("train --nodes 1000000", "--nodes is 1000000: mnist-mini"),
        ("train --batch-size 3/2", "--batch-size is 1.5"),
        ("report run --out data.csv", ".html"),
    ],
)
def test_wrong_numbers_and_names_are_told_at_once(command, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == WRONG
    said = capsys.readouterr().err
    assert told in said
    assert len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_log_lines_go_to_the_standard_error_and_leave_no_handler_behind(capsys):
    root, logger = logging.getLogger(), logging.getLogger("dpps.somewhere")
    before = list(root.handlers)
    with log_lines():
        logger.warning("in words")
        with log_lines(logging.Formatter("<%(message)s>")):
            logger.warning("inner")
            logger.info("too low")
        logger.warning("again")
    assert capsys.readouterr().err.splitlines() == ["in words", "<inner>", "again"]
    assert root.handlers == before
    assert main(["secret"]) == 0
    assert root.handlers == before, "a program that calls the command line keeps its own logging"
