"""The unit node-swap: which node sent a message."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from dpps.errors import UsageError
from dpps.noise.mechanisms import Laplace
from dpps.privacy.accountant import Charge, Total, label, total
from dpps.privacy.units.base import (
    DECLARED,
    UNITS,
    Calibration,
    Plan,
    PrivacyOptions,
    Unit,
    given,
    one_of,
    positive,
)
from dpps.sensitivity import SENSITIVITIES, Certified, Sensitivity

_BUDGET = 5.0  # of the paper's experiments


@UNITS.register("node-swap")
@dataclass(frozen=True)
class NodeSwap(Unit):
    r"""The paper's unit (Definitions 2 to 5): which node sent a message. Laplace noise, $b/\gamma_n$ a round.

    Args:
        budget: b. Left out, it is solved from `epsilon`, the wanted sum over all rounds; 5 if that is left out, too.
        noise_rate: $\gamma_n$.
        sensitivity: `Certified(delta)` (a bound that holds with probability 1 - delta, by default 1e-5),
            `WorstCase()`, `Paper(c_prime, decay)` (tuned by hand), or `Oracle()` (simulation only).
        clip: the L1 norm to which the shared gradient is clipped; None leaves it.
        epsilon: wanted sum over the rounds, which is no guarantee for the run.
    """

    budget: float | None = None
    noise_rate: float = 1e-3
    sensitivity: Sensitivity = field(default_factory=lambda: Certified(PrivacyOptions.delta))
    clip: float | None = None
    epsilon: float | None = None
    name = "node-swap"
    own_options: ClassVar[tuple[str, ...]] = (
        "--mechanism",
        "--sensitivity",
        "--c-prime",
        "--decay",
        "--noise-rate",
    )
    no_partners: ClassVar[str] = (
        "its Laplace noise has no known cost once it is shared, and its sensitivity is about rows that differ"
    )
    no_peers: ClassVar[str] = "it needs all members in every round"
    protects: ClassVar[str] = "which node sent a message"
    has_total: ClassVar[bool] = False
    fixed_mechanism: ClassVar[str | None] = Laplace.name

    @classmethod
    def from_options(cls, options: PrivacyOptions) -> Self:
        sensitivity = SENSITIVITIES[options.sensitivity].from_options(options)
        return cls(options.budget, options.noise_rate, sensitivity, options.clip, options.epsilon)

    @classmethod
    def defaults(cls, options: PrivacyOptions) -> dict[str, float]:
        rates = {"lr_shared": 0.1, "lr_local": 0.1}
        return rates if options.epsilon is not None else {"budget": _BUDGET, **rates}

    @classmethod
    def check_options(cls, options: PrivacyOptions) -> None:
        if options.mechanism != Laplace.name:
            raise UsageError(
                f"--mechanism {options.mechanism}: the unit node-swap is defined with Laplace noise; use the unit "
                "contribution or record"
            )
        super().check_options(options)

    def __post_init__(self) -> None:
        if self.budget is None and self.epsilon is None:
            object.__setattr__(self, "budget", _BUDGET)
        one_of("node-swap", budget=self.budget, epsilon=self.epsilon)
        positive(clip=self.clip, epsilon=self.epsilon)

    @property
    def delta(self) -> float:  # type: ignore[override]
        return getattr(self.sensitivity, "delta", 0.0)

    @property
    def composition_delta(self) -> float:
        return 0.0  # the noise scale depends on the data, so only the plain sum stands

    def noise(self, plan: Plan) -> float:
        if self.budget is not None:
            return self.budget
        # epsilon = sum over rounds of b / (gamma_n rate): the noise rate decays with the other rates
        spare = plan.spare / plan.rounds[-1][0]
        rounds = spare + sum(count / rate for rate, count in plan.rounds)
        return given(self.epsilon) * self.noise_rate / rounds

    def calibrate(self, plan: Plan, noise: float | None = None) -> Calibration:
        budget = self.noise(plan) if noise is None else noise
        return Calibration(Laplace(budget, self.noise_rate), self.sensitivity, gradient_clip=self.clip)

    def total(self, charges: Sequence[Charge], *, distance: float = 0.0) -> Total:
        return replace(total(charges, self.composition_delta), delta=self.delta)

    def promise(self, total: Total, rounds: int) -> str:
        return (
            f"No guarantee for the run as a whole: the epsilons of {rounds} rounds add up to {label(total.epsilon)}, delta "
            f"{total.delta:g}, and each of them holds for its own round only."
        )

    def who(self) -> str:
        return (
            "which node sent a message, against a receiver who cannot see it from the channel (the paper's Definitions 2 to 5; in a "
            "distributed run the connection shows it)"
        )

    def not_covered(self) -> str:
        tuned = type(self.sensitivity).__name__ in ("Paper", "Oracle")
        proof = "the sensitivity is tuned by hand or measured, not proven; " if tuned else ""
        norms = "" if isinstance(self.sensitivity, Certified) else " and the norm of its noise"
        return (
            f"{proof}the sensitivity depends on the data, and the scalar every node broadcasts reveals the norm of its "
            f"update{norms}; no training example and no node's whole contribution is protected; the plain sum over "
            f"rounds is no proven total (docs/audit.md shows a case above it); the declared size of a node is public ({DECLARED})"
        )
