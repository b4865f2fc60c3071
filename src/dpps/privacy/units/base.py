"""What every unit is, what it needs to know of a run, and what it makes of that."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from dpps.errors import UsageError, is_number
from dpps.noise.mechanisms import MECHANISMS, Mechanism
from dpps.noise.source import NoiseSource
from dpps.privacy.accountant import Charge, Total, label, total
from dpps.privacy.partners import MEAN_VARIANCE, NOBODY, Nobody, Pairs, Partners, Trust
from dpps.registry import Registry
from dpps.sensitivity import Sensitivity

DECLARED = "unless declared otherwise, how many examples it held when the run first started"


@dataclass(frozen=True)
class Plan:
    """What a unit needs to know of a run before it starts."""

    rounds: Sequence[tuple[float, int]]
    """(factor on the rates, how many rounds), in order."""
    lr_shared: float
    batch_size: float
    """By which sums of gradients are divided: what a node is expected to draw, or the mean over all nodes where they differ."""
    sampling: Sequence[float] = (1.0,)
    """Every node's chance that one of its examples joins a round (Poisson sampling)."""
    spare: int = 0
    """Rounds paid for beyond these."""
    coordinates: int = 0
    """Parameters of a node, shared and local."""
    declared_sizes: Sequence[int] = ()
    """How many examples every node said it holds, in public and before the start: rounds and sampling rates follow from it."""
    lr_local: float = 0.0
    batches: Sequence[float] = ()
    """Every node's expected batch where they differ; empty: all have `batch_size`."""

    @property
    def largest_batch(self) -> float:
        """Of all nodes' expected batches."""
        return max(self.batches, default=self.batch_size)

    def batch_of(self, node: int) -> float:
        """What this node is expected to draw in a round."""
        return self.batches[node] if self.batches else self.batch_size

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return len(self.declared_sizes)

    @property
    def count(self) -> int:
        """The number of rounds."""
        return sum(count for _, count in self.rounds)

    @property
    def paid(self) -> int:
        """The number of rounds that a target epsilon is spread over."""
        return self.count + self.spare

    def after(self, done: int) -> "Plan":
        """What is left when `done` rounds are; none is spare."""
        left, passed = [], done
        for rate, count in self.rounds:
            if count > passed:
                left.append((rate, count - passed))
            passed = max(0, passed - count)
        return replace(self, rounds=tuple(left), spare=0)


@dataclass(frozen=True)
class Calibration:
    """What a run must do to keep a unit's promise."""

    mechanism: Mechanism
    sensitivity: Sensitivity
    gradient_clip: float | None = None
    """The learner scales the whole shared gradient down to this L1 norm (Algorithm 2, line 5)."""
    example_clip: float | None = None
    """The learner scales every example's gradient down to this L2 norm and noises the local update too."""
    sampling: float = 1.0
    """The largest chance of an example to join a round."""
    rates: Sequence[float] = ()
    """Every node's own such chance, where each chose its batch and is charged for it; empty: all are charged for the largest."""
    partners: Partners | None = None
    """Who shares noise that cancels with whom; None: nobody."""

    def source(self, noise: NoiseSource) -> NoiseSource:
        """Where the messages' noise comes from: with partners, part of it is shared with them."""
        return noise if self.partners is None else noise.with_partners(self.partners)


@dataclass(frozen=True)
class PrivacyOptions:
    """What `dpps train` and `dpps plan` can be told about privacy; their help texts say what each option means."""

    epsilon: float | None = None
    delta: float = 1e-5
    clip: float | None = None
    records_per_user: int = 1
    mechanism: str = "laplace"
    noise_multiplier: float | None = None
    trust: str = "nobody"
    colluders: int | None = None
    mean_variance: float | None = None
    budget: float | None = None
    noise_rate: float = 1e-3
    sensitivity: str = "certified"
    c_prime: float = 0.78
    decay: float = 0.55

    @classmethod
    def of(cls, options: Any) -> Self:
        """Those among the options of a command; what it does not have stays at its default."""
        found: dict[str, Any] = {f.name: getattr(options, f.name, f.default) for f in fields(cls)}
        return cls(**found)

    def trusted(self) -> Trust:
        """What --trust, --colluders and --mean-variance mean."""
        if self.trust == "nobody":
            return Nobody()
        return Pairs(self.colluders, MEAN_VARIANCE if self.mean_variance is None else self.mean_variance)


class Unit(ABC):
    """Who is protected, and how that is bought."""

    name: str
    epsilon: float | None
    delta: float
    clip: float | None
    records_per_user = 1
    trust: Trust = NOBODY
    own_options: ClassVar[tuple[str, ...]] = ()
    """Options of the command line that not every unit has."""
    no_partners: ClassVar[str] = "it has no noise that cancels"
    """Why `--trust pairs` does not go with it; empty where it does."""
    no_peers: ClassVar[str] = ""
    """Why it does not work between organisations that come and go; empty where it does."""
    protects: ClassVar[str] = ""
    """In a few words, for headings: what is protected; empty: its name is shown."""
    per_example: ClassVar[bool] = False
    """Whether it protects one example: each is clipped and drawn by itself, and nodes may draw at rates of their own."""
    has_total: ClassVar[bool] = True
    """Whether its guarantee is about the run as a whole; otherwise totals are shown as a plain sum of rounds."""
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
        """What these options mean when they are left out: epsilon, clip, budget, lr_shared and lr_local."""
        return {}

    @classmethod
    def usual(cls) -> Self:
        """With the defaults of the command line."""
        options = PrivacyOptions()
        known = {f.name for f in fields(PrivacyOptions)}
        filled: dict[str, Any] = {k: v for k, v in cls.defaults(options).items() if k in known}
        return cls.from_options(replace(options, **filled))

    @classmethod
    def check_options(cls, options: PrivacyOptions) -> None:
        """Refuse options that would be ignored: somebody means something by them."""
        name = options.mechanism if "--mechanism" in cls.own_options else cls.fixed_mechanism
        if name is None:
            return
        pure = MECHANISMS[name].pure
        if pure and options.noise_multiplier is not None:
            raise UsageError("--noise-multiplier belongs to Gaussian noise: use --budget or --epsilon here")
        if not pure and options.budget is not None:
            raise UsageError("--budget belongs to Laplace noise: use --noise-multiplier or --epsilon here")

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

    def replacement(self, charges: Sequence[Charge], *, distance: float = 0.0) -> Total | None:
        """The cost where what is protected is replaced by something else of its kind; None: that is what `total` is about."""
        return None

    def promise(self, total: Total, rounds: int) -> str:
        """In plain words: what the total is worth."""
        return f"Guarantee: {label(total.epsilon)}, delta {total.delta:g}, over {rounds} rounds (by {total.accountant})."

    @abstractmethod
    def who(self) -> str:
        """In plain words: who is hidden, and from whom."""

    @abstractmethod
    def not_covered(self) -> str:
        """In plain words: what is not covered."""


UNITS: Registry[type[Unit]] = Registry("unit", "dpps.privacy.units")
"""Units by name: what `dpps train --unit` offers beside none."""


def one_of(unit: str, **values: float | None) -> None:
    """Refuse both of two ways to say how much noise, and neither."""
    given = [name for name, value in values.items() if value is not None]
    if len(given) != 1:
        found, remedy = ("both are", "leave one out") if given else ("neither is", "give one")
        raise UsageError(f"the unit {unit} takes either {' or '.join(values)}, and {found} given: {remedy}")


def positive(**values: float | None) -> None:
    """Refuse a value that is not a positive, finite number."""
    for name, value in values.items():
        if value is not None and not (is_number(value) and 0 < value < math.inf):
            raise UsageError(f"{name} is {value!r}: it must be a number, positive and finite")


def check_delta(delta: float, *, pure: bool = False) -> None:
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


def given(value: float | None) -> float:
    """The value of what `one_of` has found to be there."""
    assert value is not None
    return value
