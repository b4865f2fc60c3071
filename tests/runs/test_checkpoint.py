"""Checkpoints: the last two are kept, a damaged one is passed over, and a full disk costs none."""

import errno
import shutil
from pathlib import Path

import pytest
import torch

from dpps.errors import RunError
from dpps.runs import checkpoint, load_checkpoint, save_checkpoint, set_aside_after, whole_rounds


def _save(folder: Path, *rounds: int) -> None:
    for round_ in rounds:
        save_checkpoint(folder, round_, {"s": torch.full((2,), float(round_))}, {"note": round_})


def test_the_last_two_are_kept_and_the_newest_is_read(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path) is None
    _save(tmp_path, 5, 10, 15)
    assert whole_rounds(tmp_path) == [10, 15]
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert (found.round, found.meta, found.tensors["s"].tolist()) == (15, {"note": 15}, [15.0, 15.0])
    older = load_checkpoint(tmp_path, at=10)
    assert older is not None
    assert older.round == 10


def test_a_damaged_one_is_passed_over_and_only_damaged_ones_stop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _save(tmp_path, 5, 10)
    tensors = tmp_path / "round-000000010" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"x")
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert found.round == 5
    assert "checksum" in caplog.text
    (tmp_path / "round-000000005" / "meta.json").unlink()
    with pytest.raises(RunError, match="--overwrite"):
        load_checkpoint(tmp_path)


def test_a_copy_that_somebody_made_beside_them_is_left_alone(tmp_path: Path) -> None:
    _save(tmp_path, 5, 10)
    shutil.copytree(tmp_path / "round-000000010", tmp_path / "round-000000010.before")
    shutil.copytree(tmp_path / "round-000000010", tmp_path / "aside-round-of-mine")
    assert whole_rounds(tmp_path) == [5, 10]
    _save(tmp_path, 15, 20)
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert found.round == 20
    set_aside_after(tmp_path, 15)
    assert (tmp_path / "round-000000010.before").is_dir()
    assert (tmp_path / "aside-round-of-mine").is_dir()


@pytest.mark.parametrize("text", ["null", "[]", "{}", "{"])
def test_what_is_no_description_of_a_checkpoint_is_a_damaged_one(tmp_path: Path, text: str) -> None:
    _save(tmp_path, 5, 10)
    (tmp_path / "round-000000010" / "meta.json").write_text(text)
    assert whole_rounds(tmp_path) == [5]


def test_a_full_disk_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path, 5)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "_write", full)
    with pytest.raises(RunError, match=r"round 10 .*No space.*round-000000005"):
        _save(tmp_path, 10)
    assert whole_rounds(tmp_path) == [5]


def test_later_ones_are_renamed_and_not_deleted(tmp_path: Path) -> None:
    _save(tmp_path, 5, 10)
    set_aside_after(tmp_path, 5)
    assert whole_rounds(tmp_path) == [5]
    assert (tmp_path / "aside-round-000000010").is_dir()
