"""The outbox: whole or not at all, and the newest that is whole."""

import errno
from pathlib import Path

import pytest
import torch

from dpps.errors import RunError
from dpps.peers import Outbox


def _write(outbox: Outbox, value: int) -> None:
    outbox.write({"x": torch.full((3,), float(value))}, {"value": value})


def test_the_newest_state_is_read(tmp_path: Path) -> None:
    assert Outbox(tmp_path / "o").read() is None
    outbox = Outbox(tmp_path / "o")
    for value in range(5):
        _write(outbox, value)
        found = Outbox(tmp_path / "o").read()
        assert found is not None
        assert found[1]["value"] == value
        assert found[0]["x"].tolist() == [value] * 3
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (tmp_path / "o").iterdir())


@pytest.mark.parametrize("keep", [0, 20, 60, -1])
def test_a_write_that_was_cut_off_leaves_the_one_before(keep: int, tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "o")
    _write(outbox, 1)
    _write(outbox, 2)
    newest = max((tmp_path / "o").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    newest.write_bytes(newest.read_bytes()[:keep])
    again = Outbox(tmp_path / "o")
    found = again.read()
    assert found is not None
    assert found[1]["value"] == 1
    _write(again, 3)
    found = Outbox(tmp_path / "o").read()
    assert found is not None
    assert found[1]["value"] == 3


def test_damage_is_not_taken_for_a_new_start(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "o")
    _write(outbox, 1)
    for path in (tmp_path / "o").iterdir():
        path.write_bytes(b"x" + path.read_bytes()[1:])
    with pytest.raises(RunError, match="damaged"):
        Outbox(tmp_path / "o").read()


def test_a_first_write_that_was_cut_off_is_a_new_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(RunError, match=r"outbox .*No space"):
            _write(Outbox(tmp_path / "o"), 1)
    assert Outbox(tmp_path / "o").read() is None
    _write(Outbox(tmp_path / "o"), 2)
    found = Outbox(tmp_path / "o").read()
    assert found is not None
    assert found[1]["value"] == 2


def test_a_disk_that_refuses(tmp_path: Path) -> None:
    (tmp_path / "o").write_text("a file")
    with pytest.raises(RunError, match=r"outbox .*Not a directory"):
        _write(Outbox(tmp_path / "o"), 1)
