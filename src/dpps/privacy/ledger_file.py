"""What was spent, on disk before it is sent, because a message cannot be taken back.

The ledger has one JSON object per line. The first line says which run this is and what was promised; every later one charges a
message. Each line ends with a checksum over itself and the checksum before it, so an edited, lost or exchanged line breaks the
chain from there on. One writer at a time: the file is locked until it is closed or its process ends.

An older copy of a ledger looks whole by itself. So a second file beside it, the witness, says how far the ledger once went.
It has two places that are overwritten in turn, so that a write cut off by a crash leaves the other place intact. Each record
says how many lines the ledger has, the checksum of the last one, and how many messages the ledger of every other process must
have, because they arrived here. It is written after the line it speaks of is on disk and before the message leaves: so it never
claims a line that the ledger does not have, and after a crash it lags by one line at most. What arrived from the others is
written with the next record, one round later.

Checkpoints and, in a distributed run, the other processes are witnesses, too. What remains undetectable: ledger and witness
put back *together*, from one backup of the machine, in a run of a single process, which has nobody else to ask.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Self

from dpps.disk import close_alone, open_alone, private, sync_folder, write_private
from dpps.errors import RunError, UsageError
from dpps.privacy.ledger import Budget, Ledger, Release

log = logging.getLogger(__name__)

FORMAT = {"format": "dpps-ledger", "version": 3}

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
        return f"{body} {_checksum(body)}".ljust(size - 1).encode() + b"\n"


class Witness:
    """How far one ledger went: `mark` is what was recorded last.

    `received` counts, by rank, the messages that arrived here, which the ledger of that process must have.
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
        """Continue the one that is there. RunError: there is none, or it is damaged."""
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


class LedgerFile(Ledger):
    """Append-only file of releases; begin one with :meth:`create`, go on with one by :meth:`open`."""

    def __init__(
        self, path: Path, header: Mapping[str, Any], durable: bool, budget: Budget | None = None
    ) -> None:
        super().__init__(header["rows"], budget)
        self.path = path
        self.header = dict(header)
        self._durable = durable
        self.first_seal = ""
        """Checksum of the first line: with a random number in it, no other run has the same."""
        self._file = -1
        self._seal = ""
        self._pending: list[bytes] = []
        self._lines = 0
        self._witness: Witness | None = None
        self._broken = False

    @classmethod
    def create(
        cls,
        path: str | Path,
        header: Mapping[str, Any],
        durable: bool,
        *,
        budget: Budget | None = None,
        processes: int = 1,
    ) -> Self:
        """A new ledger and its witness; refuses a path where something was ever charged.

        Args:
            path: the file.
            header: run id, unit, mechanism, configuration hash, ``rows`` (list of node ids): what tells this
                run from another.
            durable: each charge is on disk when `charge` returns; otherwise (simulation) after `flush`.
            budget: charges beyond it are refused.
            processes: how many processes the run has; the witness remembers what was received from each.
        """
        ledger = cls(Path(path), _complete(header), durable, budget)
        _refuse_used(ledger.path)
        try:
            ledger._file = open_alone(ledger.path, os.O_CREAT)
            _refuse_used(ledger.path)  # now that nobody else can write it
            os.ftruncate(ledger._file, 0)
            ledger._put([ledger._sealed(ledger.header)])
            sync_folder(ledger.path.parent)
            ledger._witness = Witness.create(witness_of(ledger.path), ledger.mark, processes)
        except OSError as error:
            ledger._abandon()
            raise RunError(f"ledger {path} cannot be created: {error.strerror}; nothing was sent") from error
        except BaseException:
            ledger._abandon()
            raise
        return ledger

    @classmethod
    def open(
        cls, path: str | Path, header: Mapping[str, Any], durable: bool, *, budget: Budget | None = None
    ) -> Self:
        """Continue the ledger of the same run; all that it holds stays charged. Arguments as in `create`.

        Raises:
            RunError: it is missing, damaged, or not what the witness has seen; or somebody else writes it.
        """
        ledger = cls(Path(path), _complete(header), durable, budget)
        try:
            ledger._file = open_alone(ledger.path)
            data = ledger.path.read_bytes()
        except OSError as error:
            ledger._abandon()
            raise _unreadable(path, error) from error
        try:
            ledger._witness = Witness.open(witness_of(ledger.path))
            whole = ledger._whole_lines(data, ledger._witness.mark)
            ledger._replay(whole, ledger._witness.mark)
            ledger._cut(len(whole), len(data))
        except BaseException:
            ledger._abandon()
            raise
        return ledger

    @classmethod
    def read(cls, path: Path, *, whole: bool = True) -> Self:
        """Read a ledger that another process may be writing: nothing is locked, and nothing can be charged.

        RunError: it is missing, damaged, or an older copy, as far as there is a witness. With `whole` False it may lack lines
        that its witness has seen, because they are kept elsewhere.
        """
        ledger = cls(path, cls.read_header(path), durable=False)
        ledger._broken = True  # nothing can be written
        mark = newest_mark(path)  # first: whoever writes tells the witness last
        ledger._replay(ledger._whole_lines(path.read_bytes(), mark), mark if whole else None)
        return ledger

    @staticmethod
    def read_header(path: Path) -> dict[str, Any]:
        """The first line of a ledger, checked: which run it is, and what was promised."""
        return _first_line(path)[0]

    @staticmethod
    def read_first_seal(path: Path) -> str:
        """`first_seal` of the ledger in a file."""
        return _first_line(path)[1]

    @property
    def mark(self) -> Mark:
        """How far it goes, lines not yet flushed included."""
        return Mark(self._lines, self._seal)

    @property
    def received(self) -> list[int]:
        """By rank, how many messages the ledger of that process must have; what is set here is written with the next charge."""
        assert self._witness is not None
        return self._witness.received

    @property
    def place(self) -> str:
        return str(self.path)

    def check_holds(self, mark: Mark, witness: str) -> None:
        """Refuse (RunError) to go on unless this ledger has all that `witness` has seen."""
        with self.path.open("rb") as file:
            line = next(islice(file, mark.lines - 1, None), b"")
        if not line.endswith(f'"crc":"{mark.seal}"}}\n'.encode()):
            raise RunError(
                f"ledger {self.path} has {self._lines} lines and {witness} has seen {'another' if line else 'a'} line "
                f"{mark.lines}: it was replaced by an older copy or another, so what was spent is not known; restore it, or "
                "start a new run in another folder"
            )

    def _write(self, release: Release) -> None:
        with self._whole():
            line = self._sealed(release.to_json())
            if self._durable:
                self._put([line])
            else:
                self._pending.append(line)

    def flush(self) -> None:
        """Put everything on disk; call it before a checkpoint is written."""
        if self._pending:
            with self._whole():
                self._put(self._pending)
                self._pending = []

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """What is within happens completely. After a failure or Ctrl-C in between, the checksum in memory may be that of a line
        that is not in the file: nothing more is written, the witness is told nothing, and the next start reads the file."""
        if self._broken:
            raise RunError(f"ledger {self.path} failed before: no further message may be sent")
        self._broken = True
        yield
        self._broken = False

    def close(self) -> None:
        """Flush and let go of the file."""
        if self._file >= 0:
            if not self._broken:
                self.flush()
            if self._witness is not None:
                self._close_witness(self._witness)
            close_alone(self._file)
            self._file = -1

    def _abandon(self) -> None:
        """Close without telling the witness: what this ledger holds cannot be believed."""
        self._broken = True
        self.close()

    def _close_witness(self, witness: Witness) -> None:
        """What arrived in the last round is not on disk yet."""
        if not self._broken:
            self._remember(witness)
        witness.close()

    def _sealed(self, record: Mapping[str, Any]) -> bytes:
        body = json.dumps(record, separators=(",", ":"), allow_nan=False)
        self._seal = _checksum(f"{self._seal}\n{body}")
        self._next_line()
        return f'{body[:-1]},"crc":"{self._seal}"}}\n'.encode()

    def _put(self, lines: list[bytes]) -> None:
        """Append and wait for the disk, then tell the witness."""
        data = b"".join(lines)
        try:
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)
        except OSError as error:
            raise RunError(
                f"ledger {self.path} cannot be written: {error.strerror}; the message was not sent"
            ) from error
        if self._witness is not None:
            self._remember(self._witness)

    def _remember(self, witness: Witness) -> None:
        try:
            witness.record(self.mark)
        except OSError as error:
            raise RunError(
                f"{witness.path} cannot be written: {error.strerror}; the message was not sent"
            ) from error

    def _whole_lines(self, data: bytes, mark: Mark | None) -> bytes:
        """The lines of a file that are to be read, each with its end; `mark`: how far the witness knows it to have gone."""
        return data[: data.rfind(b"\n") + 1]

    def _replay(self, whole: bytes, mark: Mark | None) -> None:
        """Check every line and count it; all lines up to `mark` must be there."""
        if not whole and mark is not None and mark.lines == 1:
            raise _unbegun(self.path)
        for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
            record = self._unsealed(line, number)
            if number == 1:
                _same_run(self.path, record, self.header)
            else:
                self._count(believed(self.path, number, record, self.rows))
        if mark is not None:
            self.check_holds(mark, "its witness")

    def _cut(self, whole: int, size: int) -> None:
        """A half-written last line goes: its fsync never returned, so its message never left."""
        if whole < size:
            log.warning("ledger %s: half-written last line cut off; its message was never sent", self.path)
            os.truncate(self.path, whole)
            os.fsync(self._file)

    def _unsealed(self, line: bytes, number: int) -> dict[str, Any]:
        record, self._seal = unsealed(self.path, line, number, self._seal)
        self._next_line()
        return record

    def _next_line(self) -> None:
        self._lines += 1
        if self._lines == 1:
            self.first_seal = self._seal


def _first_line(path: Path) -> tuple[dict[str, Any], str]:
    """What the first line says, and its checksum."""
    try:
        with path.open("rb") as file:
            line = file.readline()
    except OSError as error:
        raise _unreadable(path, error) from error
    if not line.endswith(b"\n"):
        raise _unbegun(path)
    return unsealed(path, line[:-1], 1, "")


def unsealed(path: Path, line: bytes, number: int, previous: str) -> tuple[dict[str, Any], str]:
    """What a line says, and its checksum, which must follow from that of the line before."""
    body, mark, seal = line.rpartition(b',"crc":"')
    text = body.decode(errors="replace") + "}"
    expected = _checksum(f"{previous}\n{text}")
    if not mark or seal != f'{expected}"}}'.encode():
        raise _damaged(path, number)
    record = json.loads(text)
    if not isinstance(record, dict):
        raise _damaged(path, number)
    return record, expected


def _complete(header: Mapping[str, Any]) -> dict[str, Any]:
    """The header as it will be read back."""
    if not header.get("rows"):
        raise UsageError("ledger header without rows: name the nodes whose messages are charged")
    normal: dict[str, Any] = json.loads(json.dumps({**FORMAT, **header}, allow_nan=False))
    return normal


def believed(path: Path, number: int, record: Mapping[str, Any], rows: Sequence[int]) -> Release:
    """The release that a line tells of; refused where it cannot be one."""
    try:
        return Release.from_json(record, rows)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, number) from error


def _refuse_used(path: Path) -> None:
    if not unused(path):
        raise UsageError(
            f"ledger {path} is never started afresh: resume that run or choose another directory"
        )


def _same_run(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for field in [*wanted, *(name for name in found if name not in wanted)]:
        if found.get(field) != wanted.get(field):
            raise UsageError(
                f"ledger {path} belongs to another run: its {field} is {found.get(field)!r}, this run's is "
                f"{wanted.get(field)!r}; resume with the same settings or choose another directory"
            )


def _unreadable(path: str | Path, error: OSError) -> RunError:
    return RunError(
        f"ledger {path} cannot be opened: {error.strerror}; what was spent is not known, so the run cannot go on; "
        "restore it, or start a new run in another folder"
    )


def _unbegun(path: Path) -> RunError:
    return RunError(f"ledger {path} has no complete first line: nothing was sent; move it away and restart")


def _damaged(path: Path, number: int) -> RunError:
    return RunError(
        f"ledger {path} is damaged at line {number}: what was sent is no longer known; "
        "restore the file from a copy, or end this run and count it as unprotected"
    )


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
    """How far the witness of a ledger has seen it go; None: there is no witness. RunError: it is damaged."""
    witness = witness_of(path)
    return _read(witness)[0].mark if witness.exists() else None


def _read(path: Path) -> tuple[_Record, int]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunError(
            f"{path} cannot be read: {error.strerror}; without it nobody knows whether the ledger beside it is the newest, so "
            "what was spent is not known; restore it, or start a new run in another folder"
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


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
