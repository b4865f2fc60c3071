"""Who failed, as far as it is known: what the processes report about each other, and what follows from it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from dpps.errors import RunError

CLOSED = "its connection was closed"
_LONGEST = 400


def printable(text: object) -> str:
    """Words of another process on one line, without control characters, which a terminal would obey, and not too many."""
    clean = "".join(c if c.isprintable() else "?" for c in str(text))
    return clean if len(clean) <= _LONGEST else f"{clean[:_LONGEST]}..."


@dataclass(frozen=True)
class Report:
    """What one process said when it stopped.

    Attributes:
        why: the reason, if it stopped by itself.
        lost: the ranks it could not go on without.
        what: what it saw of them.
        reached: whether it can still connect to them.
    """

    why: str = ""
    lost: tuple[int, ...] = ()
    what: str = ""
    reached: bool = True

    @property
    def cut(self) -> bool:
        """Whether nothing came, and nothing can come: the way between the two is cut, or the other machine is gone."""
        return not self.reached and self.what != CLOSED

    @property
    def gone(self) -> bool:
        """Whether somebody hung up who is not there any more. Who still takes connections may be about to say why it did."""
        return not self.reached and self.what == CLOSED

    def encoded(self) -> str:
        """As text for the meeting point."""
        return json.dumps(asdict(self))

    @classmethod
    def decoded(cls, text: str | bytes, processes: int) -> "Report":
        """What another of so many processes has put down; anything that is not a report counts as a stop without a reason."""
        try:
            found = json.loads(text)
            lost = tuple(rank for rank in map(int, found["lost"]) if 0 <= rank < processes)
            return cls(printable(found["why"]), lost, printable(found["what"]), found["reached"] is not False)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return cls(why="its report cannot be read")


def verdict(
    reports: Mapping[int, Report], own: int, lost: Sequence[int], what: str, named: Callable[[int], str] = str
) -> RunError:
    """The error that names who failed, and not who stopped because of it.

    Whoever reports is alive. Whoever is missed by somebody who can connect to it, or whose connection it closed, and reports
    nothing has failed. Otherwise the pairs are named that cannot connect to each other: what is between them is not known. Waiting
    for somebody who waits in turn, or finding a connection closed, is a consequence: whoever stops closes its own.
    """
    for rank, report in reports.items():
        if report.why and rank != own:
            return RunError(f"rank {rank} stopped the run: {report.why}")
    seen = [report for report in reports.values() if not report.cut]
    missed = {r: report.what for report in seen for r in report.lost if r not in reports}
    silent = {
        (rank, peer): report.what for rank, report in reports.items() if report.cut for peer in report.lost
    }
    if missed:
        words = "; ".join(f"rank {named(r)} has failed: {missed[r]}" for r in sorted(missed))
    elif silent:
        words = cannot_reach(silent, named)
    else:
        words = "; ".join(f"rank {named(r)} has stopped: {what}" for r in sorted(lost))
    return RunError(f"{words}; the last checkpoint is intact, go on with --resume (in Python Run.open)")


def all_said(reports: Mapping[int, Report], processes: int) -> bool:
    """Whether nobody can be expected to say more: all have reported but those who are gone, or somebody has said why it stopped."""
    gone = {r for report in reports.values() if report.gone for r in report.lost}
    return any(report.why for report in reports.values()) or len(gone | set(reports)) == processes


def cannot_reach(links: Mapping[tuple[int, int], str], named: Callable[[int], str] = str) -> str:
    """Pairs that do not hear each other; nothing is said about whose fault it is."""
    said = [
        f"rank {rank} cannot reach rank {named(peer)} ({links[rank, peer]})" for rank, peer in sorted(links)
    ]
    more = f"; and {len(said) - 8} more pairs" if len(said) > 8 else ""
    return "; ".join(said[:8]) + more
