"""What was spent: every release of a run and its cost. Totals are computed from the ledger, never from a plan.

`Ledger` keeps the releases in memory. `LedgerFile` also has each one on disk before it is sent, because a message cannot be
taken back. A protocol always has one of the two, and nothing leaves a node without being charged.

The file has one JSON object per line. The first line says which run this is and what was promised; every later one charges a
message. Each line ends with a checksum over itself and the checksum before it, so an edited, lost or exchanged line breaks the
chain from there on. One writer at a time: the file is locked until it is closed or its process ends.

An older copy of a ledger looks whole by itself. So a second file beside it, the witness, says how far the ledger once went:
its number of lines, the checksum of the last one, and how many messages the ledger of every other process must have, because
they arrived here. It has two places that are overwritten in turn, so that a write cut off by a crash leaves the other intact.
It is written after the line it speaks of is on disk and before the message leaves: so it never claims a line that the ledger
does not have, and after a crash it lags by one line at most. What arrived from the others is written one round later.

Checkpoints and, in a distributed run, the other processes are witnesses, too. What remains undetectable: ledger and witness
put back *together*, from one backup of the machine, in a run of a single process, which has nobody else to ask.
"""

import hashlib
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from dpps.disk import close_alone, open_alone, private, sync_folder, write_private
from dpps.errors import RunError, UsageError
from dpps.noise.events import Event
from dpps.privacy.accountant import Charge, Total, total

log = logging.getLogger(__name__)

FORMAT = {"format": "dpps-ledger", "version": 3}

_ROUNDING = 1e-9  # a sum of rounds may miss the total it was divided from in its last digits

Rows = tuple[int, ...] | Literal["all"]
Found = TypeVar("Found")

_UNREADABLE = (
    "what was spent is not known, so the run cannot go on; restore it, or start a new run in another folder"
)
_SECTOR = 512
_PEERS_PER_SECTOR = 32  # numbers below a million million, with their commas


@dataclass(frozen=True)
class Release:
    """The messages of some rows (nodes) in one round: the cost of each, sampling included; the name of the noise, for readers;
    and S(t), in the norm of the mechanism."""

    round: int
    event: Event
    mechanism: str
    sensitivity: float
    scale: float
    rows: Rows = "all"

    def check(self, rows: Sequence[int]) -> None:
        """Refuse what no accountant can take, and rows that are not the ledger's."""
        known = self.rows == "all" or (self.rows and set(self.rows) <= set(rows))
        if not known or self.round < 0:
            raise UsageError(f"cannot charge {self}: rows must be among {list(rows)}, round >= 0")
        if not (self.sensitivity >= 0 and self.scale >= 0):
            raise UsageError(f"cannot charge {self}: sensitivity and scale must be numbers >= 0")
        if not self.event.well_formed:
            raise UsageError(f"cannot charge {self}: its event has a parameter that is not a number >= 0")

    def to_json(self) -> dict[str, Any]:
        """As a line of the ledger. `epsilon` is the pure epsilon of one message, for readers; None if there is none."""
        epsilon = self.event.pure_epsilon
        return {
            "round": self.round,
            "rows": self.rows if self.rows == "all" else list(self.rows),
            "mechanism": self.mechanism,
            "sensitivity": _number(self.sensitivity),
            "scale": _number(self.scale),
            "epsilon": None if epsilon is None else _number(epsilon),
            "event": self.event.to_json(),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any], rows: Sequence[int]) -> "Release":
        """What a line says; ValueError, KeyError or TypeError when it says nothing sensible."""
        release = cls(
            round=int(record["round"]),
            event=Event.from_json(record["event"]),
            mechanism=str(record["mechanism"]),
            sensitivity=float(record["sensitivity"]),
            scale=float(record["scale"]),
            rows="all" if record["rows"] == "all" else tuple(int(row) for row in record["rows"]),
        )
        release.check(rows)
        return release


@dataclass(frozen=True)
class Budget:
    """The largest total that may be charged to any node, replays included. `group`: records per person. `planned`: rounds that
    the epsilon was solved for; the accountant, which is slow, is asked for all of them in one go."""

    epsilon: float
    delta: float = 0.0
    group: int = 1
    planned: int = 0

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise UsageError(f"budget of epsilon {self.epsilon}: it must be positive")


class Ledger:
    """A ledger in memory, of the messages of the given rows (nodes), within a budget if one is given."""

    def __init__(self, rows: Sequence[int], budget: Budget | None = None) -> None:
        if not rows:
            raise UsageError("a ledger without rows: name the nodes whose messages are charged")
        self.rows, self._budget = [int(row) for row in rows], budget
        self._releases: list[tuple[int, Rows, Charge]] = []
        self._charges: dict[Event, Charge] = {}  # equal ones are one object: a long run has thousands
        self.mechanism = "none"
        """The name of the noise that was charged last."""
        self._kinds: Counter[tuple[Rows, Charge]] = Counter()
        self._sent: Counter[int] = Counter()
        self._cleared: dict[Release, int] = {}

    def charge(self, release: Release) -> None:
        """Record the cost of a message, which may be sent only after this returns. RunError: it exceeds the budget, and nothing
        is charged."""
        release.check(self.rows)
        if (budget := self._budget) and not self._cleared_for(release, budget):
            raise RunError(
                f"round {release.round} refused before sending: epsilon {budget.epsilon} at delta {budget.delta} was "
                f"budgeted and {self._most_rounds(release.rows)} rounds have used it up (replays after a restart count); "
                f"all that was sent is in {self.place}"
            )
        self._write(release)
        self._count(release)

    def _write(self, release: Release) -> None:
        """Make it as safe as this ledger promises; memory needs nothing more."""

    @property
    def history(self) -> list[tuple[int, Charge]]:
        """(round, what it cost) of every release; rounds repeated after a crash are there twice and count twice."""
        return [(round_, charge) for round_, _, charge in self._releases]

    def history_of(self, row: int) -> list[tuple[int, Charge]]:
        """The same for one node: nodes that draw at different rates are charged separately in every round."""
        return [(round_, charge) for round_, rows, charge in self._releases if row in self._named(rows)]

    @property
    def messages(self) -> int:
        """The largest number of messages charged to one node."""
        return self._most_rounds("all")

    @property
    def place(self) -> str:
        """Where the ledger is, for error messages."""
        return "the ledger in memory"

    def flush(self) -> None:
        """Write everything to disk, if the ledger has a file. Called before a checkpoint is written."""

    def close(self) -> None:
        """No more is charged."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def charges_by_row(self) -> dict[int, list[Charge]]:
        """What each node sent. Nodes compose in parallel, so the total is the maximum over nodes."""
        sums: dict[int, Counter[Charge]] = {row: Counter() for row in self.rows}
        for (rows, kind), count in self._kinds.items():
            for row in self._named(rows):
                sums[row][kind] += count
        return {row: [replace(kind, count=n) for kind, n in kinds.items()] for row, kinds in sums.items()}

    def by_row(self, cost: Callable[[Sequence[Charge]], Found], rows: Rows = "all") -> dict[int, Found]:
        """What `cost` says of each node's charges, asked once for nodes with equal ones, because accountants are slow."""
        charges, once = self.charges_by_row(), cache(cost)
        return {row: once(tuple(charges[row])) for row in self._named(rows)}

    def total(self, delta: float, group: int = 1, *, distance: float = 0.0) -> Total:
        """The largest cost of a node; arguments as in :func:`dpps.privacy.accountant.total`."""
        found = self.by_row(lambda charges: total(charges, delta, group, distance=distance))
        return max(found.values(), key=lambda each: each.epsilon)

    def _named(self, rows: Rows) -> list[int]:
        return self.rows if rows == "all" else list(rows)

    def _most_rounds(self, rows: Rows) -> int:
        return max(self._sent[row] for row in self._named(rows))

    def affords(self, charges: Sequence[Charge]) -> bool:
        """Whether the budget allows these further charges for every node."""
        if self._budget is None or not sum(charge.count for charge in charges):
            return True
        return self._within("all", charges, self._budget)

    def _cleared_for(self, release: Release, budget: Budget) -> bool:
        """Whether the epsilon budget allows it. Looks ahead: accountants are slow."""
        kind = replace(release, round=0)
        rows = set(self._named(release.rows))
        # Another kind of charge to the same node makes an earlier look ahead worthless.
        self._cleared = {
            k: n for k, n in self._cleared.items() if k == kind or rows.isdisjoint(self._named(k.rows))
        }
        left = self._cleared.pop(kind, 0)
        if not left:
            ahead = (budget.planned - self._most_rounds(release.rows), 4096, 512, 64, 8, 1)
            charges = ((n, [Charge(release.event, n)]) for n in ahead if n >= 1)
            left = next((n for n, more in charges if self._within(release.rows, more, budget)), 0)
        if left:
            self._cleared[kind] = left - 1
        return left > 0

    def _within(self, rows: Rows, charges: Sequence[Charge], budget: Budget) -> bool:
        """Whether the budget has room for these charges to these rows."""
        found = self.by_row(lambda c: total([*c, *charges], budget.delta, budget.group).epsilon, rows)
        return max(found.values()) <= budget.epsilon * (1 + _ROUNDING)

    def _count(self, release: Release) -> None:
        charge = self._charges.setdefault(release.event, Charge(release.event))
        self._releases.append((release.round, release.rows, charge))
        self.mechanism = release.mechanism
        self._kinds[release.rows, charge] += 1
        for row in self._named(release.rows):
            self._sent[row] += 1


def _number(value: float) -> float | str:
    """JSON has no infinity."""
    return float(value) if math.isfinite(value) else str(float(value))


# On disk


@dataclass(frozen=True)
class Mark:
    """How far a ledger goes: so many lines, the header included, and the checksum of the last."""

    lines: int
    seal: str


class Witness:
    """How far one ledger went: `mark` is what was recorded last.

    `received` counts, by rank, the messages that arrived here, which the ledger of that process must have.
    """

    def __init__(self, path: Path, turn: int, mark: Mark, received: list[int], size: int) -> None:
        self.path, self.mark, self.received = path, mark, received
        self._turn, self._size = turn, size
        self._file = private(path, os.O_WRONLY)

    @classmethod
    def create(cls, path: Path, mark: Mark, processes: int) -> "Witness":
        """A new one, for a run of so many processes."""
        size = _SECTOR * (1 + -(-processes // _PEERS_PER_SECTOR))
        write_private(path, 2 * _encoded(0, mark, [0] * processes, size))
        return cls(path, 0, mark, [0] * processes, size)

    @classmethod
    def open(cls, path: Path) -> "Witness":
        """Continue the one that is there. RunError: there is none, or it is damaged."""
        return cls(path, *_read(path))

    def record(self, mark: Mark) -> None:
        """Put `mark` and what was received on disk."""
        self._turn += 1
        data = _encoded(self._turn, mark, self.received, self._size)
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
        super().__init__(header.get("rows", ()), budget)
        self.path, self._durable = path, durable
        self.header: dict[str, Any] = json.loads(json.dumps({**FORMAT, **header}, allow_nan=False))
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
            header: what tells this run from another: run id, unit, mechanism, configuration hash, ``rows`` (node ids).
            durable: each charge is on disk when `charge` returns; otherwise (simulation) after `flush`.
            budget: charges beyond it are refused.
            processes: how many processes the run has; the witness remembers what was received from each.
        """
        ledger = cls(Path(path), header, durable, budget)
        _refuse_used(ledger.path)
        with ledger._or_abandoned("created", "nothing was sent"):
            ledger._file = open_alone(ledger.path, os.O_CREAT)
            _refuse_used(ledger.path)  # now that nobody else can write it
            os.ftruncate(ledger._file, 0)
            ledger._put([ledger._sealed(ledger.header)])
            sync_folder(ledger.path.parent)
            ledger._witness = Witness.create(witness_of(ledger.path), ledger.mark, processes)
        return ledger

    @classmethod
    def open(
        cls, path: str | Path, header: Mapping[str, Any], durable: bool, *, budget: Budget | None = None
    ) -> Self:
        """Continue the ledger of the same run; all that it holds stays charged. Arguments as in `create`.

        Raises:
            RunError: it is missing, damaged, or not what the witness has seen; or somebody else writes it.
        """
        ledger = cls(Path(path), header, durable, budget)
        with ledger._or_abandoned("opened", _UNREADABLE):
            ledger._file = open_alone(ledger.path)
            data = ledger.path.read_bytes()
            ledger._witness = Witness.open(witness_of(ledger.path))
            whole = ledger._whole_lines(data, ledger._witness.mark)
            ledger._replay(whole, ledger._witness.mark)
            ledger._cut(len(whole), len(data))
        return ledger

    @classmethod
    def read(cls, path: Path, *, whole: bool = True) -> Self:
        """Read a ledger that another process may be writing: nothing is locked, and nothing can be charged.

        RunError: it is missing, damaged, or an older copy, as far as there is a witness. With `whole` False it may lack
        lines that its witness has seen, because they are kept elsewhere.
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
        """By rank, how many messages that process's ledger must have; what is set here is written with the next charge."""
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
        """What is within happens completely. After a failure or Ctrl-C in between, the checksum in memory may be that of a
        line that is not in the file: nothing more is written, the witness learns nothing, and the next start reads the file."""
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

    @contextmanager
    def _or_abandoned(self, done: str, remedy: str) -> Iterator[None]:
        """The ledger is created or opened, or nobody can write it."""
        try:
            yield
        except BaseException as error:
            self._abandon()
            if isinstance(error, OSError):
                raise RunError(f"ledger {self.path} cannot be {done}: {error.strerror}; {remedy}") from error
            raise

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
        self._go_on(_checksum(f"{self._seal}\n{body}"))
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
            if number > 1:
                self._count(believed(self.path, number, record, self.rows))
                continue
            for field in [*self.header, *record]:
                if (found := record.get(field)) != (wanted := self.header.get(field)):
                    raise UsageError(
                        f"ledger {self.path} belongs to another run: its {field} is {found!r}, this run's is {wanted!r}; "
                        "resume with the same settings or choose another directory"
                    )
        if mark is not None:
            self.check_holds(mark, "its witness")

    def _cut(self, whole: int, size: int) -> None:
        """A half-written last line goes: its fsync never returned, so its message never left."""
        if whole < size:
            log.warning("ledger %s: half-written last line cut off; its message was never sent", self.path)
            os.truncate(self.path, whole)
            os.fsync(self._file)

    def _unsealed(self, line: bytes, number: int) -> dict[str, Any]:
        record, seal = unsealed(self.path, line, number, self._seal)
        self._go_on(seal)
        return record

    def _go_on(self, seal: str) -> None:
        self._lines, self._seal, self.first_seal = self._lines + 1, seal, self.first_seal or seal


def _first_line(path: Path) -> tuple[dict[str, Any], str]:
    """What the first line says, and its checksum."""
    try:
        with path.open("rb") as file:
            line = file.readline()
    except OSError as error:
        raise RunError(f"ledger {path} cannot be opened: {error.strerror}; {_UNREADABLE}") from error
    if not line.endswith(b"\n"):
        raise _unbegun(path)
    header, seal = unsealed(path, line[:-1], 1, "")
    if (found := header.get("version")) != FORMAT["version"]:
        raise RunError(f"ledger {path} has format {found}: use the version of dpps that wrote it")
    return header, seal


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
    return _read(witness)[1] if witness.exists() else None


def _encoded(turn: int, mark: Mark, received: list[int], size: int) -> bytes:
    """A record of the witness, as one of its two places of this size holds it."""
    body = json.dumps([turn, mark.lines, mark.seal, received])
    return f"{body} {_checksum(body)}".ljust(size - 1).encode() + b"\n"


def _read(path: Path) -> tuple[int, Mark, list[int], int]:
    """The newer record of a witness, and the size of its places."""
    remedy = "restore it, or start a new run in another folder"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunError(
            f"{path} cannot be read: {error.strerror}; without it nobody knows whether the ledger beside it is the newest, so "
            f"what was spent is not known; {remedy}"
        ) from error
    size, found = len(data) // 2, []
    for half in (data[:size], data[size:]):
        body, _, seal = half.decode(errors="replace").rstrip().rpartition(" ")
        if seal == _checksum(body):  # otherwise its write was cut off
            turn, lines, last, received = json.loads(body)
            found.append((turn, Mark(lines, last), received, size))
    if not found:
        raise RunError(
            f"{path} is damaged, so nobody knows whether the ledger beside it is the newest, and what was spent is not known; "
            f"{remedy}"
        )
    return max(found, key=lambda record: int(record[0]))


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
