"""What a run writes is for its owner's eyes, whatever the umask."""

import os
from pathlib import Path

import pytest

from dpps.disk import private, private_folder, write_aside, write_private
from dpps.errors import RunError


@pytest.fixture(params=[0o000, 0o022, 0o277])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path):
    return path.stat().st_mode & 0o777


@pytest.mark.usefixtures("umask")
def test_files_and_folders_are_the_owners(tmp_path):
    private_folder(tmp_path / "a" / "b")
    assert [mode(tmp_path / name) for name in ("a", "a/b")] == [0o700, 0o700]
    write_private(tmp_path / "a" / "b" / "file", b"one")
    with open(tmp_path / "a" / "log", "w", opener=private) as file:
        file.write("two")
    assert [mode(tmp_path / name) for name in ("a/b/file", "a/log")] == [0o600, 0o600]
    assert (tmp_path / "a" / "b" / "file").read_bytes() == b"one"
    assert [p.name for p in (tmp_path / "a" / "b").iterdir()] == ["file"]


def test_an_open_file_is_closed_to_others_and_a_folder_of_yours_stays_as_it_is(tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "file").write_text("")
    (tmp_path / "file").chmod(0o644)
    os.close(private(tmp_path / "file", os.O_WRONLY))
    private_folder(tmp_path)
    assert (mode(tmp_path / "file"), mode(tmp_path)) == (0o600, 0o755)


@pytest.mark.parametrize("write", [write_aside, write_private])
def test_a_file_is_written_completely_or_not_at_all(tmp_path, monkeypatch, write):
    target = tmp_path / "file"
    write(target, b"before")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises((OSError, RunError), match="No space"):
            write(target, b"after")
    assert target.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [target], "nothing is left behind"
    write(target, b"after")
    assert target.read_bytes() == b"after"


def test_a_private_file_is_on_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    calls = []
    sync, replace = os.fsync, Path.replace
    monkeypatch.setattr("os.fsync", lambda f: (calls.append("fsync"), sync(f))[1])
    monkeypatch.setattr(Path, "replace", lambda self, to: (calls.append("replace"), replace(self, to))[1])
    write_private(tmp_path / "file", b"one")
    assert calls == ["fsync", "replace", "fsync"], "the file, and afterwards its folder"
