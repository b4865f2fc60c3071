"""Checkpoints in safetensors and JSON, written atomically. The last two are kept, and a damaged one is
skipped with a message."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from dpps.disk import private, private_folder, sync_folder
from dpps.errors import RunError

log = logging.getLogger(__name__)

KEPT = 2
_ASIDE = "aside-"


@dataclass(frozen=True)
class Checkpoint:
    """What was saved after `round` rounds."""

    round: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]


def save_checkpoint(
    folder: Path, round_: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]
) -> None:
    """Write checkpoint `round_`; the one before stays until this one is whole on disk.

    Raises:
        RunError: the disk refused (full, say); the older checkpoint is untouched.
    """
    target, aside = folder / f"round-{round_:09d}", folder / f".round-{round_:09d}.part"
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    text = json.dumps({**meta, "round": round_, "sha256": hashlib.sha256(data).hexdigest()}, indent=1)
    try:
        private_folder(folder)
        shutil.rmtree(aside, ignore_errors=True)
        private_folder(aside)
        _write(aside / "tensors.safetensors", data)
        _write(aside / "meta.json", text.encode())
        sync_folder(aside)
        if target.exists():  # the same round again, after a resume
            shutil.rmtree(target)
        aside.rename(target)
        sync_folder(folder)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        kept = _all(folder)
        safe = f"{kept[-1]} is intact" if kept else "there is no older one"
        raise RunError(
            f"the checkpoint of round {round_} cannot be written to {folder}: {error.strerror}; {safe}"
        ) from error
    _prune(folder)


def _prune(folder: Path) -> None:
    """Keep the newest; what was set aside is needed no more once all that are kept are as far."""
    kept = _all(folder)[-KEPT:]
    for old in _all(folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    for old in _all(folder, f"{_ASIDE}round-"):
        if len(kept) == KEPT and _round(old) <= _round(kept[0]):
            shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(folder: Path, at: int | None = None) -> Checkpoint | None:
    """The newest whole checkpoint (or that of round `at`), or None when there is none at all.

    Raises:
        RunError: there are checkpoints and all of them are damaged.
    """
    found = [path for path in _all(folder) if at in (None, _round(path))]
    whole = next(_whole(found), None)
    if found and whole is None:
        raise RunError(
            f"all checkpoints in {folder} are damaged: start again with --overwrite or another --out"
        )
    return whole


def whole_rounds(folder: Path) -> list[int]:
    """The rounds of which there is a checkpoint that can be read, ascending."""
    return sorted(checkpoint.round for checkpoint in _whole(_all(folder)))


def _whole(paths: Sequence[Path]) -> Iterator[Checkpoint]:
    """Those that can be read, the last one first."""
    for path in reversed(paths):
        try:
            yield _read(path)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            log.warning("checkpoint %s is damaged (%s): going back to the one before", path, error)


def set_aside_after(folder: Path, round_: int) -> None:
    """Rename checkpoints of later rounds: the run goes on from `round_`, they belong to an attempt that is over."""
    for path in _all(folder):
        if _round(path) > round_:
            aside = path.with_name(f"{_ASIDE}{path.name}")
            shutil.rmtree(aside, ignore_errors=True)  # of an attempt before that one
            path.rename(aside)
            log.warning("going on from round %d: checkpoint %s is now %s", round_, path, aside.name)


def _round(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _read(path: Path) -> Checkpoint:
    meta = json.loads((path / "meta.json").read_text())
    if not isinstance(meta, dict):
        raise ValueError("meta.json holds no object")  # noqa: TRY004 - the file is damaged, no caller is wrong
    data = (path / "tensors.safetensors").read_bytes()
    if hashlib.sha256(data).hexdigest() != meta.pop("sha256"):
        raise ValueError("checksum differs")
    return Checkpoint(int(meta.pop("round")), load(data), meta)


def _all(folder: Path, prefix: str = "round-") -> list[Path]:
    """Ours alone: a copy that somebody has put beside them is called otherwise."""
    return sorted(p for p in folder.glob(f"{prefix}*") if p.name.removeprefix(prefix).isdecimal())


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb", opener=private) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
