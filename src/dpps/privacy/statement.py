"""What a run's privacy is worth, in numbers and in plain words."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dpps.mechanisms import Mechanism
from dpps.privacy.accountant import Charge, Total
from dpps.privacy.ledger import Entry, Ledger
from dpps.privacy.units import Unit

SIMULATED = (
    "This run was a simulation with seeded noise: whoever knows the seed can subtract it, so these very messages are not "
    "private; the numbers are those of the same run with secure noise."
)


@dataclass(frozen=True)
class Privacy:
    """The privacy part of a summary. Numbers that do not exist (no noise, no pure epsilon) are None."""

    unit: str
    mechanism: str
    epsilon_per_round_max: float | None
    epsilon_sum: float | None
    epsilon: float | None
    delta: float
    accountant: str
    statement: str

    def to_json(self) -> dict[str, Any]:
        """For summary.json."""
        return asdict(self)


class Tally:
    """Charges of one node, kept in memory: for runs without a directory."""

    def __init__(self, sampling: float = 1.0) -> None:
        self.entries: list[Entry] = []
        self.sampling = sampling

    def charge(self, *, round: int, mechanism: Mechanism, sensitivity: float, scale: float) -> None:  # noqa: A002
        self.entries.append(entry(round, mechanism, sensitivity, scale, self.sampling))

    def charges(self) -> list[Charge]:
        """What the accountant takes."""
        return [e.charge for e in self.entries]


class Booked:
    """Writes every message into a ledger before it leaves; the ledger's lines are the only source of the total."""

    def __init__(self, ledger: Ledger, sampling: float = 1.0) -> None:
        self.ledger, self.sampling = ledger, sampling

    def charge(self, *, round: int, mechanism: Mechanism, sensitivity: float, scale: float) -> None:  # noqa: A002
        self.ledger.charge(entry(round, mechanism, sensitivity, scale, self.sampling))

    def charges(self) -> list[Charge]:
        """What the accountant takes, replays included."""
        return self.ledger.charges()


def entry(round_: int, mechanism: Mechanism, sensitivity: float, scale: float, sampling: float) -> Entry:
    """The ledger line of one round's messages of all nodes held here."""
    return Entry(
        round=round_,
        rows="all",
        mechanism=mechanism.name if mechanism.name in ("laplace", "gaussian") and scale > 0 else "none",  # type: ignore[arg-type]
        sensitivity=sensitivity,
        scale=scale,
        epsilon=mechanism.epsilon(sensitivity, scale) if mechanism.name == "laplace" and scale > 0 else 0.0,
        noise_multiplier=mechanism.multiplier(sensitivity, scale) if mechanism.name == "gaussian" else 0.0,
        sampling=sampling,
    )


def account(
    unit: Unit | None,
    charges: Sequence[Charge],
    *,
    private_noise: bool,
    distance: float = 0.0,
    shared: str = "",
) -> Privacy:
    """The privacy of a run from what was charged.

    Args:
        unit: who is protected; None when the run adds no noise.
        charges: all messages of the node that paid most.
        private_noise: whether nobody can know the noise (not seeded).
        distance: of the noise drawn from the noise charged for.
        shared: names what else left the nodes (metrics), for the statement.
    """
    if unit is None:
        text = "No protection: messages were sent without noise."
        return Privacy("none", "none", None, None, None, 0.0, "none", text)
    total = unit.total(charges, distance=distance)
    pure = [c.epsilon for c in charges if c.mechanism == "laplace"]
    return Privacy(
        unit=unit.name,
        mechanism=charges[0].mechanism if charges else "none",
        epsilon_per_round_max=max(pure) if pure else None,
        epsilon_sum=finite_or_none(total.epsilon_sum),
        epsilon=finite_or_none(total.epsilon),
        delta=total.delta,
        accountant=total.accountant,
        statement=_words(unit, total, charges, private_noise, shared),
    )


def _words(unit: Unit, total: Total, charges: Sequence[Charge], private_noise: bool, shared: str) -> str:
    if not charges:
        return "Nothing was sent, so nothing was revealed."
    rounds = sum(c.count for c in charges)
    parts = [f"Protected: {unit.who()}.", unit.promise(total, rounds)]
    if not private_noise:
        parts.append(SIMULATED)
    parts.append(f"Not covered: {unit.limits()}{'; ' + shared if shared else ''}.")
    return " ".join(parts)


def finite_or_none(value: float | None) -> float | None:
    """JSON has no infinity and no NaN."""
    return value if value is not None and math.isfinite(value) else None
