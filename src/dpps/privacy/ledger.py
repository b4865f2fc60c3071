"""The ledger: every release of a run and what it cost. Totals are computed from it, never from a plan.

`Ledger` keeps the releases in memory; :class:`dpps.privacy.ledger_file.LedgerFile` also writes each one to disk before it is
sent. A protocol always has one of the two, and nothing leaves a node without being charged.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from dpps.errors import RunError, UsageError
from dpps.privacy.accountant import Charge, Total, total
from dpps.privacy.release import Release, Rows

_ROUNDING = 1e-9  # a sum of rounds may miss the total it was divided from in its last digits


@dataclass(frozen=True)
class Budget:
    """The most that may be charged to any node: a number of rounds, a total epsilon at delta, or both.

    Attributes:
        rounds: messages of one node, replays included.
        epsilon: total by the accountant.
        delta: allowance of that total.
        group: records per person.
        planned: rounds that the epsilon was solved for: the accountant, which is slow, is asked for all of them in one go.
    """

    rounds: int | None = None
    epsilon: float | None = None
    delta: float = 0.0
    group: int = 1
    planned: int = 0

    def __post_init__(self) -> None:
        if self.rounds is None and self.epsilon is None:
            raise UsageError("an empty budget: give rounds, or epsilon and delta")
        if (self.rounds is not None and self.rounds < 1) or (
            self.epsilon is not None and not self.epsilon > 0
        ):
            raise UsageError(f"budget of {self.rounds} rounds, epsilon {self.epsilon}: must be positive")


class Ledger:
    """Releases of the given rows, in memory.

    Args:
        rows: the nodes whose messages are charged.
        budget: releases beyond it are refused before they are charged.
    """

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
        self._rounds: Counter[int] = Counter()
        self._sent: Counter[int] = Counter()
        self._cleared: dict[Release, int] = {}

    def charge(self, release: Release) -> None:
        """Write a release down; only when this returns may its messages leave.

        Raises:
            RunError: over budget; nothing was charged.
        """
        release.check(self.rows)
        self._refuse_over_budget(release)
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
        """How many messages were charged to the node that sent most."""
        return self._most_rounds("all")

    @property
    def place(self) -> str:
        """Where the releases can be read, for error messages."""
        return "the ledger in memory"

    def flush(self) -> None:
        """Put everything on disk where there is one; called before a checkpoint is written."""

    def close(self) -> None:
        """No more is charged."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def beyond(self, position: int) -> int:
        """Charged rounds that a state restored at round `position` lacks; re-running charges them again."""
        return sum(count for start, count in self._rounds.items() if start >= position)

    def charges(self) -> list[Charge]:
        """All lines, replays included, added up by kind and node set."""
        return [replace(kind, count=count) for (_, kind), count in self._kinds.items()]

    def charges_by_row(self) -> dict[int, list[Charge]]:
        """What each node sent. Nodes compose in parallel, so a total is the maximum over them."""
        sums: dict[int, Counter[Charge]] = {row: Counter() for row in self.rows}
        for (rows, kind), count in self._kinds.items():
            for row in self._named(rows):
                sums[row][kind] += count
        return {row: [replace(kind, count=n) for kind, n in kinds.items()] for row, kinds in sums.items()}

    def total(self, delta: float, group: int = 1, *, distance: float = 0.0) -> Total:
        """The cost of the node that paid most; arguments as in :func:`dpps.privacy.accountant.total`."""
        return _most(self.charges_by_row(), delta, group, distance)

    def _named(self, rows: Rows) -> list[int]:
        return self.rows if rows == "all" else list(rows)

    def affords(self, charges: Sequence[Charge]) -> bool:
        """Whether so much more, charged to every node, is within the budget: a run that cannot finish need not begin."""
        count = sum(charge.count for charge in charges)
        if self._budget is None or count == 0:
            return True
        if self._budget.rounds is not None and self._most_rounds("all") + count > self._budget.rounds:
            return False
        return self._budget.epsilon is None or self._within("all", charges)

    def _refuse_over_budget(self, release: Release) -> None:
        if self._budget is None:
            return
        used = self._most_rounds(release.rows)
        if self._budget.rounds is not None and used >= self._budget.rounds:
            raise self._refusal(release, f"{self._budget.rounds} rounds were budgeted and {used} are charged")
        if self._budget.epsilon is not None and not self._cleared_for(release):
            promised = f"epsilon {self._budget.epsilon} at delta {self._budget.delta}"
            raise self._refusal(release, f"{promised} was budgeted and {used} rounds have used it up")

    def _refusal(self, release: Release, reason: str) -> RunError:
        return RunError(
            f"round {release.round} refused before sending: {reason} (replays after a restart count); "
            f"all that was sent is in {self.place}"
        )

    def _most_rounds(self, rows: Rows) -> int:
        return max(self._sent[row] for row in self._named(rows))

    def _cleared_for(self, release: Release) -> bool:
        """Whether the epsilon budget allows it. Looks ahead: accountants are slow."""
        kind = replace(release, round=0)
        rows = set(self._named(release.rows))
        # Another kind of charge to the same node makes an earlier look ahead worthless.
        self._cleared = {
            k: n for k, n in self._cleared.items() if k == kind or rows.isdisjoint(self._named(k.rows))
        }
        left = self._cleared.pop(kind, 0)
        if not left:
            assert self._budget is not None
            ahead = (self._budget.planned - self._most_rounds(release.rows), 4096, 512, 64, 8, 1)
            left = next(
                (
                    n
                    for n in ahead
                    if n >= 1 and self._within(release.rows, [replace(release.charge, count=n)])
                ),
                0,
            )
        if left:
            self._cleared[kind] = left - 1
        return left > 0

    def _within(self, rows: Rows, charges: Sequence[Charge]) -> bool:
        assert self._budget is not None
        assert self._budget.epsilon is not None
        by_row = self.charges_by_row()
        planned = {row: [*by_row[row], *charges] for row in self._named(rows)}
        epsilon = _most(planned, self._budget.delta, self._budget.group).epsilon
        return epsilon <= self._budget.epsilon * (1 + _ROUNDING)

    def _count(self, release: Release) -> None:
        charge = self._same.setdefault(release.charge, release.charge)
        self._releases.append((release.round, release.rows, charge))
        self.mechanism = release.mechanism
        self._kinds[release.rows, charge] += 1
        for row in self._named(release.rows):
            self._sent[row] += 1
        self._rounds[release.round] += 1


def _most(by_row: Mapping[int, Iterable[Charge]], delta: float, group: int, distance: float = 0.0) -> Total:
    """The largest total over the rows; equal rows are asked once."""
    different = {tuple(charges) for charges in by_row.values()}
    return max(
        (total(charges, delta, group, distance=distance) for charges in different), key=lambda t: t.epsilon
    )
