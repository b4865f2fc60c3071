"""Where noise comes from: seeded streams (simulation and tests). `dpps.secure` has the source for real deployments."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpps.mechanisms import Mechanism
from dpps.streams import NOISE, Streams, fresh_seed

_BLOCK = 1 << 17  # numbers shaped at a time: they stay in the processor's cache


@dataclass(frozen=True)
class Outgoing:
    """What is to be released by the rows held here.

    `half` = `s` + `perturbation` is overwritten by the message. `base_is_public` says that `s` follows from earlier messages
    (units contribution and record), so only the perturbation has to be hidden.
    """

    s: Tensor
    perturbation: Tensor
    half: Tensor
    nodes: Sequence[int]
    round: int
    base_is_public: bool


class NoiseSource(ABC):
    """Turns rows into messages. The only place where a row becomes something that may leave."""

    private = False
    """Whether nobody else can know the noise. Statements of privacy are made only for private sources."""

    def grid(self, scale: float) -> float:
        """The step of the grid on which messages of this noise scale lie; 0: none."""
        return 0.0

    def discreteness(self, scale: float) -> float:
        """What noise on a grid costs beyond continuous noise, as an addition to the sensitivity."""
        return 0.0

    def distance(self, mechanism: Mechanism, dimension: int, rounds: int) -> float:
        """Total variation distance between what was drawn and the noise that is charged for."""
        return 0.0

    @abstractmethod
    def release(self, mechanism: Mechanism, scale: float, out: Outgoing) -> Tensor:
        """Make the message of `out.half` in place; return the L1 norm of each row's noise."""


class Seeded(NoiseSource):
    """Noise keyed by (seed, node, round): fast and repeatable. For simulation; a known seed undoes the noise.

    Args:
        seed: any integer; None takes one from the operating system, so that two runs differ.
        purpose: which of the streams of that seed (noise on messages unless said otherwise).
    """

    def __init__(self, seed: int | None = None, purpose: int = NOISE) -> None:
        self.seed = fresh_seed() if seed is None else seed
        self._streams = Streams(self.seed, purpose)

    def release(self, mechanism: Mechanism, scale: float, out: Outgoing) -> Tensor:
        norms = torch.zeros(len(out.nodes), dtype=torch.float64)
        if scale == 0:
            return norms
        d = out.half.shape[1]
        width = torch.float64 if out.half.dtype == torch.float64 else torch.float32
        block = torch.empty(max(1, _BLOCK // max(d, 1)), d, dtype=width)
        rows = block.numpy()
        for first in range(0, len(out.nodes), len(block)):
            ids = out.nodes[first : first + len(block)]
            for row, node in zip(rows, ids, strict=False):
                mechanism.draw(self._streams.at(node, out.round), row)
            unit = mechanism.shape(block[: len(ids)])
            norms[first : first + len(ids)] = unit.abs().sum(1)
            target = out.half[first : first + len(ids)]
            target.add_(unit.to(target), alpha=scale)
        return norms.mul_(scale)


class Scripted(NoiseSource):
    """Noise handed over in advance, one (rows, d) array of unit-scale noise per round: for tests and for studying a run."""

    def __init__(self, unit_noise: Sequence[np.ndarray | Tensor]) -> None:
        self._unit = [torch.as_tensor(n) for n in unit_noise]

    def release(self, mechanism: Mechanism, scale: float, out: Outgoing) -> Tensor:
        noise = self._unit[out.round][list(out.nodes)].to(out.half) * scale
        out.half.add_(noise)
        return noise.abs().sum(1).to("cpu", torch.float64)
