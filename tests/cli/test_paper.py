"""`dpps paper`: what it lists, what it refuses, and that a page is written even without results."""

import pytest

from dpps.cli import paper as command
from dpps.errors import UsageError


def test_without_a_name_it_lists_what_there_is(capsys):
    assert command.paper([]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in command.NAMES)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["factor"], "factors"),
        (["factors", "--models", "mpl"], "mlp"),
        (["factors", "--seeds", "0"], "--seeds"),
        (["factors", "--hours", "-1"], "--hours"),
        (["factors", "--workers", "-1"], "--workers"),
        (["time", "--bandwidth", "0"], "--bandwidth"),
    ],
)
def test_wrong_requests_say_what_is_allowed(arguments, says, tmp_path):
    with pytest.raises(UsageError, match=says):
        command.paper([*arguments, "--out", str(tmp_path)])


def test_a_file_is_no_place_for_results(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"--out.*notes\.txt"):
        command.paper(["factors", "--quick", "--out", str(tmp_path / "notes.txt")])


def test_the_page_is_written_even_with_no_time(tmp_path, capsys):
    assert command.paper(["factors", "--quick", "--hours", "0", "--out", str(tmp_path)]) == 0
    assert "not run" in (tmp_path / "factors" / "index.html").read_text()
