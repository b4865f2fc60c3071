"""The contract of a run: what it promised when it first started, and every number the promise rests on.

It is made once, before the first message, and written into the ledger's first line. A resumed run takes it from there: sizes
that peers announce later, or data that grew meanwhile, change nothing, and no noise is solved for a second time.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from dpps.errors import RunError, UsageError
from dpps.privacy.ledger import Budget
from dpps.privacy.units import Calibration, Plan, Unit


@dataclass(frozen=True)
class Contract:
    """What was promised, and to what the run keeps for it.

    Attributes:
        unit: who is protected.
        epsilon: the promised total; None when the noise was given instead.
        delta: at which failure probability.
        records_per_user: how many records one person may own.
        clip: bound on a gradient, of one example (record) or of a node (contribution, node-swap).
        mechanism: which noise.
        noise: how much: the noise multiplier (Gaussian), the epsilon of a round (contribution with Laplace noise), or
            the paper's b (node-swap).
        plan: rounds, declared sizes, sampling rates and learning rates.
        trust: the partner graph, how many colluders it stands, and sigma and tau over the noise of a message without
            partners; None: all noise is independent.
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
        noise = unit.noise(plan)
        calibration = unit.calibrate(plan, noise)
        promised = (unit.name, unit.epsilon, unit.delta, unit.records_per_user, unit.clip)
        return cls(*promised, calibration.mechanism.name, noise, plan, _trust(unit, plan))

    def calibrate(self, unit: Unit) -> Calibration:
        """What the run must do. Nothing is solved for: the noise is that of the first start."""
        return unit.calibrate(self.plan, self.noise)

    def budget(self, unit: Unit) -> Budget | None:
        """What the ledger may be charged at most; None when no total was promised."""
        if self.epsilon is None:
            return None
        return Budget(
            epsilon=self.epsilon,
            delta=unit.composition_delta,
            group=self.records_per_user,
            planned=self.plan.paid,
        )

    def check(self, unit: Unit, plan: Plan) -> None:
        """Refuse to go on with a run that asks for something else than was promised."""
        sizes = zip(plan.declared_sizes, self.plan.declared_sizes, strict=True)
        for node, (now_declared, then_declared) in enumerate(sizes):
            if now_declared != then_declared:
                raise UsageError(
                    f"node {node} declares {now_declared} examples and declared {then_declared} when the run started: "
                    "the promise rests on it; declare the same again, or start a new run"
                )
        now = {
            "unit": unit.name,
            "epsilon": unit.epsilon,
            "delta": unit.delta,
            "records_per_user": unit.records_per_user,
            "clip": unit.clip,
            "trust": _trust(unit, plan),
            "mechanism": self.calibrate(unit).mechanism.name,
            **_plain(plan),
        }
        then = {**asdict(self), **_plain(self.plan)}
        for name, value in now.items():
            if then[name] != value:
                raise UsageError(
                    f"{name} is {value} and was {then[name]} when the run started, which its promise rests on: "
                    "resume with the same, or start a new run"
                )

    def to_json(self) -> dict[str, Any]:
        """For the ledger's first line."""
        return {**asdict(self), "plan": _plain(self.plan)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any] | None, where: str) -> "Contract":
        """The contract in a ledger's first line.

        Raises:
            RunError: there is none, or not a whole one: an older version wrote the ledger.
        """
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


def _trust(unit: Unit, plan: Plan) -> dict[str, Any] | None:
    partners = unit.trust.partners(plan.nodes)
    return None if partners is None else partners.to_json()


def _plain(plan: Plan) -> dict[str, Any]:
    """As JSON gives it back."""
    return {
        **asdict(plan),
        "rounds": [list(part) for part in plan.rounds],
        "sampling": list(plan.sampling),
        "declared_sizes": list(plan.declared_sizes),
        "batches": list(plan.batches),
    }
