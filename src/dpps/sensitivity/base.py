"""Sensitivity: how far apart two messages of a round can be. The noise is calibrated to it.

A sensitivity is an object with three methods: `start` (what to remember before the first round), `estimate` (the bound S of a
round, from what may be looked at) and `advance` (what to remember after it).
Memory is a dictionary of tensors that belongs to the protocol's state, so a round can be undone and a run
resumed. Your own is ten lines::

    class Constant(Sensitivity):
        def estimate(self, memory, view): return 3.0
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from dpps.errors import UsageError
from dpps.noise import Mechanism
from dpps.registry import Registry
from dpps.topology import Topology
from dpps.transport import Fabric

Memory = Mapping[str, Tensor]


@dataclass(frozen=True)
class ProtocolConfig:
    """What a run is: fixed before the first round."""

    fabric: Fabric
    topology: Topology
    mechanism: Mechanism
    sync_every: int
    dimension: int
    common_start: bool
    """All rows start equal."""


@dataclass(frozen=True)
class RoundView:
    """What an estimator may look at in a round, after the perturbation and before the noise."""

    config: ProtocolConfig
    round: int
    clock: int
    """The round counter of topology and synchronisation (it restarts when the rates decay)."""
    rate: float
    """Factor on the rates, 1 at the start (all rates decay together)."""
    perturbation_norms: Tensor
    """One norm per row held here."""
    half: Tensor
    """The rows themselves. Looking at those of other nodes is for simulation."""

    @cached_property
    def all_norms(self) -> Tensor:
        """The perturbation norms of all nodes: one broadcast number each."""
        return self.config.fabric.gather(self.perturbation_norms)


@dataclass(frozen=True)
class Released:
    """What happened in the round that is over."""

    estimate: float
    """What this sensitivity had estimated."""
    scale: float
    noise_norms: Tensor
    """L1 norm of the noise each row added; zeros where no sensitivity of the run needs them."""
    synchronised: bool
    """Whether all rows are bit-equal now."""
    step: float = 0.0
    """Grid step to which the messages were rounded (0: not rounded)."""


class Sensitivity(ABC):
    """A bound on the distance between two nodes' messages."""

    norm: int | None = 1
    """The norm it bounds; None: whichever the mechanism needs."""
    simulation_only = False
    """Whether it looks at everybody's rows."""
    base_is_public = False
    """Only the perturbation is hidden; the row before it follows from earlier messages. Otherwise rows are compared with each
    other, which needs doubly stochastic weights."""
    start_is_private = False
    """Whether start values are hidden, too: then the protocol must not look whether they happen to be equal."""
    needs_noise_norms = True
    """Whether `advance` looks at the norms of the noise (computing them costs a pass over it)."""
    noise_decays = True
    """The noise rate decays with the other rates, as in the paper (epsilon per round then grows)."""
    own_options: ClassVar[tuple[str, ...]] = ()
    """Options of the command line that not every sensitivity has."""

    @classmethod
    def from_options(cls, options: Any) -> Self:
        """As the command line asks for it; `options` has delta, c_prime and decay."""
        return cls()

    def start(self, config: ProtocolConfig, s: Tensor) -> Memory:
        """The memory before round 0."""
        return {}

    @abstractmethod
    def estimate(self, memory: Memory, view: RoundView) -> float:
        """The sensitivity S of this round. Must not change `memory`."""

    def advance(self, memory: Memory, view: RoundView, released: Released) -> Memory:
        """The memory after the round, as a new dictionary."""
        return memory

    def admit(self, perturbation: Tensor, norms: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        """The perturbation for this round, clipped if the bound depends on it, and its norms."""
        return perturbation, norms

    def largest_perturbation(self, rate: float) -> float:
        """How far an honest node moves its row in a round, at most (L2 norm); infinite: nothing is known."""
        return math.inf

    def rounding(self, dimension: int, step: float, norm: int) -> float:
        """What rounding messages to whole grid steps adds: each coordinate of a difference moves by at most one step."""
        return float(step * dimension ** (1 / norm))

    def growth(self, mechanism: Mechanism, dimension: int) -> float | None:
        """Factor by which the estimate grows per round because of its own noise, if known."""
        return None


SENSITIVITIES: Registry[type[Sensitivity]] = Registry("sensitivity", "dpps.sensitivity")
"""Sensitivities of the unit node-swap by name: what `dpps train --sensitivity` offers."""


def real_sensitivity(rows: Tensor, norm: int = 1) -> float:
    """max over pairs of ||rows_i - rows_j||, in blocks that never hold N^2 d numbers."""
    wide = rows if rows.dtype in (torch.float32, torch.float64) else rows.float()
    largest = 0.0
    for first in range(0, len(rows), 256):
        block = wide[first : first + 256]
        distances = torch.cdist(block, wide[first:], p=norm, compute_mode="donot_use_mm_for_euclid_dist")
        largest = max(largest, float(distances.max()))
    return largest


# Known before the run: units contribution and record


class Known(Sensitivity):
    """A bound known beforehand: no scalar is broadcast, nothing can grow.

    Given all earlier messages, the row before the perturbation is known, so only the perturbation is private. Any two
    admissible perturbations of a node differ by at most `distance`. `Bounded` sees to that itself; `Unclipped` relies on its caller.
    """

    distance: float
    start_distance: float
    norm = None
    needs_noise_norms = False
    base_is_public = True
    noise_decays = False

    @property
    def start_is_private(self) -> bool:  # type: ignore[override]
        return self.start_distance > 0

    def start(self, config: ProtocolConfig, s: Tensor) -> Memory:
        if not config.common_start and self.start_distance == 0:
            raise UsageError(
                "the rows start different, so the start values are private and need protection too: "
                "say how far two of them can be apart (start_distance), or start all rows equal"
            )
        if self.start_distance == 0:
            return {}
        present = config.topology.present(0)
        if present is not None and not present.all():
            raise UsageError(
                "a node is away in round 0, and private start values are protected in that round only: "
                "let everybody take part in the first round"
            )
        apart = real_sensitivity(s, config.mechanism.norm) if config.fabric.simulation else 0.0
        if apart > self.start_distance:
            raise UsageError(
                f"two start rows are {apart:.4g} apart, more than start_distance {self.start_distance:g}: raise it or clip them"
            )
        return {}

    def estimate(self, memory: Memory, view: RoundView) -> float:
        return self.distance * view.rate + (self.start_distance if view.round == 0 else 0.0)


@dataclass(frozen=True)
class Bounded(Known):
    """The protocol clips every update, so replacing one by any other moves a message by at most 2 `clip` (unit contribution).

    Args:
        distance: bound on the distance of two updates, in the mechanism's norm; by default 2 `clip`, and
            never less. A larger one is needed if several nodes change together: 2 `clip` sqrt(2) for two
            nodes in the L2 norm.
        clip: every update is scaled down to this norm. Required. 0 when only the start values are private: then the rounds
            after the first reveal nothing new and need no noise.
        start_distance: bound on the distance of two start rows, charged in round 0; 0 needs a common, public start. It can be checked
            only where all rows are here: elsewhere every node must keep to it by itself.
    """

    distance: float = None  # type: ignore[assignment]  # a number from construction on
    clip: float = None  # type: ignore[assignment]
    start_distance: float = 0.0

    def __post_init__(self) -> None:
        if self.clip is None:
            raise UsageError(
                "clip is missing: no bound on an update holds unless the protocol clips it; give clip=1.0, say (the distance is then 2)"
            )
        _check(clip=self.clip, distance=self.distance, start_distance=self.start_distance)
        if self.distance is None:
            object.__setattr__(self, "distance", 2 * self.clip)  # type: ignore[unreachable]
        if self.distance < 2 * self.clip:
            raise UsageError(
                f"distance is {self.distance} and clip {self.clip}: replacing an update by its opposite moves a message by twice the "
                "clip, so distance must be at least that; leave it out"
            )

    def admit(self, perturbation: Tensor, norms: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        limit = self.clip * rate
        if limit == 0:
            return torch.zeros_like(perturbation), torch.zeros_like(norms)
        # A hair below the limit, so that rounding, in the norm or in the product, cannot carry it above.
        hair = max(1e-6, 4 * torch.finfo(perturbation.dtype).eps)
        factor = (limit * (1 - hair) / norms).clamp(max=1.0)
        factor[factor < torch.finfo(perturbation.dtype).tiny] = 0.0  # too small to be exact in that type
        return perturbation * factor.to(perturbation)[:, None], norms * factor

    def largest_perturbation(self, rate: float) -> float:
        return self.clip * rate

    def rounding(self, dimension: int, step: float, norm: int) -> float:
        """Nothing: rounding toward zero lengthens no vector."""
        return 0.0


@dataclass(frozen=True)
class Unclipped(Known):
    """The caller bounds what one record adds to a perturbation (unit record, whose learner clips every example).

    The protocol checks nothing here, so this is no part of what `dpps` exports: what it charges is true only
    as far as its caller keeps to `distance`.

    Args:
        distance: how far a record can move a perturbation, in the mechanism's norm.
        start_distance: as in `Bounded`.
        coordinates: how many numbers the mechanism hides, if more than a row has (unit record hides local parameters too).
        largest: the largest norm of an honest node's perturbation: rows beyond what it makes possible are refused.
            Infinite: not known.
    """

    distance: float
    start_distance: float = 0.0
    coordinates: int = 0
    largest: float = math.inf

    def __post_init__(self) -> None:
        _check(distance=self.distance, start_distance=self.start_distance)
        if self.distance == 0:
            raise UsageError(
                "distance is 0: nothing would be hidden; use Bounded(clip=0, start_distance=...)"
            )

    def largest_perturbation(self, rate: float) -> float:
        return self.largest * rate

    def rounding(self, dimension: int, step: float, norm: int) -> float:
        """Adding one example to a sum can carry every coordinate over to the next step.

        Where local parameters are hidden along with the row, each of the two parts has a grid of its own, and one example's
        share v of both together, |v| <= 1 in units of what it may add, grows to at most |v| + rho with rho the larger of
        sqrt(coordinates) step / share. Steps are powers of two, so the two rho differ by less than a factor of 2: twice
        one's own covers the larger.
        """
        parts = 2 if self.coordinates > dimension else 1
        return parts * super().rounding(max(dimension, self.coordinates), step, norm)


def _check(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not 0 <= value < math.inf:
            raise UsageError(f"{name} is {value}: it must be 0 or more, and finite")
