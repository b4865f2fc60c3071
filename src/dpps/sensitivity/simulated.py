"""Sensitivities for study: the real distance, a bound that leaks, and a recorder that evaluates others along a run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from torch import Tensor

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


class Recorder:
    """Evaluates sensitivities in every round without using them.

    They look at norms or rows that nodes would have to send without noise: for simulation only. What they remember belongs to
    the protocol's state, so that a failed round leaves it as it was.

    Args:
        watched: sensitivities by names of yours.
    """

    def __init__(self, watched: Mapping[str, Sensitivity]) -> None:
        self.watched = MappingProxyType(dict(watched))
        self.needs_noise_norms = any(each.needs_noise_norms for each in watched.values())

    def start(self, config: ProtocolConfig, s: Tensor) -> dict[str, Memory]:
        """What to remember before round 0, by name."""
        return {name: each.start(config, s) for name, each in self.watched.items()}

    def estimate(self, memories: Mapping[str, Memory], view: RoundView) -> dict[str, float]:
        """The estimates of a round, by name."""
        return {name: each.estimate(memories[name], view) for name, each in self.watched.items()}

    def advance(
        self,
        memories: Mapping[str, Memory],
        view: RoundView,
        released: Released,
        estimates: Mapping[str, float],
    ) -> dict[str, Memory]:
        """What to remember after the round, by name."""
        return {
            name: each.advance(memories[name], view, replace(released, estimate=estimates[name]))
            for name, each in self.watched.items()
        }
