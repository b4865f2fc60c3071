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
