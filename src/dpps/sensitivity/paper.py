"""The paper's estimate (Remark 1), and what is compared with it in simulations."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from dpps.errors import UsageError
from dpps.noise import Laplace, Mechanism
from dpps.sensitivity.base import (
    SENSITIVITIES,
    Memory,
    ProtocolConfig,
    Released,
    RoundView,
    Sensitivity,
    real_sensitivity,
)
from dpps.sensitivity.certified import Unrolled, grid_rounding


@SENSITIVITIES.register("paper")
@dataclass(frozen=True)
class Paper(Sensitivity):
    r"""Remark 1 of the paper.

    $$S_i^{(0)} = 2C'\|s_i^{(0)}\|_1 + 2C'\|\varepsilon_i^{(0)}\|_1, \qquad
      S_i^{(t)} = \lambda S_i^{(t-1)} + 2C'(\|\varepsilon_i^{(t)}\|_1 + \lambda\gamma_n\|n_i^{(t-1)}\|_1),$$
    and S is the maximum over nodes. The first term is dropped when all rows start equal; a synchronisation resets the recursion.

    C' and lambda are tuned by hand, so this is an estimate, not a bound: the real distance sometimes
    exceeds it. And S is
    broadcast, so the noise norm in it leaks. Use `Certified` for a bound with a proof.

    Args:
        c_prime: C' > 0.
        decay: lambda in (0, 1).
        recursion: "network" feeds the network's maximum S back, as the authors' code does; "node" each node's own, as printed.
    """

    c_prime: float
    decay: float
    recursion: Literal["network", "node"] = "network"
    own_options: ClassVar[tuple[str, ...]] = ("--c-prime", "--decay")

    @classmethod
    def from_options(cls, options: Any) -> Self:
        return cls(options.c_prime, options.decay)

    def __post_init__(self) -> None:
        if not 0 < self.c_prime < math.inf:
            raise UsageError(f"c_prime is {self.c_prime}: it must be positive (the paper uses 0.78 to 0.95)")
        if not 0 < self.decay < 1:
            raise UsageError(
                f"decay is {self.decay}: it must lie between 0 and 1, exclusive (the paper uses 0.53 to 0.7)"
            )
        if self.recursion not in ("network", "node"):
            raise UsageError(f"recursion is {self.recursion!r}: choose 'network' or 'node'")

    def start(self, config: ProtocolConfig, s: Tensor) -> Memory:
        norms = s.abs().sum(1).to("cpu", torch.float64)
        return {"carried": torch.zeros_like(norms) if config.common_start else 2 * self.c_prime * norms}

    def _own(self, memory: Memory, view: RoundView) -> Tensor:
        return memory["carried"] + 2 * self.c_prime * view.perturbation_norms

    def estimate(self, memory: Memory, view: RoundView) -> float:
        return view.config.fabric.max(self._own(memory, view))

    def advance(self, memory: Memory, view: RoundView, released: Released) -> Memory:
        if released.synchronised:
            return {"carried": torch.zeros_like(memory["carried"])}
        own = self._own(memory, view)
        before = torch.full_like(own, released.estimate) if self.recursion == "network" else own
        return {"carried": self.decay * (before + 2 * self.c_prime * released.noise_norms)}

    def growth(self, mechanism: Mechanism, dimension: int) -> float | None:
        """lambda (1 + 2 C' gamma_n d / b): E||n||_1 = d S / b feeds back into S."""
        if not isinstance(mechanism, Laplace):
            return None
        return self.decay * (1 + 2 * self.c_prime * mechanism.noise_rate * dimension / mechanism.budget)


# For study: the real distance, and a bound that leaks


@SENSITIVITIES.register("oracle")
@dataclass(frozen=True)
class Oracle(Sensitivity):
    """The real distance, max over pairs of ||s_i - s_j||: needs everybody's rows, so for simulation only."""

    norm, simulation_only, needs_noise_norms = None, True, False

    def estimate(self, memory: Memory, view: RoundView) -> float:
        return real_sensitivity(view.half, view.config.mechanism.norm)


@SENSITIVITIES.register("worst-case")
@dataclass(frozen=True)
class WorstCase(Unrolled):
    r"""A bound that always holds: noise enters with $2\,\tau(\Phi) \max_l \|n_l\|_1$, tau of Dobrushin.

    It needs the largest of the exact noise norms to be broadcast, and that leaks: message and noise norm
    together can identify the value that the noise was to hide. For study; to protect, use `Certified`.
    """

    def _noise(self, view: RoundView, released: Released) -> tuple[float, float]:
        return view.config.fabric.max(released.noise_norms) + grid_rounding(view, released), 0.0

    def _factor(self, view: RoundView, rounds: int) -> float:
        return 0.0
