"""What noise is added to a message, and what that costs.

A mechanism owns its scale, its samplers (seeded, and from a keystream) and its privacy cost; nobody else asks for its name.
docs/architecture.md adds one.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from dpps.errors import UsageError
from dpps.noise.events import NOTHING, Event, gaussian, laplace, non_private
from dpps.noise.sampler import Keystream, discrete_gaussian_slack
from dpps.registry import Registry

if TYPE_CHECKING:
    from dp_accounting import DpEvent


class Mechanism(ABC):
    """Additive noise, independent per coordinate, of a scale proportional to the sensitivity."""

    name: str
    norm: int
    """The norm (1 or 2) in which this mechanism needs the sensitivity."""
    pure: ClassVar[bool] = False
    """Whether a message has a pure epsilon, which is 1 / noise_multiplier."""

    @classmethod
    def of(cls, noise: float) -> Self:
        """The mechanism with this much noise: the pure epsilon of a message where it is `pure`, else the noise multiplier."""
        raise UsageError(
            f"{cls.__name__} noise cannot be asked for by name: define the class method of(cls, noise)"
        )

    @abstractmethod
    def scale(self, sensitivity: float) -> float:
        """The scale of the noise for a message of this sensitivity."""

    def standard_deviation(self, scale: float) -> float:
        """Standard deviation of each coordinate of noise of this scale; infinite: not known."""
        return math.inf

    @abstractmethod
    def draw(self, stream: np.random.Generator, out: np.ndarray) -> None:
        """Fill `out`, one node's row, with random numbers from `stream`; `shape` makes unit noise of them."""

    def shape(self, block: Tensor) -> Tensor:
        """Turn a block of drawn rows into unit-scale noise, all rows at once. Default: they already are."""
        return block

    def event(self, noise_multiplier: float) -> "Event | DpEvent":
        """What a message costs whose noise has `noise_multiplier` times the sensitivity as its scale.

        Additive noise is judged by that ratio alone. The accountant composes these events, so a right event here is a right
        total everywhere; `non_private()` says that nothing is claimed.
        """
        raise UsageError(
            f"{type(self).__name__} noise states no cost: define event(self, noise_multiplier) and return an event of "
            "dp-accounting, or dpps.noise.non_private() if nothing is claimed"
        )

    def cost(self, sensitivity: float, scale: float) -> Event:
        """What one message of this sensitivity costs under noise of this scale."""
        if sensitivity == 0:
            return Event(NOTHING)
        found = Event.of(self.event(scale / sensitivity)) if scale > 0 else non_private()
        if found.free and math.isfinite(scale / sensitivity):
            raise UsageError(
                f"{type(self).__name__} noise says that a message of sensitivity {sensitivity:g} costs nothing: its event must be the "
                "cost of its noise, or dpps.noise.non_private() if nothing is claimed"
            )
        return found

    def epsilon(self, sensitivity: float, scale: float) -> float:
        """The pure epsilon of one message; infinite where the mechanism has none."""
        pure = self.cost(sensitivity, scale).pure_epsilon
        return math.inf if pure is None else pure

    def draw_whole(self, keystream: Keystream, steps: float, size: int) -> np.ndarray:
        """Exact whole-number noise of a scale of `steps` grid steps, for messages that really leave."""
        raise UsageError(
            f"{type(self).__name__} noise has no exact sampler: define draw_whole, or use Laplace or Gaussian noise"
        )

    def sampler_distance(self, steps: float, coordinates: int, rounds: int) -> float:
        """Total variation distance between what `draw_whole` gives and the noise that `event` stands for."""
        return 0.0


MECHANISMS: Registry[type[Mechanism]] = Registry("mechanism", "dpps.noise")
"""Mechanisms by name: what `Contribution(mechanism=...)` and `dpps train --mechanism` offer."""


@cache
def _almost_minus_one(dtype: torch.dtype) -> Tensor:
    """Half a step of that type above -1."""
    return torch.tensor(torch.finfo(dtype).eps / 2 - 1, dtype=dtype, device="cpu")


@MECHANISMS.register("laplace")
@dataclass(frozen=True)
class Laplace(Mechanism):
    r"""The paper's noise, $\gamma_n n$ with $n \sim Lap(0, S/b)$ per coordinate: Lemma 1 with $\varepsilon = b/\gamma_n$.

    Args:
        budget: b, the paper's privacy budget hyperparameter.
        noise_rate: $\gamma_n$. Epsilon of one round is budget / noise_rate; b=5 with the paper's 0.001 is 5,000.
    """

    budget: float
    noise_rate: float = 1.0
    name, norm, pure = "laplace", 1, True

    @classmethod
    def of(cls, noise: float) -> Self:
        return cls(budget=noise)

    def __post_init__(self) -> None:
        if not 0 < self.budget < math.inf:
            raise UsageError(
                f"budget is {self.budget}: it must be positive and finite (the paper uses 1 to 5)"
            )
        if not 0 <= self.noise_rate < math.inf:
            raise UsageError(
                f"noise rate is {self.noise_rate}: it must be 0 (no noise) or more (the paper uses 0.001)"
            )

    def scale(self, sensitivity: float) -> float:
        return self.noise_rate * sensitivity / self.budget

    def standard_deviation(self, scale: float) -> float:
        return math.sqrt(2) * scale

    def draw(self, stream: np.random.Generator, out: np.ndarray) -> None:
        stream.random(dtype=out.dtype, out=out)

    def shape(self, block: Tensor) -> Tensor:
        # v = 2u - 1 + half a step lies strictly inside (-1, 1), symmetric, and 1 - |v| is exact: its logarithm is finite.
        torch.add(_almost_minus_one(block.dtype), block, alpha=2, out=block)
        magnitude = block.abs()
        torch.sub(1, magnitude, out=magnitude).log_()
        # takes the sign of v and only the size of the logarithm
        return torch.copysign(magnitude, block, out=block)

    def event(self, noise_multiplier: float) -> Event:
        return laplace(noise_multiplier)

    def draw_whole(self, keystream: Keystream, steps: float, size: int) -> np.ndarray:
        return keystream.discrete_laplace(steps, size)


@MECHANISMS.register("gaussian")
@dataclass(frozen=True)
class Gaussian(Mechanism):
    """Gaussian noise of standard deviation `noise_multiplier` x the L2 sensitivity; (epsilon, delta) comes from the accountant."""

    noise_multiplier: float
    name, norm = "gaussian", 2

    @classmethod
    def of(cls, noise: float) -> Self:
        return cls(noise_multiplier=noise)

    def __post_init__(self) -> None:
        if not 0 < self.noise_multiplier < math.inf:
            raise UsageError(f"noise multiplier is {self.noise_multiplier}: it must be positive and finite")

    def scale(self, sensitivity: float) -> float:
        return self.noise_multiplier * sensitivity

    def standard_deviation(self, scale: float) -> float:
        return scale

    def draw(self, stream: np.random.Generator, out: np.ndarray) -> None:
        stream.standard_normal(dtype=out.dtype, out=out)

    def event(self, noise_multiplier: float) -> Event:
        return gaussian(noise_multiplier)

    def draw_whole(self, keystream: Keystream, steps: float, size: int) -> np.ndarray:
        return keystream.discrete_gaussian(steps, size)

    def sampler_distance(self, steps: float, coordinates: int, rounds: int) -> float:
        return discrete_gaussian_slack(steps, coordinates, rounds)


@dataclass(frozen=True)
class NoNoise(Mechanism):
    """No noise: plain push-sum. Nothing is private."""

    name, norm = "none", 1

    def scale(self, sensitivity: float) -> float:
        return 0.0

    def standard_deviation(self, scale: float) -> float:
        return 0.0

    def draw(self, stream: np.random.Generator, out: np.ndarray) -> None:
        out.fill(0)

    def event(self, noise_multiplier: float) -> Event:
        return non_private()
