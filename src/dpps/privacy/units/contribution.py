"""The unit contribution: all that one node ever contributes."""

from dataclasses import dataclass
from typing import ClassVar, Self

from dpps.errors import UsageError
from dpps.noise.events import Event
from dpps.noise.mechanisms import MECHANISMS, Gaussian, Mechanism
from dpps.privacy.accountant import noise_for
from dpps.privacy.partners import NOBODY, Nobody, Trust
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
from dpps.sensitivity import Bounded


@UNITS.register("contribution")
@dataclass(frozen=True)
class Contribution(Unit):
    """All that one node ever contributes, against an observer of all messages (node-level, local differential privacy).

    Each round's private part is -lr_shared g with ||g|| <= clip; replacing all of a node's data moves it by at most
    2 lr_shared clip, whatever the model. Give `epsilon` (and `delta`) for the whole run, or the noise of a round.

    Args:
        clip: norm bound on the shared gradient: L1 for Laplace noise (30 if left out), L2 for Gaussian (1).
        epsilon: wanted total over the planned rounds.
        delta: total failure probability; 0 with Laplace means plain summation.
        mechanism: the name of a mechanism, such as "laplace" or "gaussian".
        round_epsilon: Laplace (or other pure noise): epsilon of one round.
        noise_multiplier: Gaussian (or other noise without a pure epsilon): scale over sensitivity.
        trust: `Pairs(colluders=C)`: Gaussian noise of which most cancels in the sum, safe against C other nodes.
    """

    clip: float = None  # type: ignore[assignment]  # a number from construction on
    epsilon: float | None = None
    delta: float = 1e-5
    mechanism: str = "laplace"
    round_epsilon: float | None = None
    noise_multiplier: float | None = None
    trust: Trust = NOBODY
    name = "contribution"
    own_options: ClassVar[tuple[str, ...]] = ("--mechanism", "--noise-rate")
    no_partners: ClassVar[str] = ""
    protects: ClassVar[str] = "all a node contributes"

    @classmethod
    def from_options(cls, options: PrivacyOptions) -> Self:
        return cls(
            given(options.clip),
            options.epsilon,
            options.delta,
            options.mechanism,
            None if options.budget is None else options.budget / options.noise_rate,
            options.noise_multiplier,
            options.trusted(),
        )

    @classmethod
    def defaults(cls, options: PrivacyOptions) -> dict[str, float]:
        usual = {"clip": _usual_clip(MECHANISMS[options.mechanism]), "lr_shared": 0.1, "lr_local": 0.1}
        asked = options.noise_multiplier is not None or options.budget is not None
        return usual if asked else {"epsilon": 3.0, **usual}

    @classmethod
    def check_options(cls, options: PrivacyOptions) -> None:
        super().check_options(options)
        if options.budget is not None and not options.noise_rate > 0:
            raise UsageError(
                f"--noise-rate is {options.noise_rate}: with --budget it must be positive (epsilon of a round is budget / rate)"
            )
        if options.trust == "pairs" and options.mechanism != Gaussian.name:
            raise UsageError(
                f"--trust pairs does not go with --mechanism {options.mechanism}: a sum of shared "
                f"{options.mechanism.title()} noises has no known cost; use gaussian"
            )

    def __post_init__(self) -> None:
        if self.clip is None:  # the default depends on the norm
            object.__setattr__(self, "clip", _usual_clip(self._kind))  # type: ignore[unreachable]
        pure = self._kind.pure
        noise = {"round_epsilon": self.round_epsilon} if pure else {"noise_multiplier": self.noise_multiplier}
        other = self.noise_multiplier if pure else self.round_epsilon
        if other is not None:
            raise UsageError(
                "round_epsilon belongs to Laplace noise and noise_multiplier to Gaussian noise: "
                f"give {next(iter(noise))} with mechanism {self.mechanism}"
            )
        one_of("contribution", epsilon=self.epsilon, **noise)
        positive(clip=self.clip, epsilon=self.epsilon, **noise)
        check_delta(self.delta, pure=pure)
        if self.mechanism != Gaussian.name and not isinstance(self.trust, Nobody):
            raise UsageError(
                f"trust is pairs and the mechanism {self.mechanism}: a sum of shared {self.mechanism.title()} noises has no "
                "known cost; use mechanism gaussian"
            )

    @property
    def _kind(self) -> type[Mechanism]:
        return MECHANISMS[self.mechanism]

    def noise(self, plan: Plan) -> float:
        if (asked := self.round_epsilon or self.noise_multiplier) is not None:
            return asked
        kind = self._kind

        def event(multiplier: float) -> Event:
            return Event.of(kind.of(1 / multiplier if kind.pure else multiplier).event(multiplier))

        multiplier = noise_for(given(self.epsilon), self.delta, plan.paid, event)
        return 1 / multiplier if kind.pure else multiplier

    def calibrate(self, plan: Plan, noise: float | None = None) -> Calibration:
        amount = self.noise(plan) if noise is None else noise
        mechanism = self._kind.of(amount)
        step = plan.lr_shared * self.clip
        partners = self.trust.partners(plan.nodes)
        return Calibration(mechanism, Bounded(clip=step), partners=partners)

    def who(self) -> str:
        return (
            "everything a node contributes over the whole run, against anybody who sees all messages of all nodes"
            f"{self.trust.who()}: replacing all of the node's data changes little"
        )

    def not_covered(self) -> str:
        return (
            "a node's local parameters, and statistics that its model keeps of its data (BatchNorm), are "
            "not noised and must never be published, nor accuracies "
            "computed with them; people whose records lie with "
            "several nodes are protected once per node; several runs on the same data add up; choices made "
            "by looking at the data or at test results are not counted; the declared size of a "
            f"node is public ({DECLARED}){self.trust.not_covered()}"
        )


def _usual_clip(kind: type[Mechanism]) -> float:
    return 30.0 if kind.norm == 1 else 1.0
