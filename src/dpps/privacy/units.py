"""Who is protected: the privacy units. They differ only in where the sensitivity comes from.

A unit turns what a user says (noise parameters, or a target epsilon and delta) and the plan of a run into `Calibration`: the
mechanism, the sensitivity and the clipping that the run must keep to. docs/architecture.md adds one.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

from dpps.errors import UsageError, is_number
from dpps.noise.events import Event, gaussian
from dpps.noise.mechanisms import MECHANISMS, Gaussian, Laplace, Mechanism
from dpps.noise.source import NoiseSource
from dpps.privacy.accountant import Charge, Total, label, noise_for, running_total, total
from dpps.privacy.partners import MEAN_VARIANCE, NOBODY, Nobody, Pairs, Partners, Trust
from dpps.registry import Registry
from dpps.sensitivity import SENSITIVITIES, Bounded, Certified, Sensitivity, Unclipped

if TYPE_CHECKING:
    from dp_accounting import DpEvent

_DECLARED = "unless declared otherwise, how many examples it held when the run first started"
_BUDGET = 5.0  # of the paper's experiments


@dataclass(frozen=True)
class Plan:
    """What a unit needs to know of a run before it starts.

    Attributes:
        rounds: (factor on the rates, how many rounds), in order.
        batch_size: by which sums of gradients are divided: a node's expected batch, or the mean of all where they differ.
        sampling: for every node, the probability that one of its examples joins a round (Poisson sampling).
        spare: rounds paid for beyond these.
        coordinates: parameters of a node, shared and local.
        declared_sizes: how many examples every node said it holds, in public and before the start.
        batches: every node's expected batch where they differ; empty: all have `batch_size`.
    """

    rounds: Sequence[tuple[float, int]]
    lr_shared: float
    batch_size: float
    sampling: Sequence[float] = (1.0,)
    spare: int = 0
    coordinates: int = 0
    declared_sizes: Sequence[int] = ()
    lr_local: float = 0.0
    batches: Sequence[float] = ()

    @property
    def largest_batch(self) -> float:
        """The largest expected batch of a node."""
        return max(self.batches, default=self.batch_size)

    def batch_of(self, node: int) -> float:
        """The expected batch of this node."""
        return self.batches[node] if self.batches else self.batch_size

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return len(self.declared_sizes)

    @cached_property
    def count(self) -> int:
        """The number of rounds."""
        return sum(count for _, count in self.rounds)

    @cached_property
    def paid(self) -> int:
        """The number of rounds that a target epsilon is spread over."""
        return self.count + self.spare

    def after(self, done: int) -> "Plan":
        """The rounds that are left after `done` of them, without spare ones."""
        left = []
        for rate, count in self.rounds:
            if count > done:
                left.append((rate, count - done))
            done = max(0, done - count)
        return replace(self, rounds=tuple(left), spare=0)


@dataclass(frozen=True)
class Calibration:
    """What a run must do to keep a unit's promise.

    Attributes:
        gradient_clip: the learner scales the whole shared gradient down to this L1 norm (Algorithm 2, line 5).
        example_clip: it scales every example's gradient down to this L2 norm, and noises the local update too.
        sampling: the largest probability of an example to join a round.
        rates: that of every node, where each chose its batch and is charged for it; empty: all pay for the largest.
        partners: who shares noise that cancels with whom; None: nobody.
    """

    mechanism: Mechanism
    sensitivity: Sensitivity
    gradient_clip: float | None = None
    example_clip: float | None = None
    sampling: float = 1.0
    rates: Sequence[float] = ()
    partners: Partners | None = None

    def source(self, noise: NoiseSource) -> NoiseSource:
        """Where the messages' noise comes from: with partners, part of it is shared with them."""
        return noise if self.partners is None else noise.with_partners(self.partners)


@dataclass(frozen=True)
class PrivacyOptions:
    """The privacy options of `dpps train` and `dpps plan`; their help texts explain each."""

    epsilon: float | None = None
    delta: float = 1e-5
    clip: float | None = None
    records_per_user: int = 1
    mechanism: str = "laplace"
    noise_multiplier: float | None = None
    trust: str = "nobody"
    colluders: int | None = None
    mean_variance: float | None = None
    absentees: int | None = None
    budget: float | None = None
    noise_rate: float = 1e-3
    sensitivity: str = "certified"
    c_prime: float = 0.78
    decay: float = 0.55

    @classmethod
    def of(cls, options: Any) -> Self:
        """The privacy options among those of a command; what it does not have stays at its default."""
        found: dict[str, Any] = {f.name: getattr(options, f.name, f.default) for f in fields(cls)}
        return cls(**found)

    def trusted(self) -> Trust:
        """What --trust, --colluders, --absentees and --mean-variance mean."""
        if self.trust == "nobody":
            return Nobody()
        variance = MEAN_VARIANCE if self.mean_variance is None else self.mean_variance
        return Pairs(self.colluders, variance, absentees=self.absentees or 0)


class Unit(ABC):
    """Who is protected, and how that is bought."""

    name: str
    epsilon: float | None
    delta: float
    clip: float | None
    records_per_user = 1
    trust: Trust = NOBODY
    own_options: ClassVar[tuple[str, ...]] = ()
    """Command-line options that not every unit has."""
    no_partners: ClassVar[str] = "it has no noise that cancels"
    """Why `--trust pairs` does not go with it; empty where it does."""
    no_peers: ClassVar[str] = ""
    """Why it does not work between organisations that come and go; empty where it does."""
    protects: ClassVar[str] = ""
    """What is protected, for headings; empty: its name is shown."""
    per_example: ClassVar[bool] = False
    """Whether it protects one example: each is clipped and sampled by itself, and nodes may have their own rates."""
    trains: ClassVar[bool] = True
    """Whether a run also shows losses and accuracies, which have no noise."""
    has_total: ClassVar[bool] = True
    """Whether its guarantee covers the whole run; otherwise totals are shown as a plain sum of rounds."""
    implied_by: ClassVar[tuple[str, ...]] = ()
    """Other units whose guarantee covers this one, too."""
    fixed_mechanism: ClassVar[str | None] = None
    """The mechanism that `--mechanism` cannot change."""

    @classmethod
    @abstractmethod
    def from_options(cls, options: PrivacyOptions) -> Self:
        """The unit as the command line asks for it, once `defaults` are filled in."""

    @classmethod
    def defaults(cls, options: PrivacyOptions) -> dict[str, float]:
        """Defaults of epsilon, clip, budget, lr_shared and lr_local where they are left out."""
        return {}

    @classmethod
    def usual(cls) -> Self:
        """With the defaults of the command line."""
        options = PrivacyOptions()
        known = {f.name for f in fields(PrivacyOptions)}
        filled: dict[str, Any] = {k: v for k, v in cls.defaults(options).items() if k in known}
        return cls.from_options(replace(options, **filled))

    def for_network(self, nodes: int) -> Self:
        """The same in a network of so many nodes: its statement names how many of them may collude."""
        trust = self.trust.for_network(nodes)
        return self if trust == self.trust else replace(self, trust=trust)  # type: ignore[type-var]

    @property
    def composition_delta(self) -> float:
        """At which delta the rounds of a run are added up."""
        return self.delta

    @abstractmethod
    def noise(self, plan: Plan) -> float:
        """How much noise a run of this plan needs: as given, or solved for."""

    @abstractmethod
    def calibrate(self, plan: Plan, noise: float | None = None) -> Calibration:
        """What a run of this plan must do; with `noise`, found before, nothing is solved for."""

    def total(self, charges: Sequence[Charge], *, distance: float = 0.0) -> Total:
        """The cost of all messages of one node, from its ledger."""
        return total(charges, self.delta, self.records_per_user, distance=distance)

    def running_total(
        self, charges: Sequence[Charge], planned: int, *, distance: float = 0.0
    ) -> float | None:
        """The epsilon of one node's charges so far, in a run of `planned` rounds; None where it takes too long to compute
        again and again. `distance` is as in `dpps.total`."""
        if all(charge.unsampled for charge in charges):
            return self.total(charges, distance=distance).epsilon
        if self.records_per_user > 1:
            return None
        return running_total(charges, self.delta, planned, distance=distance)

    def replacement(self, charges: Sequence[Charge], *, distance: float = 0.0) -> Total | None:
        """The cost of replacing what is protected by something else of its kind; None where `total` already is that."""
        return None

    def promise(self, total: Total, rounds: int) -> str:
        """What the total is worth, in words."""
        return f"Guarantee: {label(total.epsilon)}, delta {total.delta:g}, over {rounds} rounds (by {total.accountant})."

    @abstractmethod
    def who(self) -> str:
        """In plain words: who is hidden, and from whom."""

    @abstractmethod
    def not_covered(self) -> str:
        """In plain words: what is not covered."""


UNITS: Registry[type[Unit]] = Registry("unit", "dpps.privacy")
"""Units by name: what `dpps train --unit` offers, apart from none."""


@UNITS.register("node-swap")
@dataclass(frozen=True)
class NodeSwap(Unit):
    r"""The paper's unit (Definitions 2 to 5). Protects which node sent a message. Laplace noise, $b/\gamma_n$ a round.

    Args:
        budget: b. By default computed from `epsilon`, the target sum over all rounds, or 5 without it.
        noise_rate: $\gamma_n$.
        sensitivity: `Certified(delta)` (a bound that holds with probability 1 - delta, by default 1e-5),
            `WorstCase()`, `Paper(c_prime, decay)` (tuned by hand), or `Oracle()` (simulation only).
        clip: the L1 norm to which the shared gradient is clipped. None: no clipping.
        epsilon: target sum over the rounds. It is no guarantee for the whole run.
    """

    budget: float | None = None
    noise_rate: float = 1e-3
    sensitivity: Sensitivity = field(default_factory=lambda: Certified(PrivacyOptions.delta))
    clip: float | None = None
    epsilon: float | None = None
    name = "node-swap"
    own_options = ("--mechanism", "--sensitivity", "--c-prime", "--decay", "--noise-rate")
    no_partners = (
        "its Laplace noise has no known cost once it is shared, and its sensitivity is about rows that differ"
    )
    no_peers = "it needs all members in every round"
    protects = "which node sent a message"
    has_total = False
    fixed_mechanism = Laplace.name

    @classmethod
    def from_options(cls, options: PrivacyOptions) -> Self:
        sensitivity = SENSITIVITIES[options.sensitivity].from_options(options)
        return cls(options.budget, options.noise_rate, sensitivity, options.clip, options.epsilon)

    @classmethod
    def defaults(cls, options: PrivacyOptions) -> dict[str, float]:
        rates = {"lr_shared": 0.1, "lr_local": 0.1}
        return rates if options.epsilon is not None else {"budget": _BUDGET, **rates}

    def __post_init__(self) -> None:
        if self.budget is None and self.epsilon is None:
            object.__setattr__(self, "budget", _BUDGET)
        _one_of("node-swap", budget=self.budget, epsilon=self.epsilon)
        _positive(clip=self.clip, epsilon=self.epsilon)

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
        return _given(self.epsilon) * self.noise_rate / rounds

    def calibrate(self, plan: Plan, noise: float | None = None) -> Calibration:
        mechanism = Laplace(self.noise(plan) if noise is None else noise, self.noise_rate)
        return Calibration(mechanism, self.sensitivity, gradient_clip=self.clip)

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
            f"rounds is no proven total (docs/audit.md shows a case above it); the declared size of a node is public ({_DECLARED})"
        )


@UNITS.register("contribution")
@dataclass(frozen=True)
class Contribution(Unit):
    """Protects everything that one node ever contributes against an observer of all messages (local differential privacy).

    Each round's private part is -lr_shared g with ||g|| <= clip; replacing all of a node's data moves it by at most
    2 lr_shared clip, whatever the model. Give `epsilon` (and `delta`) for the whole run, or the noise of a round.

    Args:
        clip: norm bound on the shared gradient: L1 for Laplace noise (30 if left out), L2 for Gaussian (1).
        epsilon: target total over the planned rounds.
        delta: total failure probability; 0 with Laplace means plain summation.
        mechanism: the name of a mechanism, such as "laplace" or "gaussian".
        round_epsilon: Laplace (or other pure noise): epsilon of one round.
        noise_multiplier: Gaussian (or other noise without a pure epsilon): scale over sensitivity.
        trust: `Pairs(colluders=C)`: partners share Gaussian noise that mostly cancels in the sum, safe against C colluders.
    """

    clip: float = None  # type: ignore[assignment]  # a number from construction on
    epsilon: float | None = None
    delta: float = 1e-5
    mechanism: str = "laplace"
    round_epsilon: float | None = None
    noise_multiplier: float | None = None
    trust: Trust = NOBODY
    name = "contribution"
    own_options = ("--mechanism", "--noise-rate")
    no_partners = ""
    protects = "all a node contributes"

    @classmethod
    def from_options(cls, options: PrivacyOptions) -> Self:
        if options.budget is not None and not options.noise_rate > 0:
            raise UsageError(
                f"--noise-rate is {options.noise_rate}: with --budget it must be positive (epsilon of a round is budget / rate)"
            )
        round_epsilon = None if options.budget is None else options.budget / options.noise_rate
        total = (_given(options.clip), options.epsilon, options.delta, options.mechanism)
        return cls(*total, round_epsilon, options.noise_multiplier, options.trusted())

    @classmethod
    def defaults(cls, options: PrivacyOptions) -> dict[str, float]:
        usual = {"clip": _usual_clip(MECHANISMS[options.mechanism]), "lr_shared": 0.1, "lr_local": 0.1}
        asked = options.noise_multiplier is not None or options.budget is not None
        return usual if asked else {"epsilon": 3.0, **usual}

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
        _one_of("contribution", epsilon=self.epsilon, **noise)
        _positive(clip=self.clip, epsilon=self.epsilon, **noise)
        _check_delta(self.delta, pure=pure)
        if self.mechanism != Gaussian.name and not isinstance(self.trust, Nobody):
            raise UsageError(
                f"trust is pairs and the mechanism {self.mechanism}: {no_known_cost(self.mechanism)}"
            )

    @property
    def _kind(self) -> type[Mechanism]:
        return MECHANISMS[self.mechanism]

    def noise(self, plan: Plan) -> float:
        if (asked := self.round_epsilon or self.noise_multiplier) is not None:
            return asked
        kind = self._kind

        def event(multiplier: float) -> "Event | DpEvent":
            return kind.of(1 / multiplier if kind.pure else multiplier).event(multiplier)

        multiplier = noise_for(_given(self.epsilon), self.delta, plan.paid, event)
        return 1 / multiplier if kind.pure else multiplier

    def calibrate(self, plan: Plan, noise: float | None = None) -> Calibration:
        mechanism = self._kind.of(self.noise(plan) if noise is None else noise)
        bound = Bounded(clip=plan.lr_shared * self.clip)
        return Calibration(mechanism, bound, partners=self.trust.partners(plan.nodes))

    def who(self) -> str:
        return (
            "everything a node contributes over the whole run, against anybody who sees all messages of all nodes"
            f"{self.trust.who()}: replacing all of the node's data changes little"
        )

    def not_covered(self) -> str:
        return (
            "a node's local parameters, and statistics that its model keeps of its data (BatchNorm), are not noised and must "
            "never be published, nor accuracies computed with them; people whose records lie with several nodes are protected "
            "once per node; several runs on the same data add up; choices made by looking at the data or at test results are "
            f"not counted; the declared size of a node is public ({_DECLARED}){self.trust.not_covered()}"
        )


def no_known_cost(mechanism: str) -> str:
    """Why partners cannot share this noise."""
    return f"a sum of shared {mechanism.title()} noises has no known cost; use gaussian"


def _usual_clip(kind: type[Mechanism]) -> float:
    return 30.0 if kind.norm == 1 else 1.0


@UNITS.register("record")
@dataclass(frozen=True)
class Record(Unit):
    """Protects one training example of one node against an observer of all messages (the usual DP-SGD unit).

    Per-example clipping over shared and local parameters together, Poisson sampling, Gaussian noise on both updates.
    The guarantee is for replacing an example by one with a zero gradient; with fixed declared sizes, adding or removing
    an example means the same. Replacing it by another example costs more: `Privacy.epsilon_replacement`.

    Args:
        epsilon: target total over the planned rounds; or give `noise_multiplier`.
        delta: total failure probability; choose well below 1 / (number of records).
        clip: L2 norm bound on one example's gradient.
        noise_multiplier: standard deviation of the noise over `clip`.
        records_per_user: the most records that one person may have at a node (group privacy).
        trust: `Pairs(colluders=C)`: partners share noise that mostly cancels in the sum, safe against C colluders.
    """

    epsilon: float | None = None
    delta: float = 1e-5
    clip: float = 1.0
    noise_multiplier: float | None = None
    records_per_user: int = 1
    trust: Trust = NOBODY
    name = "record"
    own_options = ("--records-per-user",)
    no_partners = ""
    protects = "one training example"
    per_example = True
    implied_by = (Contribution.name,)
    fixed_mechanism = Gaussian.name

    @classmethod
    def from_options(cls, options: PrivacyOptions) -> Self:
        total = (options.epsilon, options.delta, _given(options.clip), options.noise_multiplier)
        return cls(*total, options.records_per_user, options.trusted())

    @classmethod
    def defaults(cls, options: PrivacyOptions) -> dict[str, float]:
        usual = {"clip": 1.0, "lr_shared": 1.0, "lr_local": 1.0}
        return usual if options.noise_multiplier is not None else {"epsilon": 3.0, **usual}

    def __post_init__(self) -> None:
        _one_of("record", epsilon=self.epsilon, noise_multiplier=self.noise_multiplier)
        _positive(clip=self.clip, epsilon=self.epsilon, noise_multiplier=self.noise_multiplier)
        _check_delta(self.delta)
        if self.records_per_user < 1:
            raise UsageError(f"records_per_user is {self.records_per_user}: it must be 1 or more")

    def noise(self, plan: Plan) -> float:
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        rate, group = max(plan.sampling), self.records_per_user
        return noise_for(_given(self.epsilon), self.delta, plan.paid, gaussian, rate, group)

    def calibrate(self, plan: Plan, noise: float | None = None) -> Calibration:
        multiplier = self.noise(plan) if noise is None else noise
        # divided by the expected batch, never the actual one; the same at all nodes, so that every example weighs the same
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
            f"the declared size of a node is public ({_DECLARED}); a person whose records lie with several nodes, or who owns "
            "more of them than stated, is protected less; several runs on the same data add up; choices made by looking at the "
            f"data or at test results are not counted{self.trust.not_covered()}"
        )


def _one_of(unit: str, **values: float | None) -> None:
    """Refuse both of two ways to say how much noise, and neither."""
    given = [name for name, value in values.items() if value is not None]
    if len(given) != 1:
        found, remedy = ("both are", "leave one out") if given else ("neither is", "give one")
        raise UsageError(f"the unit {unit} takes either {' or '.join(values)}, and {found} given: {remedy}")


def _positive(**values: float | None) -> None:
    """Refuse a value that is not a positive, finite number."""
    for name, value in values.items():
        if value is not None and not (is_number(value) and 0 < value < math.inf):
            raise UsageError(f"{name} is {value!r}: it must be a positive, finite number")


def _check_delta(delta: float, *, pure: bool = False) -> None:
    """Refuse a delta with which the guarantee would mean nothing."""
    if not (is_number(delta) and 0 <= delta < 0.1):
        raise UsageError(
            f"delta is {delta!r}: it is the chance that the guarantee fails; it must lie in [0, 0.1), well below 1 / (number of "
            "records), such as 1e-5"
        )
    if delta == 0 and not pure:
        raise UsageError(
            "delta is 0: Gaussian noise needs a delta above 0, such as 1e-5; Laplace noise works with 0"
        )


def _given(value: float | None) -> float:
    """A value that an earlier check has found."""
    assert value is not None
    return value
