"""What was spent: every release of a run and its cost. Totals are computed from the ledger, never from a plan.

`Ledger` keeps the releases in memory; :class:`dpps.privacy.ledger_file.LedgerFile` also writes each one to disk before it is
sent. A protocol always has one of the two, and nothing leaves a node without being charged.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeVar

from dpps.errors import RunError, UsageError
from dpps.noise.events import Event
from dpps.privacy.accountant import Charge, Total, total

_ROUNDING = 1e-9  # a sum of rounds may miss the total it was divided from in its last digits

Rows = tuple[int, ...] | Literal["all"]
Found = TypeVar("Found")


@dataclass(frozen=True)
class Release:
    """The messages of some rows in one round.

    Attributes:
        event: what one message costs, sampling included.
        mechanism: the name of the noise, for the reader.
        sensitivity: S(t), in the norm of the mechanism.
        rows: the nodes whose message it is, or ``all`` of the ledger's.
    """

    round: int
    event: Event
    mechanism: str
    sensitivity: float
    scale: float
    rows: Rows = "all"

    def check(self, rows: Sequence[int]) -> None:
        """Refuse what no accountant can take, and rows that are not the ledger's."""
        strangers = [] if self.rows == "all" else [row for row in self.rows if row not in rows]
        if strangers or not self.rows or self.round < 0:
            raise UsageError(f"cannot charge {self}: rows must be among {list(rows)}, round >= 0")
        if not (self.sensitivity >= 0 and self.scale >= 0):
            raise UsageError(f"cannot charge {self}: sensitivity and scale must be numbers >= 0")
        if not self.event.well_formed:
            raise UsageError(f"cannot charge {self}: its event has a parameter that is not a number >= 0")

    def to_json(self) -> dict[str, Any]:
        """As a line of the ledger. `epsilon` is the pure epsilon of one message, for readers; None where there is none."""
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
    """The largest total that may be charged to any node.

    Attributes:
        epsilon: total by the accountant, replays included.
        delta: allowance of that total.
        group: records per person.
        planned: rounds that the epsilon was solved for: the accountant, which is slow, is asked for all of them in one go.
    """

    epsilon: float
    delta: float = 0.0
    group: int = 1
    planned: int = 0

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise UsageError(f"budget of epsilon {self.epsilon}: it must be positive")


class Ledger:
    """A ledger in memory, of the messages of the given rows (nodes). A message that exceeds the budget is
    refused before it is charged."""

    def __init__(self, rows: Sequence[int], budget: Budget | None = None) -> None:
        if not rows:
            raise UsageError("a ledger without rows: name the nodes whose messages are charged")
        self.rows = [int(row) for row in rows]
        self._releases: list[tuple[int, Rows, Charge]] = []
        self._same: dict[Charge, Charge] = {}  # equal charges are one object: a long run has thousands
        self.mechanism = "none"
        """The name of the noise that was charged last."""
        self._budget = budget
        self._kinds: Counter[tuple[Rows, Charge]] = Counter()
        self._sent: Counter[int] = Counter()
        self._cleared: dict[Release, int] = {}

    def charge(self, release: Release) -> None:
        """Record the cost of a message. The message may be sent only after this returns. Raises RunError if
        the budget is exceeded; nothing is charged then."""
        release.check(self.rows)
        budget = self._budget
        if budget is not None and not self._cleared_for(release, budget):
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
        """The same of one node: nodes that draw at different rates are charged separately in every round."""
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
        """What `cost` says of each node's charges; it is asked once for nodes with equal ones, because accountants are slow."""
        charges = {row: tuple(found) for row, found in self.charges_by_row().items()}
        by_row = {row: charges[row] for row in self._named(rows)}
        different = {each: cost(each) for each in set(by_row.values())}
        return {row: different[each] for row, each in by_row.items()}

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

        def cost(paid: Sequence[Charge]) -> float:
            return total([*paid, *charges], budget.delta, budget.group).epsilon

        return max(self.by_row(cost, rows).values()) <= budget.epsilon * (1 + _ROUNDING)

    def _count(self, release: Release) -> None:
        charge = Charge(release.event)
        charge = self._same.setdefault(charge, charge)
        self._releases.append((release.round, release.rows, charge))
        self.mechanism = release.mechanism
        self._kinds[release.rows, charge] += 1
        for row in self._named(release.rows):
            self._sent[row] += 1


def _number(value: float) -> float | str:
    """JSON has no infinity."""
    return float(value) if math.isfinite(value) else str(float(value))
