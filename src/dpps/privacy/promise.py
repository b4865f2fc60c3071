"""What was promised: the contract of a run, what its rounds will cost, and the statement about what they did cost.

The contract is made once, before the first message, and written into the ledger's first line. A resumed run takes it from
there: sizes that peers announce later, or data that grew meanwhile, change nothing, and no noise is solved for again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from dpps.errors import RunError, UsageError
from dpps.noise.events import sampled
from dpps.privacy.accountant import Charge, Total, finite_or_none, label
from dpps.privacy.ledger import Budget, Ledger
from dpps.privacy.units import Calibration, Plan, Unit

SIMULATED = (
    "This run was a simulation with seeded noise: whoever knows the seed can subtract it, so these very messages are not "
    "private; the numbers are those of the same run with secure noise."
)

OWN_EYES = (
    "training losses, label counts and accuracies on a node's own data, shares of clipped examples and "
    "ratios of update to noise, which appear next to this statement in summary.json, "
    "rounds.csv and report.html, are computed without noise and are for the node's own eyes"
)


@dataclass(frozen=True)
class Contract:
    """What was promised, and what the run keeps to for it.

    Attributes:
        epsilon: the promised total; None when the noise was given instead.
        clip: bound on a gradient, of one example (record) or of a node (contribution, node-swap).
        noise: the noise multiplier (Gaussian), the epsilon of a round (contribution with Laplace noise), or the paper's b
            (node-swap).
        trust: the partner graph, how many colluders it stands, and sigma and tau; None: all noise is independent.
    """

    unit: str
    epsilon: float | None
    delta: float
    records_per_user: int
    clip: float | None
    mechanism: str
    noise: float
    plan: Plan
    trust: dict[str, Any] | None = None

    @classmethod
    def first(cls, unit: Unit, plan: Plan) -> "Contract":
        """The contract of a run that starts now: the noise is solved for, this one time."""
        return cls._with(unit, plan, unit.noise(plan))

    @classmethod
    def _with(cls, unit: Unit, plan: Plan, noise: float) -> "Contract":
        partners = unit.trust.partners(plan.nodes)
        mechanism = unit.calibrate(plan, noise).mechanism.name
        trust = None if partners is None else partners.to_json()
        promised = (unit.name, unit.epsilon, unit.delta, unit.records_per_user, unit.clip)
        return cls(*promised, mechanism, noise, plan, trust)

    def calibrate(self, unit: Unit) -> Calibration:
        """What the run must do. Nothing is solved for: the noise is that of the first start."""
        return unit.calibrate(self.plan, self.noise)

    def budget(self, unit: Unit) -> Budget | None:
        """What the ledger may be charged at most; None when no total was promised."""
        if self.epsilon is None:
            return None
        return Budget(self.epsilon, unit.composition_delta, self.records_per_user, self.plan.paid)

    def check(self, unit: Unit, plan: Plan) -> None:
        """Refuse to go on with a run that asks for something else than was promised."""
        sizes = zip(plan.declared_sizes, self.plan.declared_sizes, strict=True)
        for node, (now, then) in enumerate(sizes):
            if now != then:
                raise UsageError(
                    f"node {node} declares {now} examples and declared {then} when the run started: "
                    "the promise rests on it; declare the same again, or start a new run"
                )
        asked, promised = (
            {**contract.to_json(), **contract.to_json()["plan"], "plan": None}
            for contract in (self._with(unit, plan, self.noise), self)
        )
        for name, value in asked.items():
            if promised[name] != value:
                raise UsageError(
                    f"{name} is {value} and was {promised[name]} when the run started, which its promise rests on: "
                    "resume with the same, or start a new run"
                )

    def to_json(self) -> dict[str, Any]:
        """For the ledger's first line, as JSON gives it back."""
        plan = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self.plan).items()}
        plan["rounds"] = [list(part) for part in self.plan.rounds]
        return {**asdict(self), "plan": plan}

    @classmethod
    def from_json(cls, found: Mapping[str, Any] | None, where: str) -> "Contract":
        """The contract in a ledger's first line. RunError: there is none that this version can read."""
        try:
            kept = dict(found or {})
            plan = {"batches": (), **kept["plan"]}
            plan = {f.name: plan[f.name] for f in fields(Plan)}
            plan["rounds"] = tuple((rate, count) for rate, count in plan["rounds"])
            plan |= {name: tuple(plan[name]) for name in ("sampling", "declared_sizes", "batches")}
            return cls(**{**kept, "plan": Plan(**plan)})
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(
                f"{where} has no contract that this version can read: what the run promised is not known, so it cannot go on; "
                "start a new run in another folder"
            ) from error


def planned_charges(calibration: Calibration, plan: Plan) -> list[Charge]:
    """What the ledger will hold for the node that draws most often."""

    def charge(rate: float, count: int) -> Charge:
        cost = calibration.mechanism.cost(1.0, calibration.mechanism.scale(1.0) * rate)
        return Charge(sampled(calibration.sampling, cost), count)

    if not calibration.sensitivity.noise_decays:
        return [charge(1.0, plan.paid)]
    return [charge(rate, count) for rate, count in plan.rounds]


def charges_ahead(calibration: Calibration, plan: Plan, position: int, messages: int) -> list[Charge]:
    """What a node may still be charged before the last planned round, spare rounds included.

    `position` counts complete rounds, `messages` everything charged so far, with rounds repeated after a crash.
    """
    left = plan.count - position
    if left <= 0:
        return []
    if calibration.sensitivity.noise_decays:
        return planned_charges(calibration, plan.after(position))
    rounds = ((1.0, max(left, plan.paid - messages)),)
    return planned_charges(calibration, replace(plan, rounds=rounds, spare=0))


@dataclass(frozen=True)
class Privacy:
    """The privacy part of a summary. Numbers that do not exist (no noise, no pure epsilon) are None.

    Attributes:
        epsilon: the guarantee. After the last planned round, the cost of all messages. Before that, the epsilon promised for
            all planned rounds, because whoever ends a run early may have looked at its results.
        epsilon_by_node: what each node in this process has spent; empty where some have no finite number.
        simulated: the noise came from a seed: whoever knows it can subtract the noise, so the messages are not protected.
        epsilon_spent: the cost of the messages so far; no guarantee before the last planned round.
        epsilon_replacement: the guarantee where what is protected is replaced by something else of its kind (unit record:
            by another example).
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
    simulated: bool = False
    epsilon_spent: float | None = None
    epsilon_replacement: float | None = None

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
        ledger: all that was released; the node that paid most counts, because nodes compose in parallel.
        private_noise: whether nobody can know the noise (not seeded).
        distance: of the noise drawn from the noise charged for, in all rounds.
        ahead: what every node may still be charged, where the run has not reached its last planned round.
        promised: the total promised for these rounds; None: that of all of them, planned ones included.
        preface: first sentences of the statement, where noise that is not private was sent to others.
        remarks: its last sentences.
    """
    if unit is None:
        text = "No protection: messages were sent without noise."
        return Privacy("none", "none", None, None, None, 0.0, "none", text)
    spent = ledger.by_row(lambda charges: unit.total(charges, distance=distance))
    row = max(spent, key=lambda row: spent[row].epsilon)
    total, charges = spent[row], ledger.charges_by_row()[row]
    by_node = [found.epsilon for found in spent.values()]
    early = bool(charges and ahead and unit.has_total)
    rest = tuple(ahead) if early else ()
    guarantee = total.epsilon
    if early and promised is None:
        whole = ledger.by_row(lambda c: unit.total([*c, *rest], distance=distance).epsilon)
        guarantee = max(guarantee, *whole.values())
    elif early:
        guarantee = max(guarantee, promised or 0.0)
    replaced = ledger.by_row(lambda c: unit.replacement([*c, *rest], distance=distance))
    others = [found.epsilon for found in replaced.values() if found is not None]
    other = max(others, default=guarantee) if unit.has_total else None
    pure = [e for c in charges if (e := c.event.pure_epsilon) is not None and math.isfinite(e)]
    sentences = ["Nothing was sent, so nothing was revealed."]
    if charges:
        sentences = [
            *([preface] if preface else []),
            f"Protected: {unit.who()}.",
            *_numbers(unit, total, sum(charge.count for charge in charges), by_node, guarantee, early, other),
            *([] if private_noise or preface else [SIMULATED]),
            f"Not covered: {'; '.join((unit.not_covered(), *([OWN_EYES] if unit.trains else [])))}.",
            *remarks,
        ]
    return Privacy(
        unit=unit.name,
        mechanism=ledger.mechanism if charges and not charges[0].unprotected else "none",
        epsilon_per_round_max=max(pure) if pure else None,
        epsilon_sum=finite_or_none(total.epsilon_sum),
        epsilon=finite_or_none(guarantee),
        delta=total.delta,
        accountant=total.accountant,
        statement=" ".join(sentences),
        epsilon_by_node=by_node if all(map(math.isfinite, by_node)) else (),
        simulated=not private_noise,
        epsilon_spent=finite_or_none(total.epsilon),
        epsilon_replacement=finite_or_none(other),
    )


def _numbers(
    unit: Unit,
    total: Total,
    rounds: int,
    by_node: Sequence[float],
    guarantee: float,
    early: bool,
    replacement: float | None,
) -> list[str]:
    """The sentences about epsilon; `early`: the run has not reached its last planned round."""
    parts = [unit.promise(total, rounds)]
    if early:
        parts = [
            f"Guarantee: {label(guarantee)}, delta {total.delta:g}, as promised for all planned rounds, whatever the round at "
            "which the run ends."
        ]
    if replacement is not None and replacement != guarantee:
        parts.append(f"For replacing it by any other: {label(replacement)} at the same delta.")
    if early:
        parts.append(
            f"Spent so far: {label(total.epsilon)}, in {rounds} rounds. That is no guarantee, because whoever ends a "
            "run may have looked at what was released. If they looked at losses or other results of private data without "
            "noise, that choice is not covered at all."
        )
    elif min(by_node) < max(by_node):
        parts.append(
            f"That is the node that paid most; others paid less, down to {label(min(by_node))} (epsilon_by_node has them all)."
        )
    return parts
