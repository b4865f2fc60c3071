"""What a run's privacy is worth, in numbers and in plain words."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dpps.privacy.accountant import Charge, Total, label
from dpps.privacy.ledger import Ledger
from dpps.privacy.units import Unit

SIMULATED = (
    "This run was a simulation with seeded noise: whoever knows the seed can subtract it, so these very messages are not "
    "private; the numbers are those of the same run with secure noise."
)


OWN_EYES = (
    "training losses, label counts and accuracies on a node's own data, shares of clipped examples and "
    "ratios of update to noise, which stand beside this statement in summary.json, "
    "rounds.csv and report.html, are computed without noise and are for the node's own eyes"
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
    epsilon_by_node: Sequence[float] = ()
    """What each node held here has spent; `epsilon` is the largest. Empty where some have no finite number."""
    simulated: bool = False
    """Whether the noise came from a seed: whoever knows that can subtract it, so these very messages are not protected."""

    def to_json(self) -> dict[str, Any]:
        """For summary.json."""
        return asdict(self)


def account(
    unit: Unit | None,
    ledger: Ledger,
    *,
    private_noise: bool,
    distance: float = 0.0,
) -> Privacy:
    """The privacy of a run from what was charged.

    Args:
        unit: who is protected; None when the run adds no noise.
        ledger: all that was released; the node that paid most counts, for nodes compose in parallel.
        private_noise: whether nobody can know the noise (not seeded).
        distance: of the noise drawn from the noise charged for.
    """
    if unit is None:
        text = "No protection: messages were sent without noise."
        return Privacy("none", "none", None, None, None, 0.0, "none", text)
    totals = _totals(unit, ledger, distance)
    total, charges = max(totals.values(), key=lambda found: found[0].epsilon)
    by_node = [found.epsilon for found, _ in totals.values()]
    pure = [e for c in charges if (e := c.event.pure_epsilon) is not None and math.isfinite(e)]
    return Privacy(
        unit=unit.name,
        mechanism=ledger.mechanism if charges and not charges[0].unprotected else "none",
        epsilon_per_round_max=max(pure) if pure else None,
        epsilon_sum=finite_or_none(total.epsilon_sum),
        epsilon=finite_or_none(total.epsilon),
        delta=total.delta,
        accountant=total.accountant,
        statement=_words(unit, total, charges, private_noise, by_node),
        epsilon_by_node=by_node if all(map(math.isfinite, by_node)) else (),
        simulated=not private_noise,
    )


def _totals(unit: Unit, ledger: Ledger, distance: float) -> dict[int, tuple[Total, Sequence[Charge]]]:
    """Of every row its total, and what it paid for; rows with equal charges are asked for once."""
    by_row = {row: tuple(charges) for row, charges in ledger.charges_by_row().items()}
    different = {
        charges: (unit.total(charges, distance=distance), charges) for charges in set(by_row.values())
    }
    return {row: different[charges] for row, charges in by_row.items()}


def _words(
    unit: Unit,
    total: Total,
    charges: Sequence[Charge],
    private_noise: bool,
    by_node: Sequence[float],
) -> str:
    if not charges:
        return "Nothing was sent, so nothing was revealed."
    rounds = sum(c.count for c in charges)
    parts = [f"Protected: {unit.who()}.", unit.promise(total, rounds)]
    if min(by_node) < max(by_node):
        parts.append(
            f"That is the node that paid most; others paid less, down to {label(min(by_node))} (epsilon_by_node has them all)."
        )
    if not private_noise:
        parts.append(SIMULATED)
    parts.append(f"Not covered: {unit.limits()}; {OWN_EYES}.")
    return " ".join(parts)


def finite_or_none(value: float | None) -> float | None:
    """JSON has no infinity and no NaN."""
    return value if value is not None and math.isfinite(value) else None
