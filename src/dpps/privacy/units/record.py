"""The unit record: one training example of one node."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from dpps.errors import UsageError
from dpps.noise.events import gaussian
from dpps.noise.mechanisms import Gaussian
from dpps.privacy.accountant import Charge, Total, noise_for, total
from dpps.privacy.partners import NOBODY, Trust
from dpps.privacy.units.base import (
    DECLARED,
    UNITS,
    Calibration,
    Plan,
    PrivacyOptions,
    Unit,
    check_delta,
    given,
    one_of,
    positive,
)
from dpps.privacy.units.contribution import Contribution
from dpps.sensitivity import Unclipped


@UNITS.register("record")
@dataclass(frozen=True)
class Record(Unit):
    """One training example of one node, against an observer of all messages (the usual DP-SGD unit).

    Per-example clipping over shared and local parameters together, Poisson sampling, Gaussian noise on both updates.
    The total is that of replacing an example by one that teaches nothing. With declared sizes fixed, that is what adding or
    removing one means. Replacing it by another example costs more, and is stated beside it (`Privacy.epsilon_replacement`).

    Args:
        epsilon: wanted total over the planned rounds; or give `noise_multiplier`.
        delta: total failure probability; choose well below 1 / (number of records).
        clip: L2 norm bound on one example's gradient.
        noise_multiplier: standard deviation of the noise over `clip`.
        records_per_user: how many records one person may own at a node (group privacy).
        trust: `Pairs(colluders=C)`: noise of which most cancels in the sum, safe against C other nodes.
    """

    epsilon: float | None = None
    delta: float = 1e-5
    clip: float = 1.0
    noise_multiplier: float | None = None
    records_per_user: int = 1
    trust: Trust = NOBODY
    name = "record"
    own_options: ClassVar[tuple[str, ...]] = ("--records-per-user",)
    no_partners: ClassVar[str] = ""
    protects: ClassVar[str] = "one training example"
    per_example: ClassVar[bool] = True
    implied_by: ClassVar[tuple[str, ...]] = (Contribution.name,)
    fixed_mechanism: ClassVar[str | None] = Gaussian.name

    @classmethod
    def from_options(cls, options: PrivacyOptions) -> Self:
        return cls(
            options.epsilon,
            options.delta,
            given(options.clip),
            options.noise_multiplier,
            options.records_per_user,
            options.trusted(),
        )

    @classmethod
    def defaults(cls, options: PrivacyOptions) -> dict[str, float]:
        usual = {"clip": 1.0, "lr_shared": 1.0, "lr_local": 1.0}
        return usual if options.noise_multiplier is not None else {"epsilon": 3.0, **usual}

    def __post_init__(self) -> None:
        one_of("record", epsilon=self.epsilon, noise_multiplier=self.noise_multiplier)
        positive(clip=self.clip, epsilon=self.epsilon, noise_multiplier=self.noise_multiplier)
        check_delta(self.delta)
        if self.records_per_user < 1:
            raise UsageError(f"records_per_user is {self.records_per_user}: it must be 1 or more")

    def noise(self, plan: Plan) -> float:
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        rate, group = max(plan.sampling), self.records_per_user
        return noise_for(given(self.epsilon), self.delta, plan.paid, gaussian, rate, group)

    def calibrate(self, plan: Plan, noise: float | None = None) -> Calibration:
        multiplier = self.noise(plan) if noise is None else noise
        # divided by the expected batch, never the actual one; by the same number at all nodes,
        # so that every example weighs the same
        share = plan.lr_shared * self.clip / plan.batch_size
        # by Chernoff's bound a batch has more examples than this once in 10^13 rounds or less
        most_drawn = 4 * plan.largest_batch + 60
        return Calibration(
            Gaussian(multiplier),
            Unclipped(distance=share, coordinates=plan.coordinates, largest=share * most_drawn),
            example_clip=self.clip,
            sampling=max(plan.sampling),
            rates=plan.sampling if plan.batches and len(set(plan.sampling)) > 1 else (),
            partners=self.trust.partners(plan.nodes),
        )

    def replacement(self, charges: Sequence[Charge], *, distance: float = 0.0) -> Total:
        return total(charges, self.delta, self.records_per_user, distance=distance, replaced=True)

    def who(self) -> str:
        owned, it, others = "one training example", "it", "one that teaches"
        if self.records_per_user > 1:
            owned = f"all of a person's records (up to {self.records_per_user})"
            it, others = "them", "ones that teach"
        return (
            f"{owned} of one node, against anybody who sees all messages of all nodes and every node's final "
            f"model{self.trust.who()}: replacing {it} by {others} nothing (whose gradients are zero) changes "
            f"little; while the declared sizes of all nodes stay the same, adding or removing {it} is the same thing"
        )

    def not_covered(self) -> str:
        return (
            f"the declared size of a node is public ({DECLARED}); a person whose records lie with several "
            "nodes, or who owns more of them "
            "than stated, is protected less; several runs on the same data add up; choices made by looking at the data or "
            f"at test results are not counted{self.trust.not_covered()}"
        )
