"""What noise is added to a message, and what that costs.

A mechanism turns a sensitivity into a scale and says how unit-scale noise is drawn. Your own is a subclass with three methods::

    class Triangular(Mechanism):
        norm, name = 1, "triangular"
        def scale(self, sensitivity): return 3.0 * sensitivity
        def draw(self, stream, out): out[...] = stream.random(out.shape) - stream.random(out.shape)
        def epsilon(self, sensitivity, scale): return math.inf     # triangular noise has no pure epsilon
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from dpps.errors import UsageError


class Mechanism(ABC):
    """Additive noise, independent per coordinate, of a scale proportional to the sensitivity."""

    name: str
    norm: int
    """The norm (1 or 2) in which this mechanism needs the sensitivity."""

    @abstractmethod
    def scale(self, sensitivity: float) -> float:
        """The scale of the noise for a message of this sensitivity."""

    @abstractmethod
    def draw(self, stream: np.random.Generator, out: np.ndarray) -> None:
        """Fill `out`, one node's row, with random numbers from `stream`; `shape` makes unit noise of them."""

    def shape(self, block: Tensor) -> Tensor:
        """Turn a block of drawn rows into unit-scale noise, all rows at once. Default: they already are."""
        return block

    def epsilon(self, sensitivity: float, scale: float) -> float:
        """The pure epsilon of one message; infinite where the mechanism has none."""
        return math.inf

    def multiplier(self, sensitivity: float, scale: float) -> float:
        """Noise scale over sensitivity: the noise multiplier of a Gaussian message."""
        return scale / sensitivity if sensitivity > 0 else math.inf


@cache
def _almost_minus_one(dtype: torch.dtype) -> Tensor:
    """Half a step of that type above -1."""
    return torch.tensor(torch.finfo(dtype).eps / 2 - 1, dtype=dtype, device="cpu")


@dataclass(frozen=True)
class Laplace(Mechanism):
    r"""The paper's noise, $\gamma_n n$ with $n \sim Lap(0, S/b)$ per coordinate: Lemma 1 with $\varepsilon = b/\gamma_n$.

    Args:
        budget: b, the paper's privacy budget hyperparameter.
        noise_rate: $\gamma_n$. Epsilon of one round is budget / noise_rate; b=5 with the paper's 0.001 is 5,000.
    """

    budget: float
    noise_rate: float = 1.0
    name, norm = "laplace", 1

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

    def draw(self, stream: np.random.Generator, out: np.ndarray) -> None:
        stream.random(dtype=out.dtype, out=out)

    def shape(self, block: Tensor) -> Tensor:
        # v = 2u - 1 + half a step lies strictly inside (-1, 1), symmetric, and 1 - |v| is exact: its logarithm is finite.
        torch.add(_almost_minus_one(block.dtype), block, alpha=2, out=block)
        magnitude = block.abs()
        torch.sub(1, magnitude, out=magnitude).log_()
        return torch.copysign(
            magnitude, block, out=block
        )  # takes the sign of v and only the size of the logarithm

    def epsilon(self, sensitivity: float, scale: float) -> float:
        if sensitivity == 0:
            return 0.0
        return sensitivity / scale if scale > 0 else math.inf


@dataclass(frozen=True)
class Gaussian(Mechanism):
    """Gaussian noise of deviation `noise_multiplier` x the L2 sensitivity; (epsilon, delta) comes from the accountant."""

    noise_multiplier: float
    name, norm = "gaussian", 2

    def __post_init__(self) -> None:
        if not 0 < self.noise_multiplier < math.inf:
            raise UsageError(f"noise multiplier is {self.noise_multiplier}: it must be positive and finite")

    def scale(self, sensitivity: float) -> float:
        return self.noise_multiplier * sensitivity

    def draw(self, stream: np.random.Generator, out: np.ndarray) -> None:
        stream.standard_normal(dtype=out.dtype, out=out)


@dataclass(frozen=True)
class NoNoise(Mechanism):
    """Plain push-sum: messages leave as they are. Nothing is private."""

    name, norm = "none", 1

    def scale(self, sensitivity: float) -> float:
        return 0.0

    def draw(self, stream: np.random.Generator, out: np.ndarray) -> None:
        out.fill(0)
