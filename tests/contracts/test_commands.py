"""Every command of the tree keeps the same promises, by being registered: a new one is tested without a line here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpps.cli import COMMANDS, DONE, WRONG, commands, main
from dpps.cli.main import Group

EVERY = sorted(commands())
GROUPS = [name for name, found in COMMANDS.items() if isinstance(found, Group)]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", [*EVERY, *((name,) for name in GROUPS)], ids=" ".join)
def test_it_explains_itself(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--help"]) == DONE
    captured = capsys.readouterr()
    assert len(captured.out) > 200
    assert "--help" in captured.out
    assert captured.err == ""


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_an_unknown_option_is_refused_by_its_name_in_one_line(
    words: tuple[str, ...], empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--no-such-option", "1"]) == WRONG
    captured = capsys.readouterr()
    assert "--no-such-option" in captured.err
    assert f"dpps {' '.join(words)} --help" in captured.err
    assert len(captured.err.strip().splitlines()) == 1
    assert captured.out == ""
    assert not list(empty_folder.iterdir()), "refused before anything was written"


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_a_word_that_it_does_not_expect_is_refused_in_one_line(
    words: tuple[str, ...], empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "one", "two", "three"]) == WRONG
    captured = capsys.readouterr()
    assert len(captured.err.strip().splitlines()) == 1
    assert not list(empty_folder.iterdir())


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_lists_its_commands_and_refuses_others(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    group = COMMANDS[name]
    assert isinstance(group, Group)
    assert main([name]) == DONE
    assert all(f"dpps {name} {each}" in capsys.readouterr().out for each in [next(iter(group.commands))])
    assert main([name, "nonsense"]) == WRONG
    assert "'nonsense'" in capsys.readouterr().err


def test_the_overview_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"]):
        assert main(words) == DONE
        shown = capsys.readouterr().out
        assert all(f"dpps {name}" in shown for name in COMMANDS)


def test_the_overview_needs_no_torch() -> None:
    code = "import sys; from dpps.cli import main; main([]); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=dict(os.environ))
