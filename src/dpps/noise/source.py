"""Where noise comes from: seeded streams (simulation and tests). `dpps.noise.secure` has the source for real deployments."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dpps.errors import UsageError
from dpps.noise.mechanisms import Mechanism
from dpps.noise.streams import LOCAL_NOISE, NOISE, Streams, fresh_seed

if TYPE_CHECKING:
    from dpps.noise.pairs import Partners

_BLOCK = 1 << 17  # numbers shaped at a time: they stay in the processor's cache


@dataclass(frozen=True)
class Outgoing:
    """The messages of the rows held here, before noise.

    `half` = `s` + `perturbation` is overwritten by the message. `base_is_public` says that `s` follows from earlier messages
    (units contribution and record), so only the perturbation has to be hidden.
    """

    s: Tensor
    perturbation: Tensor
    half: Tensor
    nodes: Sequence[int]
    round: int
    base_is_public: bool
    norms: bool = True
    """Whether anybody asks for the norm of the noise."""
    step: float = 0.0
    """The grid that was charged for (`dpps.noise.calibration`); 0: the source's own for the scale."""
    present: np.ndarray | None = None
    """Which of all nodes take part in the round; None: everybody."""


class NoiseSource(ABC):
    """Turns rows into messages. The only place where a row becomes something that may leave."""

    private = False
    """Whether nobody else can know the noise. Statements of privacy are made only for private sources."""

    def grid(self, scale: float) -> float:
        """The step of the grid on which messages of this noise scale lie; 0: none."""
        return 0.0

    def discreteness(self, step: float) -> float:
        """What noise on a grid of this step costs beyond continuous noise, as an addition to the sensitivity."""
        return 0.0

    def distance(self, mechanism: Mechanism, dimension: int, rounds: int) -> float:
        """Total variation distance between what was drawn and the noise that is charged for."""
        return 0.0

    def deviation(self, mechanism: Mechanism, scale: float, present: np.ndarray | None = None) -> float:
        """Standard deviation of each coordinate of the noise on a message, when these nodes take part; infinite: not known."""
        return mechanism.deviation(scale)

    def for_local_part(self) -> "NoiseSource":
        """A source for the local parameters whose noise has nothing to do with that of the messages (unit record)."""
        raise UsageError(
            f"{type(self).__name__} has no noise for local parameters: use Seeded or SecureNoise in the unit record"
        )

    def with_partners(self, partners: "Partners") -> "NoiseSource":
        """The same source with noise that cancels between partners."""
        raise UsageError(
            f"{type(self).__name__} has no noise that cancels: use Seeded or SecureNoise with trust=Pairs(...)"
        )

    @abstractmethod
    def release(self, mechanism: Mechanism, scale: float, out: Outgoing) -> Tensor:
        """Make the message of `out.half` in place; return the L1 norm of each row's noise (zeros where nobody asks)."""


class Seeded(NoiseSource):
    """Noise keyed by (seed, node, round): fast and repeatable. For simulation; a known seed undoes the noise.

    Args:
        seed: any integer; None takes one from the operating system, so that two runs differ.
        purpose: which of the streams of that seed (noise on messages unless said otherwise).
    """

    def __init__(self, seed: int | None = None, purpose: int = NOISE) -> None:
        self.seed = fresh_seed() if seed is None else seed
        self._streams = Streams(self.seed, purpose)
        self._block = torch.empty(_BLOCK, dtype=torch.float32)  # used again: fresh pages cost time

    def for_local_part(self) -> NoiseSource:
        return Seeded(self.seed, LOCAL_NOISE)

    def with_partners(self, partners: "Partners") -> NoiseSource:
        from dpps.noise.pairs import SeededPairs

        return SeededPairs(partners, self.seed)

    def release(self, mechanism: Mechanism, scale: float, out: Outgoing) -> Tensor:
        norms = torch.zeros(len(out.nodes), dtype=torch.float64)
        if scale == 0:
            return norms
        width = torch.float64 if out.half.dtype == torch.float64 else torch.float32
        if self._block.dtype != width:
            self._block = torch.empty(_BLOCK, dtype=width)
        for rows, columns in tiles(*out.half.shape):
            target = out.half[rows, columns]
            unit = self._unit_noise(
                mechanism, self._block, out.nodes[rows], columns.start == 0, out.round, target.shape[1]
            )
            if out.norms:
                norms[rows] += unit.abs().sum(1)
            target.add_(unit.to(target), alpha=scale)
        return norms.mul_(scale)

    def _unit_noise(
        self, mechanism: Mechanism, block: Tensor, nodes: Sequence[int], fresh: bool, round_: int, width: int
    ) -> Tensor:
        """Noise of scale 1 for these nodes' next `width` columns, in the memory of `block`."""
        part = block[: len(nodes) * width].view(len(nodes), width)
        for row, node in zip(part.numpy(), nodes, strict=True):
            stream = self._streams.at(node, round_) if fresh else self._streams.current
            mechanism.draw(stream, row)
        return mechanism.shape(part)


def tiles(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Parts of at most _BLOCK numbers: several whole rows, or pieces of one row from left to right."""
    if columns <= _BLOCK:
        height = max(1, _BLOCK // max(columns, 1))
        for first in range(0, rows, height):
            yield slice(first, min(rows, first + height)), slice(0, columns)
        return
    for row in range(rows):
        for first in range(0, columns, _BLOCK):
            yield slice(row, row + 1), slice(first, min(columns, first + _BLOCK))
