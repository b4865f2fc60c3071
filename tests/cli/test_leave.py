"""`dpps leave`: asks the process that runs, and refuses where there is none."""

from dataclasses import replace
from pathlib import Path

import pytest

from dpps.cli import DONE, FAILED, WRONG, federation, main
from dpps.peers import FINISHED, LEAVE, STOPPED, write_status
from dpps.peers.status import LEFT
from tests.support.peers import status


def test_only_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_status(tmp_path, status())
    assert main(["leave", str(tmp_path), "--wait", "0"]) == DONE
    assert (tmp_path / LEAVE).exists()
    assert "hospital-a" in capsys.readouterr().out


@pytest.mark.parametrize(("state", "code"), [(LEFT, DONE), (FINISHED, FAILED)])
def test_it_waits_until_the_process_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: str, code: int
) -> None:
    """Instead of sleeping, the process of the member ends, as it does after being asked."""
    write_status(tmp_path, status())
    monkeypatch.setattr(
        federation.time, "sleep", lambda _: write_status(tmp_path, replace(status(), state=state))
    )
    assert main(["leave", str(tmp_path)]) == code
    assert f"hospital-a: {state}" in capsys.readouterr().out


def test_nobody_to_ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for state, remedy in (
        (FINISHED, "finished"),
        (STOPPED, "dpps join"),
    ):
        write_status(tmp_path, replace(status(), state=state))
        assert main(["leave", str(tmp_path)]) == WRONG
        said = capsys.readouterr().err
        assert "hospital-a" in said
        assert remedy in said
    assert not (tmp_path / LEAVE).exists()
