"""Decompressed files are kept in the user cache, and follow the content."""

import lzma
from pathlib import Path

import pytest
import torch

from dpps.data import cache, load
from dpps.errors import RunError
from tests.support.data import cifar_records


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of our own, in which everything is kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "SMALL", 0)


def refuse(*_: object) -> bytes:
    raise AssertionError("it must not be decompressed again")


def test_decompressed_cifar_is_kept_and_follows_the_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cifar-10"
    folder.mkdir()
    (folder / "train.bin.xz").write_bytes(lzma.compress(cifar_records(range(4))))
    (folder / "test.bin.xz").write_bytes(lzma.compress(cifar_records(range(4, 6))))
    first = load("cifar-10", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "unpack", refuse)
        again = load("cifar-10", tmp_path)
    assert torch.equal(first.train.pixels, again.train.pixels)
    (folder / "train.bin.xz").write_bytes(lzma.compress(cifar_records(range(2, 6))))
    assert load("cifar-10", tmp_path).train.labels.tolist() == [2, 3, 4, 5]
    kept = list((tmp_path / "cache" / "dpps" / "decompressed").iterdir())
    assert len(kept) == 3
    assert all(file.suffix == ".bin" for file in kept)


def test_damaged_copy_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "cifar-10").mkdir()
    for part in ("train", "test"):
        (tmp_path / "cifar-10" / f"{part}.bin.xz").write_bytes(lzma.compress(cifar_records(range(3))))
    load("cifar-10", tmp_path)
    (kept,) = (tmp_path / "cache" / "dpps" / "decompressed").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-1])
    assert load("cifar-10", tmp_path).train.labels.tolist() == [0, 1, 2]
    assert kept.read_bytes() == whole


def test_file_that_cannot_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cifar-10").mkdir()
    for part in ("train", "test"):
        (tmp_path / "cifar-10" / f"{part}.bin.xz").write_bytes(lzma.compress(cifar_records(range(3))))

    def forbidden(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", forbidden)
    with pytest.raises(RunError, match=r"train\.bin\.xz: .*Errno 13"):
        load("cifar-10", tmp_path)


def test_cache_that_cannot_be_written_only_costs_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "cifar-10").mkdir()
    for part in ("train", "test"):
        (tmp_path / "cifar-10" / f"{part}.bin.xz").write_bytes(lzma.compress(cifar_records(range(3))))
    assert load("cifar-10", tmp_path).train.labels.tolist() == [0, 1, 2]
    assert "train.bin.xz" in caplog.text
