"""`dpps member`: a key that stays, a request that goes out, and a fingerprint to read out."""

import stat
from pathlib import Path

import pytest

from dpps.cli import DONE, FAILED, WRONG, main
from dpps.peers import Identity, Request, read_out


def test_init_says_what_show_says_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "me"
    options = ["--name", "hospital-b", "--listen", "127.0.0.1:7443", "--address", "b.example:443"]
    assert main(["member", "init", *options, "--out", str(out)]) == DONE
    first = capsys.readouterr().out
    assert main(["member", "show", str(out)]) == DONE
    assert capsys.readouterr().out == first
    assert read_out(Identity.open(out).fingerprint) in first
    assert " 127.0.0.1:7443" in first
    assert " b.example:443" in first
    assert Request.read(out / "member.csr").name == "hospital-b"
    assert stat.S_IMODE((out / "member.key").stat().st_mode) == 0o600


def test_a_member_that_listens_nowhere_dials_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["member", "init", "--name", "a", "--out", str(tmp_path / "a")]) == DONE
    said = capsys.readouterr().out
    assert "127.0.0.1" not in said


def test_a_second_key_in_the_same_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["member", "init", "--name", "a", "--out", str(tmp_path / "a")]
    assert main(command) == DONE
    key = (tmp_path / "a" / "member.key").read_bytes()
    assert main(command) == WRONG
    assert "a" in capsys.readouterr().err
    assert (tmp_path / "a" / "member.key").read_bytes() == key


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "me"
    assert main(["member", "init", "--name", "a", "--out", str(out)]) == FAILED
    assert f"{out / 'member.key'} " in capsys.readouterr().err
