"""The write-ahead ledger: what was sent is on disk before it is sent, because it cannot be taken back.

One JSON object per line. The first line says which run this is; every later one charges a message (or a
reservation of several). Each line ends with a checksum over itself and the checksum before it, so an edited,
lost or exchanged line breaks the chain from there on. Totals are computed from these lines, never from a
plan.
"""

import hashlib
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dpps.disk import sync_folder
from dpps.errors import RunError, UsageError
from dpps.privacy.accountant import Charge, Mechanism, Total, total

log = logging.getLogger(__name__)

FORMAT = {"format": "dpps-ledger", "version": 1}

Rows = tuple[int, ...] | Literal["all"]


@dataclass(frozen=True)
class Entry:
    """One message (or `reserved` consecutive ones) of the given rows.

    Attributes:
        round: the round t of the (first) message.
        rows: the nodes whose message it is, or ``all`` that the header names.
        mechanism: ``laplace``, ``gaussian`` or ``none``.
        sensitivity: S(t), in the norm of the mechanism.
        scale: scale of the noise in the message.
        epsilon: Laplace: the epsilon of one message; otherwise 0.
        noise_multiplier: Gaussian: scale / sensitivity; otherwise 0.
        sampling: Poisson rate q.
        reserved: how many rounds this line pays for.
    """

    round: int
    rows: Rows
    mechanism: Mechanism
    sensitivity: float
    scale: float
    epsilon: float = 0.0
    noise_multiplier: float = 0.0
    sampling: float = 1.0
    reserved: int = 1

    @property
    def charge(self) -> Charge:
        """What the accountant takes."""
        return Charge(self.mechanism, self.epsilon, self.noise_multiplier, self.sampling, self.reserved)


@dataclass(frozen=True)
class Budget:
    """The most that may be charged to any node: a number of rounds, a total epsilon at delta, or both.

    Attributes:
        rounds: messages of one node, replays and reservations included.
        epsilon: total by the accountant.
        delta: allowance of that total.
        group: records per person.
    """

    rounds: int | None = None
    epsilon: float | None = None
    delta: float = 0.0
    group: int = 1

    def __post_init__(self) -> None:
        if self.rounds is None and self.epsilon is None:
            raise UsageError("an empty budget: give rounds, or epsilon and delta")
        if (self.rounds is not None and self.rounds < 1) or (
            self.epsilon is not None and not self.epsilon > 0
        ):
            raise UsageError(f"budget of {self.rounds} rounds, epsilon {self.epsilon}: must be positive")


class Ledger:
    """Append-only record of charges; open one with :meth:`create` or :meth:`open`."""

    def __init__(self, path: Path, header: Mapping[str, Any], durable: bool) -> None:
        self.path = path
        self.header = dict(header)
        self._rows = [int(row) for row in header["rows"]]
        self._durable = durable
        self._file = -1
        self._seal = ""
        self._pending: list[bytes] = []
        self._kinds: Counter[tuple[Rows, Charge]] = Counter()
        self._rounds: Counter[int] = Counter()
        self._budget: Budget | None = None
        self._reserve = 1
        self._prepaid: dict[Entry, tuple[int, int]] = {}
        self._sent: Counter[int] = Counter()
        self._cleared: dict[Entry, int] = {}
        self._broken = False

    @classmethod
    def create(
        cls,
        path: str | Path,
        header: Mapping[str, Any],
        durable: bool,
        *,
        budget: Budget | None = None,
        reserve: int = 1,
    ) -> "Ledger":
        """A new ledger; refuses a path that exists.

        Args:
            path: the file.
            header: run id, unit, mechanism, configuration hash, ``rows`` (list of node ids): what tells this
                run from another.
            durable: each charge is on disk when `charge` returns; otherwise (simulation) after `flush`.
            budget: charges beyond it are refused.
            reserve: pay for this many rounds at a time; unused ones stay charged.
        """
        ledger = cls(Path(path), _complete(header), durable)
        ledger._limit(budget, reserve)
        try:
            ledger._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        except FileExistsError:
            raise UsageError(
                f"ledger {path} is never started afresh: resume that run or choose another directory"
            ) from None
        except OSError as error:
            raise RunError(f"ledger {path} cannot be created: {error.strerror}; nothing was sent") from error
        ledger._put([ledger._sealed(ledger.header)])
        sync_folder(ledger.path.parent)
        return ledger

    @classmethod
    def open(
        cls,
        path: str | Path,
        header: Mapping[str, Any],
        durable: bool,
        *,
        budget: Budget | None = None,
        reserve: int = 1,
    ) -> "Ledger":
        """Continue the ledger of the same run; all that it holds stays charged. Arguments as in `create`."""
        ledger = cls(Path(path), _complete(header), durable)
        ledger._limit(budget, reserve)
        try:
            data = ledger.path.read_bytes()
            ledger._file = os.open(path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            raise RunError(
                f"ledger {path} cannot be opened: {error.strerror}; a run cannot go on without its ledger"
            ) from error
        try:
            ledger._replay(data)
        except BaseException:
            ledger.close()
            raise
        return ledger

    def charge(self, entry: Entry) -> None:
        """Write a message down; only when this returns may the message leave.

        Raises:
            RunError: over budget (nothing was written), or the disk refused.
        """
        if self._broken:
            raise RunError(f"ledger {self.path} failed before: no further message may be sent")
        _check(entry, self._rows)
        if entry.reserved != 1:
            raise UsageError(f"cannot charge {entry.reserved} rounds at once: open the ledger with reserve=")
        if self._reserve == 1:
            self._append(entry)
            return
        kind = replace(entry, round=0)
        expected, left = self._prepaid.pop(kind, (entry.round, 0))
        if left == 0 or expected != entry.round:
            left = self._append(entry)
        if left > 1:
            self._prepaid[kind] = (entry.round + 1, left - 1)

    def _append(self, entry: Entry) -> int:
        """Pay for this round and the reservation that comes with it; how many rounds that is."""
        affordable = self._affordable(entry)
        paid = entry if affordable == 1 else replace(entry, reserved=affordable)
        line = self._sealed(_record(paid))
        if self._durable:
            self._put([line])
        else:
            self._pending.append(line)
        self._count(paid)
        return paid.reserved

    def flush(self) -> None:
        """Put everything on disk; call it before a checkpoint is written."""
        if self._pending:
            self._put(self._pending)
            self._pending = []

    def close(self) -> None:
        """Flush and let go of the file."""
        if self._file >= 0:
            if not self._broken:
                self.flush()
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def beyond(self, position: int) -> int:
        """Charged rounds that a state restored at round `position` lacks; re-running charges them again."""
        return sum(count for start, count in self._rounds.items() if start >= position)

    def covers(self, position: int) -> bool:
        """Whether every round before `position` has been charged."""
        return all(self._rounds[round_] > 0 for round_ in range(position))

    def charges(self) -> list[Charge]:
        """All lines, replays and reservations included, added up by kind and node set."""
        return [replace(kind, count=count) for (_, kind), count in self._kinds.items()]

    def charges_by_row(self) -> dict[int, list[Charge]]:
        """What each node sent. Nodes compose in parallel, so a total is the maximum over them."""
        sums: dict[int, Counter[Charge]] = {row: Counter() for row in self._rows}
        for (rows, kind), count in self._kinds.items():
            for row in self._named(rows):
                sums[row][kind] += count
        return {row: [replace(kind, count=n) for kind, n in kinds.items()] for row, kinds in sums.items()}

    def total(
        self, delta: float, group: int = 1, *, spent_delta: float = 0.0, distance: float = 0.0
    ) -> Total:
        """The cost of the node that paid most; arguments as in :func:`dpps.privacy.accountant.total`."""
        return _most(self.charges_by_row(), delta, group, spent_delta=spent_delta, distance=distance)

    def _limit(self, budget: Budget | None, reserve: int) -> None:
        if reserve < 1:
            raise UsageError(f"reserve {reserve} must be 1 round or more")
        self._budget, self._reserve = budget, reserve

    def _named(self, rows: Rows) -> list[int]:
        return self._rows if rows == "all" else list(rows)

    def _affordable(self, entry: Entry) -> int:
        """How many rounds of the reservation fit the budget; not even one: refused."""
        wanted = self._reserve
        if self._budget is None:
            return wanted
        used = self._most_rounds(entry.rows)
        if self._budget.rounds is not None:
            wanted = min(wanted, self._budget.rounds - used)
            if wanted < 1:
                raise self._refusal(
                    entry, f"{self._budget.rounds} rounds were budgeted and {used} are charged"
                )
        if self._budget.epsilon is not None and not self._cleared_for(entry, wanted):
            wanted = 1
            if not self._cleared_for(entry, wanted):
                promised = f"epsilon {self._budget.epsilon} at delta {self._budget.delta}"
                raise self._refusal(entry, f"{promised} was budgeted and {used} rounds have used it up")
        return wanted

    def _refusal(self, entry: Entry, reason: str) -> RunError:
        return RunError(
            f"round {entry.round} refused before sending: {reason} (replays after a restart count); "
            f"all that was sent is in {self.path}"
        )

    def _most_rounds(self, rows: Rows) -> int:
        return max(self._sent[row] for row in self._named(rows))

    def _cleared_for(self, entry: Entry, wanted: int) -> bool:
        """Whether the epsilon budget allows it. Looks ahead: accountants are slow."""
        kind = replace(entry, round=0)
        rows = set(self._named(entry.rows))
        # Another kind of charge to the same node makes an earlier look ahead worthless.
        self._cleared = {
            k: n for k, n in self._cleared.items() if k == kind or rows.isdisjoint(self._named(k.rows))
        }
        left = self._cleared.pop(kind, 0)
        if left < wanted:
            left = next((n for n in (4096, 512, 64, 8, wanted) if n >= wanted and self._within(entry, n)), 0)
        if left:
            self._cleared[kind] = left - wanted
        return left > 0

    def _within(self, entry: Entry, count: int) -> bool:
        assert self._budget is not None
        assert self._budget.epsilon is not None
        by_row = self.charges_by_row()
        extra = replace(entry, reserved=count).charge
        planned = {row: [*by_row[row], extra] for row in self._named(entry.rows)}
        return _most(planned, self._budget.delta, self._budget.group).epsilon <= self._budget.epsilon

    def _count(self, entry: Entry) -> None:
        one = entry.charge if entry.reserved == 1 else replace(entry.charge, count=1)
        self._kinds[entry.rows, one] += entry.reserved
        for row in self._named(entry.rows):
            self._sent[row] += entry.reserved
        for ahead in range(entry.reserved):
            self._rounds[entry.round + ahead] += 1

    def _sealed(self, record: Mapping[str, Any]) -> bytes:
        body = json.dumps(record, separators=(",", ":"), allow_nan=False)
        self._seal = _checksum(self._seal, body)
        return f'{body[:-1]},"crc":"{self._seal}"}}\n'.encode()

    def _put(self, lines: list[bytes]) -> None:
        """Append and wait for the disk. After a failure the tail is unknown: nothing more is written."""
        data = b"".join(lines)
        try:
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)
        except OSError as error:
            self._broken = True
            raise RunError(
                f"ledger {self.path} cannot be written: {error.strerror}; the message was not sent"
            ) from error

    def _replay(self, data: bytes) -> None:
        """Check every line and count it; cut off a half-written last one."""
        whole, newline, tail = data.rpartition(b"\n")
        if not newline:
            raise RunError(
                f"ledger {self.path} has no complete first line: nothing was sent; move it away and restart"
            )
        if tail:
            # Its fsync never returned, so its message never left.
            log.warning("ledger %s: half-written last line cut off; its message was never sent", self.path)
            os.truncate(self.path, len(whole) + 1)
            os.fsync(self._file)
        lines = whole.split(b"\n")
        _same_run(self.path, self._unsealed(lines[0], 1), self.header)
        for number, line in enumerate(lines[1:], start=2):
            self._count(_entry(self.path, number, self._unsealed(line, number), self._rows))

    def _unsealed(self, line: bytes, number: int) -> dict[str, Any]:
        body, mark, seal = line.rpartition(b',"crc":"')
        text = body.decode(errors="replace") + "}"
        expected = _checksum(self._seal, text)
        if not mark or seal != f'{expected}"}}'.encode():
            raise _damaged(self.path, number)
        self._seal = expected
        record = json.loads(text)
        if not isinstance(record, dict):
            raise _damaged(self.path, number)
        return record


def _complete(header: Mapping[str, Any]) -> dict[str, Any]:
    """The header as it will be read back."""
    if not header.get("rows"):
        raise UsageError("ledger header without rows: name the nodes whose messages are charged")
    normal: dict[str, Any] = json.loads(json.dumps({**FORMAT, **header}, allow_nan=False))
    return normal


def _same_run(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for field in [*wanted, *(name for name in found if name not in wanted)]:
        if found.get(field) != wanted.get(field):
            raise UsageError(
                f"ledger {path} belongs to another run: its {field} is {found.get(field)!r}, this run's is "
                f"{wanted.get(field)!r}; resume with the same settings or choose another directory"
            )


def _check(entry: Entry, rows: list[int]) -> None:
    strangers = [] if entry.rows == "all" else [row for row in entry.rows if row not in rows]
    if strangers or not entry.rows or entry.reserved < 1 or entry.round < 0:
        raise UsageError(f"cannot charge {entry}: rows must be among {rows}, round >= 0, reserved >= 1")
    if not (entry.sensitivity >= 0 and entry.scale >= 0):
        raise UsageError(f"cannot charge {entry}: sensitivity and scale must be numbers >= 0")
    _ = entry.charge  # refuses a bad epsilon, multiplier or rate


def _record(entry: Entry) -> dict[str, Any]:
    return {
        "round": entry.round,
        "rows": entry.rows if entry.rows == "all" else list(entry.rows),
        "mechanism": entry.mechanism,
        "sensitivity": _number(entry.sensitivity),
        "scale": _number(entry.scale),
        "epsilon": _number(entry.epsilon),
        "noise_multiplier": _number(entry.noise_multiplier),
        "sampling": entry.sampling,
        "reserved": entry.reserved,
    }


def _number(value: float) -> float | str:
    """JSON has no infinity."""
    return float(value) if math.isfinite(value) else str(float(value))


def _entry(path: Path, number: int, record: Mapping[str, Any], rows: list[int]) -> Entry:
    try:
        entry = Entry(
            round=int(record["round"]),
            rows="all" if record["rows"] == "all" else tuple(int(row) for row in record["rows"]),
            mechanism=record["mechanism"],
            sensitivity=float(record["sensitivity"]),
            scale=float(record["scale"]),
            epsilon=float(record["epsilon"]),
            noise_multiplier=float(record["noise_multiplier"]),
            sampling=float(record["sampling"]),
            reserved=int(record["reserved"]),
        )
        _check(entry, rows)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, number) from error
    return entry


def _most(by_row: Mapping[int, Iterable[Charge]], delta: float, group: int, **spent: float) -> Total:
    """The largest total over the rows; equal rows are asked once."""
    different = {tuple(charges) for charges in by_row.values()}
    return max((total(charges, delta, group, **spent) for charges in different), key=lambda t: t.epsilon)


def _damaged(path: Path, number: int) -> RunError:
    return RunError(
        f"ledger {path} is damaged at line {number}: what was sent is no longer known; "
        "restore the file from a copy, or end this run and count it as unprotected"
    )


def _checksum(previous: str, body: str) -> str:
    return hashlib.sha256(f"{previous}\n{body}".encode()).hexdigest()[:32]
