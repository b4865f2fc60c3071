"""The outbox: a member's whole state on disk before anything of a round leaves,
in one write that is there completely or not at all.

It holds the rows that others have not acknowledged, with the numbers of their shares; what this member has counted of others; its
parameters; and the newest lines of the ledger. Two files are written in turn, so that a write cut off by a crash leaves the other
intact. A round exists when its write has returned: a crash before it means that nothing was sent and nothing
is charged; a crash after it, that the same bytes are sent again.
"""

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from dpps.disk import close_alone, open_alone, private, private_folder, sync_folder, writing
from dpps.errors import RunError

_HEAD = struct.Struct("<8sQ32s")
_MAGIC = b"dppsout1"


class Outbox:
    """The two files of one member's outbox, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self._paths = folder / "a", folder / "b"
        self._folder = folder
        self._turn = 0
        self._locked: int | None = None

    def lock(self) -> None:
        """Be the only process that has this outbox, until `unlock` or its end.

        Raises:
            RunError: another process has it.
        """
        with writing(self._folder):
            private_folder(self._folder)
            self._locked = open_alone(self._folder / "lock", os.O_CREAT)

    def unlock(self) -> None:
        """Let others have it."""
        if self._locked is not None:
            close_alone(self._locked)
            self._locked = None

    def read(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest state that is whole; None when there is none.

        Raises:
            RunError: there are files, and none of them is whole.
        """
        found = [each for path in self._paths if (each := _read(path)) is not None]
        if not found:
            if any(path.exists() and path.stat().st_size for path in self._paths):
                raise RunError(
                    f"the outbox in {self._folder} is damaged, so what was sent is not known: restore the "
                    "folder, or leave the run"
                )
            return None
        tensors, meta = max(found, key=lambda each: int(each[1]["turn"]))
        self._turn = meta["turn"]
        return tensors, meta

    def write(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Put a new state on disk; when this returns, it stays.

        Raises:
            RunError: the disk refused; the state before is intact.
        """
        turn = self._turn + 1
        payload = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        text = json.dumps({**meta, "turn": turn}, allow_nan=False).encode()
        parts = struct.pack("<Q", len(text)), text, payload  # a payload may be large: it is not copied
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        path = self._paths[turn % 2]
        try:
            fresh = not path.exists()
            # the first of its name is there whole or not at all: cut off, it would look like a damaged one
            target = path.with_suffix(".part") if fresh else path
            private_folder(self._folder)
            with open(target, "wb", opener=private) as file:
                file.write(_HEAD.pack(_MAGIC, sum(map(len, parts)), digest.digest()))
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            if fresh:
                target.replace(path)
                sync_folder(self._folder)
                sync_folder(self._folder.parent)
        except OSError as error:
            raise RunError(
                f"the outbox {path} cannot be written: {error.strerror}; nothing of this round was sent"
            ) from error
        self._turn = turn


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """None for a file that is not there, or whose write was cut off."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"the outbox {path} cannot be read: {error.strerror}") from error
    if len(data) < _HEAD.size + 8:
        return None
    magic, size, digest = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if magic != _MAGIC or size != len(body) or hashlib.sha256(body).digest() != digest:
        return None
    (length,) = struct.unpack_from("<Q", body)
    try:
        return load(body[8 + length :]), json.loads(body[8 : 8 + length])
    except (SafetensorError, ValueError) as error:
        raise RunError(f"the outbox {path} is of another version: {error}") from error
