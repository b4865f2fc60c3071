"""`dpps launch`: its own option among those of `dpps train`, and one exit code for all processes."""

import signal

import pytest

from dpps.cli import DONE, FAILED, STOPPED, WRONG, main
from dpps.cli.launch import _outcome, _take_count
from dpps.errors import UsageError

TERMINATED, KILLED = -signal.SIGTERM, -signal.SIGKILL


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nproc", "4", "--nodes", "8"],
        ["--nproc=4", "--nodes", "8"],
        ["--nodes", "8", "--nproc", "4"],
        ["train", "--nodes", "8", "--nproc=4"],
        ["--nproc", "4", "--", "train", "--nodes", "8"],
    ],
)
def test_the_number_of_processes_is_taken_out_of_the_options(arguments: list[str]) -> None:
    assert _take_count(arguments) == (4, ["--nodes", "8"])


@pytest.mark.parametrize("value", ["0", "-1", "many", ""])
def test_what_is_no_number_of_processes_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match=f"--nproc is '{value}'"):
        _take_count([f"--nproc={value}"])
    with pytest.raises(UsageError, match="--nproc is ''"):
        _take_count(["--nproc"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", "8"], "--nproc is missing"),
        (["--nproc", "9", "--nodes", "8", "--out", "x"], "--nproc is 9: with --nodes 8"),
        (["--nproc", "2", "--nodes", "8"], "needs --out"),
        (["--nproc", "2", "--model", "mpl", "--out", "x"], "'mpl'"),
    ],
)
def test_a_wrong_request_is_told_once_before_any_process_starts(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    assert main(["launch", *arguments]) == WRONG
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("codes", "asked", "code"),
    [
        ([DONE, DONE], False, DONE),
        ([DONE, STOPPED], True, STOPPED),
        ([STOPPED, WRONG], False, WRONG),
        ([DONE, FAILED, WRONG], False, FAILED),
        ([DONE, KILLED], False, FAILED),
        ([TERMINATED, KILLED], True, STOPPED),  # asked before they knew how to stop
        ([TERMINATED, KILLED], False, FAILED),
        ([TERMINATED, DONE], True, FAILED),
    ],
)
def test_the_worst_code_is_that_of_all(codes: list[int], asked: bool, code: int) -> None:
    assert _outcome(codes, asked) == code
