"""The reference of the command line is the one that the code gives."""

from pathlib import Path

import pytest

from dpps.cli import commands
from dpps.cli.help import options_of
from dpps.runs import Options
from tests.support.scripts import load_script

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def script():
    return load_script("reference")


def test_the_generated_parts_are_up_to_date(script):
    assert script.COMMANDS.read_text(encoding="utf-8") == script.page(), "run python scripts/reference.py"


def test_every_option_of_every_command_is_there_once(script):
    """Of a command that takes the options of `dpps train`, those it does not take and those it has besides."""
    page = script.COMMANDS.read_text(encoding="utf-8")
    trained = {option.flag for option in options_of(Options)}
    for words, command in commands():
        kind = command.kind()
        section = page.partition(f"### dpps {' '.join(words)}\n")[2].partition("\n### ")[0]
        own = {option.flag for option in options_of(kind)}
        extends = kind is not Options and issubclass(kind, Options)
        wanted = own - trained if extends else own
        rows = [line for line in section.splitlines() if line.startswith("| `")]
        assert len(rows) == len(wanted), words
        assert all(any(row.startswith(f"| `{flag}") for row in rows) for flag in wanted), words
        if extends:
            assert all(f"`{flag}`" in section for flag in trained - own)
