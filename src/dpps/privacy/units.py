"""Who is protected: the three privacy units. They differ only in where the sensitivity comes from.

A unit turns what a user says (noise parameters, or a target epsilon and delta) and the plan of a run into `Terms`: the
mechanism, the sensitivity and the clipping that the run must keep to.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from dpps.errors import UsageError, unknown
from dpps.mechanisms import Gaussian, Laplace, Mechanism
from dpps.privacy.accountant import Charge, Total, label, noise_for, total
from dpps.sensitivity import Bounded, Certified, Sensitivity

UNITS = ("node-swap", "contribution", "record", "none")


@dataclass(frozen=True)
class Plan:
    """What a unit needs to know of a run before it starts."""

    rounds: Sequence[tuple[float, int]]
    """(factor on the rates, how many rounds), in order."""
    lr_shared: float
    batch_size: int
    sampling: Sequence[float] = (1.0,)
    """Every node's chance that one of its examples joins a round (Poisson sampling)."""
    spare: int = 0
    """Rounds paid for beyond these."""
    coordinates: int = 0
    """Parameters of a node, shared and local."""

    @property
    def count(self) -> int:
        """The number of rounds."""
        return sum(count for _, count in self.rounds)

    @property
    def paid(self) -> int:
        """The number of rounds that a target epsilon is spread over."""
        return self.count + self.spare


@dataclass(frozen=True)
class Terms:
    """What a run must do to keep a unit's promise."""

    mechanism: Mechanism
    sensitivity: Sensitivity
    gradient_clip: float | None = None
    """The learner scales the whole shared gradient down to this L1 norm (Algorithm 2, line 5)."""
    example_clip: float | None = None
    """The learner scales every example's gradient down to this L2 norm and noises the local update too."""
    sampling: float = 1.0
    """The largest chance of an example to join a round."""


class Unit(ABC):
    """Who is protected, and how that is bought."""

    name: str
    delta: float
    records_per_user = 1

    @abstractmethod
    def terms(self, plan: Plan) -> Terms:
        """What a run of this plan must do."""

    def total(self, charges: Sequence[Charge], *, distance: float = 0.0) -> Total:
        """The cost of all messages of one node, from its ledger."""
        return total(charges, self.delta, self.records_per_user, distance=distance)

    def promise(self, total: Total, rounds: int) -> str:
        """In plain words: what the total is worth."""
        return f"Guarantee: {label(total.epsilon)}, delta {total.delta:g}, over {rounds} rounds (by {total.accountant})."

    @abstractmethod
    def who(self) -> str:
        """In plain words: who is hidden, and from whom."""

    @abstractmethod
    def limits(self) -> str:
        """In plain words: what is not covered."""


@dataclass(frozen=True)
class NodeSwap(Unit):
    r"""The paper's unit (Definitions 2 to 5): which node sent a message. Laplace noise, $b/\gamma_n$ a round.

    Args:
        budget: b. Left out, it is solved from `epsilon`, the wanted sum over all rounds.
        noise_rate: $\gamma_n$.
        sensitivity: `Certified()` (a bound that holds with probability 1 - delta), `WorstCase()`, `Paper(c_prime, decay)`
            (tuned by hand), or `Oracle()` (simulation only).
        clip: the L1 norm to which the shared gradient is clipped; None leaves it.
        epsilon: wanted total.
    """

    budget: float | None = None
    noise_rate: float = 1e-3
    sensitivity: Sensitivity = field(default_factory=Certified)
    clip: float | None = None
    epsilon: float | None = None
    name = "node-swap"

    def __post_init__(self) -> None:
        _one_of("node-swap", budget=self.budget, epsilon=self.epsilon)
        _positive(clip=self.clip, epsilon=self.epsilon)

    @property
    def delta(self) -> float:  # type: ignore[override]
        return getattr(self.sensitivity, "delta", 0.0)

    def terms(self, plan: Plan) -> Terms:
        budget = self.budget
        if budget is None:
            assert self.epsilon is not None
            # epsilon = sum over rounds of b / (gamma_n rate): the noise rate decays with the other rates
            spare = plan.spare / plan.rounds[-1][0]
            budget = (
                self.epsilon * self.noise_rate / (spare + sum(count / rate for rate, count in plan.rounds))
            )
        return Terms(Laplace(budget, self.noise_rate), self.sensitivity, gradient_clip=self.clip)

    def total(self, charges: Sequence[Charge], *, distance: float = 0.0) -> Total:
        plain = total(charges, 0.0)  # the noise scale depends on the data, so only the plain sum stands
        return Total(plain.epsilon, self.delta, plain.accountant, plain.epsilon_sum, plain.by_method)

    def promise(self, total: Total, rounds: int) -> str:
        return (
            f"No guarantee for the run as a whole: the epsilons of {rounds} rounds add up to {label(total.epsilon)}, delta "
            f"{total.delta:g}, and each of them holds for its own round only."
        )

    def who(self) -> str:
        return (
            "which node sent a message, against a receiver whom the channel does not tell (the paper's Definitions 2 to 5; in a "
            "distributed run the connection does tell)"
        )

    def limits(self) -> str:
        tuned = type(self.sensitivity).__name__ in ("Paper", "Oracle")
        proof = "the sensitivity is tuned by hand or measured, not proven; " if tuned else ""
        norms = "" if isinstance(self.sensitivity, Certified) else " and the norm of its noise"
        return (
            f"{proof}the sensitivity depends on the data, and the scalar every node broadcasts reveals the norm of its "
            f"update{norms}; no training example and no node's whole contribution is protected; the plain sum over "
            "rounds is no proven total (docs/audit.md shows a case above it); how many examples a node holds is public"
        )


@dataclass(frozen=True)
class Contribution(Unit):
    """All that one node ever contributes, against an observer of all messages (node-level, local differential privacy).

    Each round's private part is -lr_shared g with ||g|| <= clip; replacing all of a node's data moves it by at most
    2 lr_shared clip, whatever the model. Give `epsilon` (and `delta`) for the whole run, or the noise of a round.

    Args:
        clip: norm bound on the shared gradient: L1 for Laplace noise, L2 for Gaussian.
        epsilon: wanted total over the planned rounds.
        delta: total failure probability; 0 with Laplace means plain summation.
        mechanism: "laplace" or "gaussian".
        round_epsilon: Laplace: epsilon of one round.
        noise_multiplier: Gaussian: deviation over sensitivity.
    """

    clip: float
    epsilon: float | None = None
    delta: float = 1e-5
    mechanism: Literal["laplace", "gaussian"] = "laplace"
    round_epsilon: float | None = None
    noise_multiplier: float | None = None
    name = "contribution"

    def __post_init__(self) -> None:
        if self.mechanism not in ("laplace", "gaussian"):
            raise unknown("mechanism", self.mechanism, ("laplace", "gaussian"))
        noise = (
            {"round_epsilon": self.round_epsilon}
            if self.mechanism == "laplace"
            else {"noise_multiplier": self.noise_multiplier}
        )
        other = self.noise_multiplier if self.mechanism == "laplace" else self.round_epsilon
        if other is not None:
            raise UsageError("round_epsilon belongs to Laplace noise and noise_multiplier to Gaussian noise")
        _one_of("contribution", epsilon=self.epsilon, **noise)
        _positive(clip=self.clip, epsilon=self.epsilon, **noise)
        _check_delta(self.delta, self.mechanism)

    def terms(self, plan: Plan) -> Terms:
        mechanism: Mechanism
        if self.mechanism == "laplace":
            one = self.round_epsilon or noise_for(_given(self.epsilon), self.delta, plan.paid, "laplace")
            mechanism = Laplace(budget=one)
        else:
            mechanism = Gaussian(
                self.noise_multiplier or noise_for(_given(self.epsilon), self.delta, plan.paid, "gaussian")
            )
        step = plan.lr_shared * self.clip
        return Terms(mechanism, Bounded(distance=2 * step, clip=step))

    def who(self) -> str:
        return (
            "everything a node contributes over the whole run, against anybody who sees all messages of all nodes: "
            "replacing all of the node's data changes little"
        )

    def limits(self) -> str:
        return (
            "a node's local parameters are trained without noise and must never be published; people whose records lie with "
            "several nodes are protected once per node; several runs on the same data add up; how many examples a node holds is "
            "public"
        )


@dataclass(frozen=True)
class Record(Unit):
    """One training example of one node, against an observer of all messages (the usual DP-SGD unit).

    Per-example clipping over shared and local parameters together, Poisson sampling, Gaussian noise on both updates.

    Args:
        epsilon: wanted total over the planned rounds; or give `noise_multiplier`.
        delta: total failure probability; choose well below 1 / (number of records).
        clip: L2 norm bound on one example's gradient.
        noise_multiplier: deviation of the noise over `clip`.
        records_per_user: how many records one person may own at a node (group privacy).
    """

    epsilon: float | None = None
    delta: float = 1e-5
    clip: float = 1.0
    noise_multiplier: float | None = None
    records_per_user: int = 1
    name = "record"

    def __post_init__(self) -> None:
        _one_of("record", epsilon=self.epsilon, noise_multiplier=self.noise_multiplier)
        _positive(clip=self.clip, epsilon=self.epsilon, noise_multiplier=self.noise_multiplier)
        _check_delta(self.delta, "gaussian")
        if self.records_per_user < 1:
            raise UsageError(f"records_per_user is {self.records_per_user}: it must be 1 or more")

    def terms(self, plan: Plan) -> Terms:
        q = max(plan.sampling)
        multiplier = self.noise_multiplier or noise_for(
            _given(self.epsilon), self.delta, plan.paid, "gaussian", sampling=q, group=self.records_per_user
        )
        share = (
            plan.lr_shared * self.clip / plan.batch_size
        )  # divided by the expected batch, never the actual one
        return Terms(
            Gaussian(multiplier),
            Bounded(distance=share, coordinates=plan.coordinates),
            example_clip=self.clip,
            sampling=q,
        )

    def who(self) -> str:
        owned = (
            f"all of a person's records (up to {self.records_per_user})"
            if self.records_per_user > 1
            else "one training example"
        )
        return (
            f"{owned} of one node, against anybody who sees all messages of all nodes and every node's final model: "
            "adding or removing it changes little"
        )

    def limits(self) -> str:
        return (
            "how many examples a node holds is public; a person whose records lie with several nodes, or who owns more of them "
            "than stated, is protected less; several runs on the same data add up; choices made by looking at the data or "
            "at test results are not counted"
        )


def _one_of(unit: str, **values: float | None) -> None:
    given = [name for name, value in values.items() if value is not None]
    if len(given) != 1:
        found = "both" if given else "neither"
        raise UsageError(f"the unit {unit} takes either {' or '.join(values)}, and {found} was given")


def _positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{name} is {value}: it must be positive and finite")


def _check_delta(delta: float, mechanism: str) -> None:
    if not 0 <= delta < 1:
        raise UsageError(f"delta is {delta}: it must lie in [0, 1), well below 1 / (number of records)")
    if delta == 0 and mechanism == "gaussian":
        raise UsageError(
            "delta is 0: Gaussian noise needs a delta above 0, such as 1e-5; Laplace noise works with 0"
        )


def _given(epsilon: float | None) -> float:
    assert epsilon is not None
    return epsilon
