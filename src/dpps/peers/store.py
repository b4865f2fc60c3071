"""Writes a member's state and ledger to disk before anything of a round is sent.

The *outbox* holds the rows that others have not acknowledged, with the numbers of their shares; what this member has counted of
others; its parameters; and the newest lines of the ledger, so that one wait for the disk per round puts both the charge and the
message there. Two files are written in turn, so that a write cut off by a crash leaves the other intact. A round exists when its
write has returned: a crash before it means that nothing was sent and nothing is charged; a crash after it, that the same bytes are
sent again.
"""

import hashlib
import json
import logging
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from dpps.disk import close_alone, open_alone, private, private_folder, sync_folder, writing
from dpps.errors import RunError
from dpps.privacy.ledger import Budget, LedgerFile, Mark, Release, Witness, believed, unsealed, witness_of

_HEAD = struct.Struct("<8sQ32s")
_MAGIC = b"dppsout1"


class Outbox:
    """The two files of one member's outbox, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self._paths = folder / "a", folder / "b"
        self.folder = folder
        self._turn = 0
        self._locked: int | None = None

    def lock(self) -> None:
        """Be the only process that has this outbox, until `unlock` or its end. RunError: another process has it."""
        with writing(self.folder):
            private_folder(self.folder)
            self._locked = open_alone(self.folder / LOCK, os.O_CREAT)

    def unlock(self) -> None:
        if self._locked is not None:
            close_alone(self._locked)
            self._locked = None

    def read(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest state that is whole; None when there is none. RunError: there are files, and none of them is whole."""
        found = [each for path in self._paths if (each := _read(path)) is not None]
        if not found:
            if any(path.exists() and path.stat().st_size for path in self._paths):
                raise RunError(
                    f"the outbox in {self.folder} is damaged, so what was sent is not known: restore the "
                    "folder, or leave the run"
                )
            return None
        tensors, meta = max(found, key=lambda each: int(each[1]["turn"]))
        self._turn = meta["turn"]
        return tensors, meta

    def write(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Put a new state on disk; when this returns, it stays. RunError: the disk refused; the state before is intact."""
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
            private_folder(self.folder)
            with open(target, "wb", opener=private) as file:
                file.write(_HEAD.pack(_MAGIC, sum(map(len, parts)), digest.digest()))
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            if fresh:
                target.replace(path)
                sync_folder(self.folder)
                sync_folder(self.folder.parent)
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


log = logging.getLogger(__name__)

OUTBOX = "outbox"
LOCK = "lock"
"""The folder of the outbox, beside the ledger."""

_LINES = 16
"""So many lines are in the outbox only, as far as the disk has promised; then the ledger's own file is waited for."""


class OutboxLedger(LedgerFile):
    """Charges are made in memory, go to disk with the outbox, and then into the ledger's file.

    A charge whose outbox was never written is of a message that never left: it is forgotten. One whose outbox was written is put
    into the file at the next start if it is not there yet (`recover`).
    """

    def __init__(
        self, path: Path, header: Mapping[str, Any], durable: bool, budget: Budget | None = None
    ) -> None:
        super().__init__(path, header, durable, budget)
        self._tail: list[bytes] = []
        self._appended = 0
        """So many lines of the tail are in the file, though perhaps not on the disk."""

    def _write(self, release: Release) -> None:
        with self._whole():
            self._tail.append(self._sealed(release.to_json()))

    def tail(self) -> tuple[int, list[str]]:
        """The number of the first line that only the outbox is sure to have, and the lines from there: for the outbox."""
        return self.mark.lines - len(self._tail) + 1, [line.decode() for line in self._tail]

    def kept(self) -> None:
        """The outbox with all lines is on disk: append them to the file."""
        with self._whole():
            data = b"".join(self._tail[self._appended :])
            try:
                while data:
                    data = data[os.write(self._file, data) :]
                self._appended = len(self._tail)
                if len(self._tail) >= _LINES:
                    self._settle()
            except OSError as error:
                raise RunError(
                    f"ledger {self.path} cannot be written: {error.strerror}; the message was not sent"
                ) from error

    def _settle(self) -> None:
        """Wait until the file itself has all lines that are kept."""
        self._put([])
        self._tail, self._appended = [], 0

    def flush(self) -> None:
        """What is not in the outbox never left and is not written down."""
        if self._tail and self._appended == len(self._tail):
            with self._whole():
                self._settle()

    def _close_witness(self, witness: Witness) -> None:
        """It was told of all that the file is sure to have, and must not hear of more."""
        witness.close()

    def _whole_lines(self, data: bytes, mark: Mark | None) -> bytes:
        """Up to where a power cut has left holes in lines that were not waited for: if their messages left, the outbox has them."""
        seal, end = "", 0
        for number, line in enumerate(data.split(b"\n")[:-1], start=1):
            try:
                _, seal = unsealed(self.path, line, number, seal)
            except RunError:
                if mark is None or number <= mark.lines:
                    raise
                break
            end += len(line) + 1
        return data[:end]

    def _cut(self, whole: int, size: int) -> None:
        if whole < size:
            log.info(
                "ledger %s: last lines that are not whole cut off; the outbox decides whether they count",
                self.path,
            )
            os.truncate(self.path, whole)

    def recover(self, first: int, lines: list[str]) -> None:
        """Put lines into the file that the outbox has and the file lacks, and wait until it is sure to have them all: the outbox
        that is written next has only later ones. RunError: file and outbox are not of the same run or time."""
        have, last = self.mark.lines, first + len(lines) - 1
        if not first - 1 <= have <= last:
            raise RunError(
                f"ledger {self.path} has {have} lines and the outbox knows lines {first} to {last}: one of "
                "them was replaced by an older "
                "copy or damaged, so what was spent is not known; restore both, or leave this run"
            )
        with self._whole():
            missing = self._add_missing(first, lines)
            if lines and f'"crc":"{self.mark.seal}"' not in lines[-1]:
                raise RunError(
                    f"ledger {self.path} and the outbox beside it are of different runs: restore both"
                )
            self._put(missing)

    def _add_missing(self, first: int, lines: list[str]) -> list[bytes]:
        """Count the lines that the outbox has and the file lacks, and name them."""
        have = self.mark.lines
        missing = [line.encode() for line in lines[have - first + 1 :]]
        for number, line in enumerate(missing, start=have + 1):
            record = self._unsealed(line.rstrip(b"\n"), number)
            self._count(believed(self.path, number, record, self.rows))
        return missing

    @classmethod
    def read_with_outbox(cls, path: Path) -> Self | None:
        """A look at a member's ledger with the lines that only its outbox has: after a power cut, or while it runs.

        None where the outbox is gone and they may be gone with it.
        """
        found = Outbox(path.parent / OUTBOX).read()  # first: what it does not know yet, the file has
        if found is None:
            return None
        ledger = cls.read(path, whole=False)
        first, lines = found[1]["ledger"]
        if ledger.mark.lines < first - 1:
            return None
        ledger._add_missing(first, lines)
        return ledger


def read_whole(path: Path) -> LedgerFile | None:
    """A look at the ledger of any run, with all its lines; None where some of them may be gone."""
    if "federation" in LedgerFile.read_header(path):
        return OutboxLedger.read_with_outbox(path)
    try:
        return LedgerFile.read(path) if witness_of(path).exists() else None
    except RunError:  # damaged, or an older copy
        return None
