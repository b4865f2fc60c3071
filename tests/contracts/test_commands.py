"""Every command of the tree keeps the same promises, by being registered: a new one is tested without a line here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpps.cli import COMMANDS, DONE, WRONG, commands, main
from dpps.cli.help import groups_of, options_of
from dpps.cli.main import Group

EVERY = sorted(words for words, _ in commands())
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
def test_every_option_has_a_line_of_help_that_fits(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    kind = dict(commands())[words].kind()
    for option in options_of(kind):
        assert option.help, option.flag
        assert len(option.line) <= 2 * 50, (
            f"{option.flag}: at most two lines; the rest belongs to the details"
        )
    assert main([*words, "--help"]) == DONE
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 80
    assert len(shown) <= 100
    for title, options in groups_of(kind).items():
        assert title in shown
        assert len(options) <= 24, f"the group {title} does not fit a screen"


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_the_same_words_mean_the_same_in_every_command(words: tuple[str, ...]) -> None:
    """--json prints JSON, --plot and --out are places to write to, and nothing is called another name for them."""
    for option in options_of(dict(commands())[words].kind()):
        assert option.flag not in ("--output-dir", "--folder", "--picture", "--as-json")
        if option.flag == "--json":
            assert option.value == ""
        if option.flag in ("--out", "--plot"):
            assert option.is_path


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
        assert len(shown.splitlines()) <= 24, "it fits a screen"


def test_the_overview_needs_no_torch() -> None:
    code = "import sys; from dpps.cli import main; main([]); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=dict(os.environ))
