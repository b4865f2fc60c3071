"""A second witness beside the ledger: how far it once went, because an older copy of it looks whole by itself.

The witness is a small file of two places that are overwritten in turn, so that a write cut off by a crash leaves the
other place intact. Each record says how many lines the ledger has, the checksum of the last one, and how many messages the
ledger of every other process must have, because they arrived here. It is written after the line it speaks of
is on disk and before the message leaves: so it never claims a line that the ledger does not have,
and after a crash it lags by one line at most. What arrived from the others is written with the next record, one round later.

What it cannot tell: ledger and witness that were put back *together*, from one backup of the machine. For that there
are the other processes, whose witnesses know which messages they have received; a run in a single process has nobody else to ask.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from dpps.disk import private, write_private
from dpps.errors import RunError

_SECTOR = 512
_PEERS_PER_SECTOR = 32  # numbers below a million million, with their commas


@dataclass(frozen=True)
class Mark:
    """How far a ledger goes: so many lines, the header included, and the checksum of the last."""

    lines: int
    seal: str


@dataclass(frozen=True)
class _Record:
    turn: int
    mark: Mark
    received: tuple[int, ...]

    def encoded(self, size: int) -> bytes:
        body = json.dumps([self.turn, self.mark.lines, self.mark.seal, list(self.received)])
        text = f"{body} {_checksum(body)}"
        return text.ljust(size - 1).encode() + b"\n"


class Witness:
    """Of one ledger; made by :meth:`create`, read and continued by :meth:`open`.

    Attributes:
        mark: what was recorded last.
        received: by rank, how many messages the ledger of that process must have, because they arrived here.
    """

    def __init__(self, path: Path, record: _Record, size: int) -> None:
        self.path = path
        self.mark = record.mark
        self.received = list(record.received)
        self._turn, self._size = record.turn, size
        self._file = private(path, os.O_WRONLY)

    @classmethod
    def create(cls, path: Path, mark: Mark, processes: int) -> "Witness":
        """A new one, for a run of so many processes."""
        size = _SECTOR * (1 + -(-processes // _PEERS_PER_SECTOR))
        record = _Record(0, mark, (0,) * processes)
        write_private(path, 2 * record.encoded(size))
        return cls(path, record, size)

    @classmethod
    def open(cls, path: Path) -> "Witness":
        """Continue the one that is there.

        Raises:
            RunError: there is none, or it is damaged.
        """
        record, size = _read(path)
        return cls(path, record, size)

    def record(self, mark: Mark) -> None:
        """Put `mark` and what was received on disk."""
        self._turn += 1
        data = _Record(self._turn, mark, tuple(self.received)).encoded(self._size)
        written = os.pwrite(self._file, data, self._turn % 2 * self._size)
        if written != len(data):
            raise OSError(0, f"only {written} of {len(data)} bytes were written")
        os.fsync(self._file)
        self.mark = mark

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)


def witness_of(path: Path) -> Path:
    """Where the witness of a ledger is."""
    return path.with_name(f"{path.name}.witness")


def unused(path: Path) -> bool:
    """Whether nothing was ever charged here: there is no ledger, or one that was begun and no more, and no witness of more."""
    mark = newest_mark(path)
    if mark is not None and mark.lines > 1:
        return False
    content = path.read_bytes() if path.exists() else b""
    begun = b'{"format":"dpps-ledger"'
    return content.count(b"\n") <= 1 and content[: len(begun)] == begun[: len(content)]


def newest_mark(path: Path) -> Mark | None:
    """How far the witness of a ledger knows it to have gone; None: there is no witness.

    Raises:
        RunError: it is damaged.
    """
    witness = witness_of(path)
    return _read(witness)[0].mark if witness.exists() else None


def _read(path: Path) -> tuple[_Record, int]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunError(
            f"{path} cannot be read: {error.strerror}; without it nobody knows whether the ledger beside it "
            "is the newest, so what was "
            "spent is not known; restore it, or start a new run in another folder"
        ) from error
    size = len(data) // 2
    found = [record for half in (data[:size], data[size:]) if (record := _decoded(half)) is not None]
    if not found:
        raise RunError(
            f"{path} is damaged, so nobody knows whether the ledger beside it is the newest, and what was spent is not known; "
            "restore it, or start a new run in another folder"
        )
    return max(found, key=lambda record: record.turn), size


def _decoded(data: bytes) -> _Record | None:
    """None for a place whose write was cut off."""
    body, _, seal = data.decode(errors="replace").rstrip().rpartition(" ")
    if seal != _checksum(body):
        return None
    turn, lines, last, received = json.loads(body)
    return _Record(turn, Mark(lines, last), tuple(received))


def _checksum(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:32]
