"""A sensitivity that is known before the run: units contribution and record."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpps.errors import UsageError
from dpps.sensitivity.base import Memory, ProtocolConfig, RoundView, Sensitivity, real_sensitivity


@dataclass(frozen=True)
class Bounded(Sensitivity):
    """A bound known beforehand (units contribution and record): no scalar is broadcast, nothing can grow.

    Given all earlier messages, the row before the perturbation is known, so only the perturbation is private. Any two
    admissible perturbations of a node differ by at most `distance`.

    Args:
        distance: how far two perturbations can be apart, in the mechanism's norm; 0 (with clip 0) when only the start values
            are private: the rounds after the first then reveal nothing new and need no noise.
        clip: the protocol itself scales every perturbation down to this norm; None when the caller's mechanism
            bounds one record's share of it (unit record).
        start_distance: bound on the distance of two start rows, charged in round 0; 0 needs a common, public start. It can be checked
            only where all rows are here: elsewhere every node must keep to it by itself.
        largest: the largest norm of an honest node's perturbation where the caller bounds it (unit record):
            rows beyond what it makes possible are refused. Infinite: not known.
        coordinates: how many numbers the mechanism hides, if more than a row has (unit record hides local parameters too).
    """

    distance: float
    clip: float | None = None
    start_distance: float = 0.0
    coordinates: int = 0
    largest: float = math.inf
    norm = None
    needs_double_stochasticity = False
    needs_noise_norms = False
    base_is_public = True
    noise_decays = False

    def __post_init__(self) -> None:
        for name in ("distance", "clip", "start_distance"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise UsageError(f"{name} is {value}: it must be 0 or more, and finite")
        if self.distance == 0 and self.clip != 0:
            raise UsageError(
                "distance is 0: then clip must be 0 too, so that nodes add nothing after the start"
            )

    @property
    def start_is_private(self) -> bool:  # type: ignore[override]
        return self.start_distance > 0

    def start(self, config: ProtocolConfig, s: Tensor) -> Memory:
        if not config.common_start and self.start_distance == 0:
            raise UsageError(
                "the rows start different, so the start values are private and need protection too: "
                "say how far two of them can be apart (start_distance), or start all rows equal"
            )
        if self.start_distance > 0:
            self._check_start(config, s)
        return {}

    def _check_start(self, config: ProtocolConfig, s: Tensor) -> None:
        present = config.topology.present(0)
        if present is not None and not present.all():
            raise UsageError(
                "a node is away in round 0, and private start values are protected in that round only: "
                "let everybody take part in the first round"
            )
        if (
            config.fabric.simulation
            and (apart := real_sensitivity(s, config.mechanism.norm)) > self.start_distance
        ):
            raise UsageError(
                f"two start rows are {apart:.4g} apart, more than start_distance {self.start_distance:g}: raise it or clip them"
            )

    def estimate(self, memory: Memory, view: RoundView) -> float:
        return self.distance * view.rate + (self.start_distance if view.round == 0 else 0.0)

    def admit(self, perturbation: Tensor, norms: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        if self.clip is None:
            return perturbation, norms
        limit = self.clip * rate
        if limit == 0:
            return torch.zeros_like(perturbation), torch.zeros_like(norms)
        # A hair below the limit, so that rounding, in the norm or in the product, cannot carry it above.
        hair = max(1e-6, 4 * torch.finfo(perturbation.dtype).eps)
        factor = (limit * (1 - hair) / norms).clamp(max=1.0)
        factor[factor < torch.finfo(perturbation.dtype).tiny] = 0.0  # too small to be exact in that type
        return perturbation * factor.to(perturbation)[:, None], norms * factor

    def largest_perturbation(self, rate: float) -> float:
        return (self.largest if self.clip is None else self.clip) * rate

    def rounding(self, dimension: int, step: float, norm: int) -> float:
        """Nothing for a clipped perturbation: rounding toward zero lengthens no vector. But adding one example to a sum can
        carry every coordinate over to the next step.

        Where local parameters are hidden along with the row, each of the two parts has a grid of its own, and one example's
        share v of both together, |v| <= 1 in units of what it may add, grows to at most |v| + rho with rho the larger of
        sqrt(coordinates) step / share. Steps are powers of two, so the two rho differ by less than a factor of 2: twice
        one's own covers the larger.
        """
        if self.clip is not None:
            return 0.0
        parts = 2 if self.coordinates > dimension else 1
        return parts * super().rounding(max(dimension, self.coordinates), step, norm)
