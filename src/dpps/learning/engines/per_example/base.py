"""What every way to compute per-example clipped sums has in common: the clip, its margin, and the result."""

import math
from abc import ABC, abstractmethod
from typing import Any, Self

import torch
from torch import Tensor

from dpps.frozen import Frozen
from dpps.learning.engines.calling import Loss
from dpps.learning.engines.per_example.skipped import Skipped
from dpps.learning.partition import Partition

_MARGIN = 1e-4  # clipping stays below the bound by more than the rounding of norms and products
_WIDEST_MARGIN = 6e-3  # what adding up in float32 may cost of the clip
_PIECES = (40, 32, 16, 4)  # examples that are added up one after the other in float32, see `PerExample`


class Sums(tuple[Tensor, Tensor, Tensor]):
    """Mean losses (for display), and the sums of clipped gradients for s and for l, one row per node.

    `clipped` is the share of every node's examples whose gradient was longer than the clip. It is computed from the data
    without noise: it must not leave the node.
    """

    clipped: Tensor

    @classmethod
    def of(cls, losses: Tensor, sum_s: Tensor, sum_l: Tensor, clipped: Tensor) -> Self:
        """The three parts, and the share of clipped examples beside them."""
        sums = cls((losses, sum_s, sum_l))
        sums.clipped = clipped
        return sums


class PerExample(Frozen, ABC):
    """Sums over a batch of per-example gradients, each scaled down to an L2 norm of `clip` over shared and local together.

    Whatever an example holds, adding it moves the sum by at most `clip`: that is what noise is calibrated to, and rounding is paid
    for by a margin below the clip. It makes up for the rounding of norms and products (1e-4 of the clip) and for that of sums.
    What a model says of an example is taken to be the same whoever else is in the batch, which `refuse_by_trial` checks.

    Adding up B vectors of length at most clip in any order is wrong by at most B u x B clip (u: half a step at 1), in either
    of two neighbouring batches; adding up pieces of P, and their sums in pairs, by at most (P + log2(B / P)) u x B clip. The
    margin that makes up for it must not depend on the batch that was drawn,
    so it is that of a larger one than is ever drawn (twice the expected one,
    or twelve standard deviations more); batches beyond that are added up in float64.

    Args:
        partition: the model, and what of it is shared.
        loss: of (outputs, targets).
        clip: bound on the L2 norm of one example's gradient.
        batch: the expected number of examples, a public number.
    """

    fixed = frozenset({"clip", "margin", "narrow", "piece"})

    hides_failures = False
    """Whether an example on which the model fails counts as zero: stopping because of one would tell of it."""

    def __init__(self, partition: Partition, loss: Loss, clip: float, batch: int = 1) -> None:
        self.partition, self.loss, self.clip = partition, loss, clip
        self.skipped = Skipped()
        """Examples that counted as zero; it stays at the node."""
        usual, u = (
            min(2 * batch, batch + math.ceil(12 * math.sqrt(batch))),
            torch.finfo(torch.float32).eps / 2,
        )
        largest = usual + 8
        roundings = {largest - 1: largest} | {
            piece: piece + 1 + math.ceil(math.log2(largest / piece)) for piece in _PIECES if piece < largest
        }
        needed = {piece: 2 * largest * count * u for piece, count in roundings.items()}
        fits = [piece for piece, margin in needed.items() if margin <= _WIDEST_MARGIN]
        self.margin = _MARGIN + (needed[fits[0]] if fits else 0.0)
        self.piece = fits[0] if fits else 0
        """How many examples are added up in float32 (0: none)."""
        self.narrow = usual if fits else 0
        """The largest batch to which that applies."""

    @abstractmethod
    def sums(self, y: Tensor, l: Tensor, x: Any, target: Any, mask: Tensor) -> Sums:
        """The clipped sums over the examples in the mask (nodes, batch); every other entry counts as absent.

        They are in float64 where float32 would be off by more than the margin. One backward pass at (y, l) serves both parts:
        un-noised local parameters would let one example move all others' gradients, so here both updates are noised.
        """

    def _piece(self, mask: Tensor, dtype: torch.dtype) -> int | None:
        """How many examples may be added up at a time in this batch; None: all of them."""
        drawn = mask.shape[1]
        if dtype != torch.float32 or drawn > self.narrow:
            return 0
        return None if self.piece > self.narrow else self.piece

    def _empty(self, like: Tensor, piece: int | None) -> Tensor:
        """Memory for sums."""
        return torch.empty_like(like, dtype=like.dtype if piece is None else torch.float64)

    def _factors(self, squares: Tensor, dtype: torch.dtype) -> Tensor:
        """What every example's gradient is multiplied by, from its squared norm (float64)."""
        norms = squares.sqrt().clamp(min=self.clip)
        factors = (self.clip / norms * (1 - self.margin)).to(dtype)
        # a factor below the smallest normal number may be rounded up by more than the margin
        return factors.masked_fill(factors < torch.finfo(dtype).tiny, 0.0)
