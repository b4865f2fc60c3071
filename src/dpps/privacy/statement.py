"""What a run's privacy is worth, in numbers and in plain words."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from dpps.privacy.accountant import Charge, Total, label
from dpps.privacy.ledger import Ledger
from dpps.privacy.units import Unit

Found = TypeVar("Found")

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
    """The privacy part of a summary. Numbers that do not exist (no noise, no pure epsilon) are None.

    `epsilon` is the guarantee. Of a run that has reached its last planned round, it is what its messages cost. Before that it is
    what was promised for all planned rounds, because whoever ends a run may have looked at its results.
    """

    unit: str
    mechanism: str
    epsilon_per_round_max: float | None
    epsilon_sum: float | None
    epsilon: float | None
    delta: float
    accountant: str
    statement: str
    epsilon_by_node: Sequence[float] = ()
    """What each node held here has spent; `epsilon_spent` is the largest. Empty where some have no finite number."""
    simulated: bool = False
    """Whether the noise came from a seed: whoever knows that can subtract it, so these very messages are not protected."""
    epsilon_spent: float | None = None
    """What the messages so far cost. No guarantee before the last planned round."""
    epsilon_replacement: float | None = None
    """The guarantee where what is protected is replaced by something else of its kind (unit record: by another example)."""

    def to_json(self) -> dict[str, Any]:
        """For summary.json."""
        return asdict(self)


def account(
    unit: Unit | None,
    ledger: Ledger,
    *,
    private_noise: bool,
    distance: float = 0.0,
    ahead: Sequence[Charge] = (),
    promised: float | None = None,
    preface: str = "",
    remarks: Sequence[str] = (),
) -> Privacy:
    """The privacy of a run from what was charged.

    Args:
        unit: who is protected; None when the run adds no noise.
        ledger: all that was released; the node that paid most counts, for nodes compose in parallel.
        private_noise: whether nobody can know the noise (not seeded).
        distance: of the noise drawn from the noise charged for, in all rounds.
        ahead: what every node may still be charged, where the run has not reached its last planned round.
        promised: the total that these rounds were promised to keep to; None: that of all of them, planned ones included.
        preface: what the statement begins with, where noise that is not private was sent to others.
        remarks: what it ends with.
    """
    if unit is None:
        text = "No protection: messages were sent without noise."
        return Privacy("none", "none", None, None, None, 0.0, "none", text)
    spent = _by_row(ledger, lambda charges: unit.total(charges, distance=distance))
    row = max(spent, key=lambda row: spent[row].epsilon)
    total, charges = spent[row], ledger.charges_by_row()[row]
    by_node = [found.epsilon for found in spent.values()]
    early = bool(charges and ahead and unit.has_total)
    rest = tuple(ahead) if early else ()
    guarantee = total.epsilon
    if early:
        whole = (
            _by_row(ledger, lambda c: unit.total([*c, *rest], distance=distance)) if promised is None else {}
        )
        guarantee = max(guarantee, promised or 0.0, *(found.epsilon for found in whole.values()))
    replaced = _by_row(ledger, lambda c: unit.replacement([*c, *rest], distance=distance))
    others = [found.epsilon for found in replaced.values() if found is not None]
    other = max(others, default=guarantee) if unit.has_total else None
    pure = [e for c in charges if (e := c.event.pure_epsilon) is not None and math.isfinite(e)]
    words = _Words(unit, total, charges, by_node, guarantee, rest, other)
    return Privacy(
        unit=unit.name,
        mechanism=ledger.mechanism if charges and not charges[0].unprotected else "none",
        epsilon_per_round_max=max(pure) if pure else None,
        epsilon_sum=finite_or_none(total.epsilon_sum),
        epsilon=finite_or_none(guarantee),
        delta=total.delta,
        accountant=total.accountant,
        statement=" ".join(words.sentences(private_noise, preface, remarks)),
        epsilon_by_node=by_node if all(map(math.isfinite, by_node)) else (),
        simulated=not private_noise,
        epsilon_spent=finite_or_none(total.epsilon),
        epsilon_replacement=finite_or_none(other),
    )


def _by_row(ledger: Ledger, total: Callable[[Sequence[Charge]], Found]) -> dict[int, Found]:
    """What `total` finds for every row; rows with equal charges are asked for once."""
    by_row = {row: tuple(charges) for row, charges in ledger.charges_by_row().items()}
    different = {charges: total(charges) for charges in set(by_row.values())}
    return {row: different[charges] for row, charges in by_row.items()}


@dataclass(frozen=True)
class _Words:
    """What there is to say about a run."""

    unit: Unit
    total: Total
    charges: Sequence[Charge]
    by_node: Sequence[float]
    guarantee: float
    ahead: Sequence[Charge]
    replacement: float | None

    def sentences(self, private_noise: bool, preface: str, remarks: Sequence[str]) -> list[str]:
        """In plain words."""
        if not self.charges:
            return ["Nothing was sent, so nothing was revealed."]
        parts = [preface] if preface else []
        parts += [f"Protected: {self.unit.who()}.", self._guarantee()]
        if self.replacement is not None and self.replacement != self.guarantee:
            parts.append(f"For replacing it by any other: {label(self.replacement)} at the same delta.")
        if self.ahead:
            parts.append(self._spent())
        elif min(self.by_node) < max(self.by_node):
            parts.append(
                f"That is the node that paid most; others paid less, down to {label(min(self.by_node))} (epsilon_by_node has them all)."
            )
        if not private_noise and not preface:
            parts.append(SIMULATED)
        return [*parts, f"Not covered: {self.unit.limits()}; {OWN_EYES}.", *remarks]

    @property
    def _rounds(self) -> int:
        return sum(charge.count for charge in self.charges)

    def _guarantee(self) -> str:
        if not self.ahead:
            return self.unit.promise(self.total, self._rounds)
        return (
            f"Guarantee: {label(self.guarantee)}, delta {self.total.delta:g}, as promised for all planned rounds, whatever the round at "
            "which the run ends."
        )

    def _spent(self) -> str:
        return (
            f"Spent so far: {label(self.total.epsilon)}, in {self._rounds} rounds. That is no guarantee, because whoever ends a "
            "run may have looked at what was released. If they looked at losses or other results of private data without "
            "noise, that choice is not covered at all."
        )


def finite_or_none(value: float | None) -> float | None:
    """JSON has no infinity and no NaN."""
    return value if value is not None and math.isfinite(value) else None
