"""One release: the noised rows of a round, and what they cost. A ledger is a list of releases."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dpps.errors import UsageError
from dpps.noise.events import Event
from dpps.privacy.accountant import Charge

Rows = tuple[int, ...] | Literal["all"]


@dataclass(frozen=True)
class Release:
    """The messages of some rows in one round.

    Attributes:
        round: the round t of the message.
        event: what it costs, as the mechanism states it, sampling included.
        mechanism: the name of the noise, for the reader.
        sensitivity: S(t), in the norm of the mechanism.
        scale: scale of the noise in the message.
        rows: the nodes whose message it is, or ``all`` that the ledger has.
    """

    round: int
    event: Event
    mechanism: str
    sensitivity: float
    scale: float
    rows: Rows = "all"

    @property
    def charge(self) -> Charge:
        """What the accountant takes."""
        return Charge(self.event)

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


def _number(value: float) -> float | str:
    """JSON has no infinity."""
    return float(value) if math.isfinite(value) else str(float(value))
