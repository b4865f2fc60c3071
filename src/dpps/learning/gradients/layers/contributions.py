"""What the examples of a batch contribute to the gradient of one weight: norms, and weighted sums.

The clip is as good as the agreement of the two: what is added up must be what the norm was taken of. Either both start from the
same numbers (`Explicit`, `Rows`, one outer product per example), or both are computed in float64 (`Outer` by Gram matrices): an
example whose positions cancel is far longer in parts than as a whole, and in float32 its parts would wipe out the others' digits.
Sums in float32 go over pieces of a batch only, see `PerExample`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

_GRAM = 3
"""How much dearer a number of a Gram matrix (in float64) is than one of an explicit gradient; measured on a CPU."""

_CANCELLED = 2.0**-16
"""The smallest norm of an example's gradient that is believed, as a part of the summed norms of its positions."""

_NARROW = 16
"""Products of which one side has fewer columns are faster with that side first; measured on a CPU."""

_SQUARES = 1 << 13
"""How many squares may be added up in float32: the norms of longer vectors lose more than the margin."""
_SMALL = 1 << 13
"""Products of so few numbers are computed for all pieces at once: a loop would cost more than the memory it saves."""


class Contribution(ABC):
    """The gradients that the examples of a batch have for one weight of shape `shape`."""

    shape: torch.Size

    @abstractmethod
    def norms(self) -> Tensor:
        """Norms, (examples, parts), of the parts of every example's gradient. None is below the true norm by more than its rounding.

        Call it before `total`; whatever only the norms need is released.
        """

    @abstractmethod
    def total(self, factors: Tensor, piece: int | None = None) -> Tensor:
        """The sum of the examples' gradients, each times its factor; `piece` as in `weighted_sum`."""

    @abstractmethod
    def explicit(self) -> Tensor:
        """All gradients, (examples, *shape)."""

    @property
    @abstractmethod
    def numbers(self) -> int:
        """How many numbers are held for all of this at a time."""


class Explicit(Contribution):
    """Gradients that are there already: biases, scales, and whatever has no rule."""

    def __init__(self, gradients: Tensor) -> None:
        self.gradients, self.shape = gradients, gradients.shape[1:]

    def norms(self) -> Tensor:
        return norms_of(flat(self.gradients))

    def total(self, factors: Tensor, piece: int | None = None) -> Tensor:
        return weighted_sum(factors, flat(self.gradients), piece).view(self.shape)

    def explicit(self) -> Tensor:
        return self.gradients

    @property
    def numbers(self) -> int:
        return self.gradients.numel()


class Outer(Contribution):
    r"""$g_e = \sum_t l_{et} r_{et}^T$ for every group: what goes into a linear layer and what comes back.

    $\|g_e\|^2 = \sum_{ts} (l_{et} \cdot l_{es}) (r_{et} \cdot r_{es})$ needs no gradient, and pays where there are few positions t.

    Args:
        left: (examples, groups, positions, m).
        right: (examples, groups, positions, n).
        shape: of the weight: groups x m x n numbers.
    """

    def __init__(self, left: Tensor, right: Tensor, shape: torch.Size) -> None:
        self.left, self.right, self.shape = left, right, shape
        self.examples, self.groups, self.positions, self._m = left.shape
        self._n = right.shape[3]
        self._gradients: Tensor | None = None
        self._turned = self._m > self._n and self._n < _NARROW

    @property
    def gram(self) -> bool:
        """Whether Gram matrices of positions are cheaper than the gradients themselves."""
        return _GRAM * self.positions * (self._m + self._n) < self._m * self._n

    def norms(self) -> Tensor:
        if self.positions == 1:
            left, right = (squared_norms(part)[:, :, 0] for part in (self.left, self.right))
            return left.mul_(right).sqrt_()
        if not self.gram:
            norms = norms_of(flat(self._each()))
            self.left = self.right = torch.empty(0)  # the gradients are there: the sides may go
            return norms
        # in float64: products that cancel keep their digits
        left, right = (part @ part.mT for part in (self.left.double(), self.right.double()))
        lengths = (left.diagonal(dim1=2, dim2=3) * right.diagonal(dim1=2, dim2=3)).clamp_(min=0).sqrt_()
        terms = self._m + self._n + self.positions**2
        return cautious(left.mul_(right).sum((2, 3)), lengths.sum(2), terms)

    def total(self, factors: Tensor, piece: int | None = None) -> Tensor:
        if self._gradients is not None:
            total = weighted_sum(factors, flat(self._gradients), piece)
            return self._shaped(total[None])[0] if self._turned else total.view(self.shape)
        left, right = self.left, self.right
        if self.positions > 1 or piece == 0:  # positions may cancel, see above
            left, right, factors, piece = left.double(), right.double(), factors.double(), 0
        if self._m <= self._n:
            left = left * factors[:, None, None, None]
        else:
            right = right * factors[:, None, None, None]
        left, right = (part.transpose(0, 1).flatten(1, 2) for part in (left, right))
        return sum_of_products(left, right, self.positions, piece).reshape(self.shape)

    @property
    def numbers(self) -> int:
        sides = self.groups * self.positions * (self._m + self._n)
        more = 4 * self.positions**2 * self.groups if self.gram else prod(self.shape)
        return self.examples * (sides + (more if self.positions > 1 else 0))

    def explicit(self) -> Tensor:
        return self._shaped(self._each())

    def _each(self) -> Tensor:
        """The gradients of all groups, (examples, groups, m, n), or (.., n, m) where that is the faster product."""
        if self._gradients is None:
            one, other = (self.right, self.left) if self._turned else (self.left, self.right)
            if self.groups == 1:
                self._gradients = torch.bmm(one[:, 0].mT, other[:, 0])
            else:
                self._gradients = one.mT @ other
        return self._gradients

    def _shaped(self, gradients: Tensor) -> Tensor:
        """Rows of such numbers in the shape of the weight."""
        if self._turned:
            gradients = gradients.reshape(-1, self.groups, self._n, self._m).mT
        return gradients.reshape(-1, *self.shape)


class Rows(Contribution):
    r"""Rows of a table that were looked up: $g_e$ has $d_{et}$ added to row $i_{et}$.

    Args:
        rows: (examples, positions), which row was read where.
        back: (examples, positions, width), what came back; zero where nothing is learned.
        shape: (table length, width).
    """

    def __init__(self, rows: Tensor, back: Tensor, shape: torch.Size) -> None:
        self.rows, self.back, self.shape = rows, back, shape
        self._merged = rows.shape[1] == 1

    def norms(self) -> Tensor:
        self.merge()
        return norms_of(flat(self.back))

    def merge(self) -> None:
        """Add up what came back to the positions of an example that read the same row: each row once from here on.

        They may cancel, so norm and sum must both start from what is left of them.
        """
        if self._merged:
            return
        self._merged = True
        examples, positions = self.rows.shape
        slots, count = self.rows, self.shape[0]
        if count > positions:  # rows are numbered anew, in the order of the table
            read, order = self.rows.sort(1)
            numbered = torch.zeros_like(read)
            numbered[:, 1:] = (read[:, 1:] != read[:, :-1]).cumsum(1)
            slots, count = torch.empty_like(read).scatter_(1, order, numbered), positions
        own = slots + count * torch.arange(examples, device=slots.device)[:, None]
        added = self.back.new_zeros(examples * count, self.back.shape[2])
        added.index_add_(0, own.flatten(), self.back.flatten(0, 1))
        # nothing came back to numbers that are not in use, so it does not matter which row they stand for
        self.rows = self.rows.new_zeros(examples, count).scatter_(1, slots, self.rows)
        self.back = added.view(examples, count, -1)

    def total(self, factors: Tensor, piece: int | None = None) -> Tensor:
        self.merge()
        back = self.back.double() if piece == 0 else self.back
        weighted = (back * factors.to(back)[:, None, None]).flatten(0, 1)
        weighted = weighted if piece is None else weighted.double()
        return weighted.new_zeros(self.shape).index_add_(0, self.rows.flatten(), weighted)

    @property
    def numbers(self) -> int:
        examples, positions = self.rows.shape
        return self.back.numel() + examples * min(positions, self.shape[0]) * (self.shape[1] + 4)

    def explicit(self) -> Tensor:
        index = self.rows[:, :, None].expand_as(self.back)
        return self.back.new_zeros(len(self.rows), *self.shape).scatter_add_(1, index, self.back)


def combine(uses: list[Contribution]) -> Contribution:
    """All uses of one weight together: gradients add up, norms do not."""
    if len(uses) == 1:
        return uses[0]
    gradients = uses[0].explicit()
    for use in uses[1:]:
        gradients = gradients + use.explicit()
    return Explicit(gradients)


def flat(gradients: Tensor) -> Tensor:
    """One row per example."""
    return gradients.reshape(gradients.shape[0], -1)


def cautious(squares: Tensor, lengths: Tensor, terms: int) -> Tensor:
    """Norms of sums of parts, enlarged by what rounding may have taken from them.

    Where parts cancel, the norm of their sum is far below the sum of their norms, and rounding is not: a square in float64 is off
    by up to `terms` roundings of the square of `lengths`. No norm is stated below the smallest part of `lengths` for which sums in
    float64 are still exact.

    Args:
        squares: of the norms, in float64.
        lengths: the sums of the parts' norms.
        terms: of how many products the longest sums were that a square was computed by.
    """
    error = (terms * torch.finfo(torch.float64).eps) ** 0.5
    stated: Tensor = squares.clamp(min=0).sqrt() + error * lengths
    return torch.maximum(stated, _CANCELLED * lengths)


def weighted_sum(factors: Tensor, rows: Tensor, piece: int | None) -> Tensor:
    """The sum of rows (examples, numbers), each times its factor.

    Args:
        piece: how many examples are added up in float32 before the sum goes on in float64; 0: none; None: all.
    """
    if piece is None:
        return factors @ rows
    if piece == 0:
        return factors.double() @ rows.double()
    whole = len(rows) // piece * piece
    parts = torch.bmm(factors[:whole].view(-1, 1, piece), rows[:whole].view(-1, piece, rows.shape[1]))
    return parts.sum((0, 1), dtype=torch.float64) + (factors[whole:] @ rows[whole:])


def sum_of_products(left: Tensor, right: Tensor, positions: int, piece: int | None) -> Tensor:
    """left^T right over the second last axis, which holds so many positions of every example; leading axes stay.

    Args:
        left: (..., examples x positions, m).
        right: (..., examples x positions, n).
        positions: of every example, adjacent.
        piece: see `weighted_sum`.
    """
    if piece is None:
        return left.mT @ right if left.shape[-1] <= right.shape[-1] else (right.mT @ left).mT
    if piece == 0:
        return left.double().mT @ right.double()
    lead, height = left.shape[:-2], piece * positions
    matrices = (part.reshape(-1, *part.shape[-2:]) for part in (left, right))
    # one after the other: pieces of all at once would need a copy of both sides
    sums = [_in_pieces(one, other, height) for one, other in zip(*matrices, strict=True)]
    return torch.stack(sums).view(*lead, *sums[0].shape) if lead else sums[0]


def _in_pieces(left: Tensor, right: Tensor, height: int) -> Tensor:
    """left^T right, so many rows at a time."""
    if left.shape[1] * right.shape[1] > _SMALL:
        starts = range(0, max(1, len(left)), height)  # nobody's sum is zero
        return _sum_of_pairs(left[k : k + height].mT @ right[k : k + height] for k in starts)
    whole = len(left) // height * height
    first, second = (torch.unflatten(part[:whole], 0, (-1, height)) for part in (left, right))
    total: Tensor = (first.mT @ second).sum(0, dtype=torch.float64) + left[whole:].mT @ right[whole:]
    return total


def _sum_of_pairs(parts: Iterable[Tensor]) -> Tensor:
    """The sum of parts that may be written over: of pairs, then of pairs of those, while they are in the cache.

    No part is rounded more often than there are halvings, so float32 does; adding to float64 takes as long as the products.
    """
    sums: list[tuple[int, Tensor]] = []
    for part in parts:
        own, level = part, 0
        while sums and sums[-1][0] == level:
            own, level = sums.pop()[1].add_(own), level + 1
        sums.append((level, own))
    _, total = sums.pop()
    while sums:
        total = sums.pop()[1].add_(total)
    return total


def norms_of(rows: Tensor) -> Tensor:
    """Norms of pieces of every row, (rows, pieces): float32 sums of millions of squares go astray.

    Squares below the smallest normal number are lost in float32, so what they can amount to is added: a norm of 0 times a huge
    one, of the other side of an outer product, would let a gradient pass unclipped.
    """
    norms: Tensor
    width = rows.shape[-1]
    pieces = -(-width // _SQUARES)
    if rows.dtype != torch.float32:
        return torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float64)  # type: ignore[no-any-return]
    if pieces <= 1:
        norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    elif width % pieces == 0:
        norms = torch.linalg.vector_norm(rows.reshape(*rows.shape[:-1], pieces, -1), dim=-1)
    else:
        cut = torch.split(rows, _SQUARES, dim=-1)
        norms = torch.stack([torch.linalg.vector_norm(part, dim=-1) for part in cut], -1)
    return norms + math.sqrt(min(width, _SQUARES) * torch.finfo(torch.float32).tiny)


def squared_norms(rows: Tensor) -> Tensor:
    """Squared norms over the last axis, in float64."""
    norms = norms_of(rows).double().square_()
    return norms[..., 0] if norms.shape[-1] == 1 else norms.sum(-1)
