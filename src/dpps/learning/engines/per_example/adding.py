"""Weighted sums over examples, exact enough: in float32 only over pieces, see `PerExample`."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_NUMBERS = 1 << 13
"""How many squares may be added up in float32: the norms of longer vectors lose more than the margin."""
_SMALL = 1 << 13
"""Products of so few numbers are computed for all pieces at once: a loop would cost more than the memory it saves."""


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Without autocast and reduced matrix products, which somebody may have switched on around a run: they round by more than
    the margin below the clip makes up for."""
    asked = torch.get_float32_matmul_precision()
    if asked != "highest":
        torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        if asked != "highest":
            torch.set_float32_matmul_precision(asked)


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
        positions: of every example, beside each other.
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
    pieces = -(-width // _NUMBERS)
    if rows.dtype != torch.float32:
        return torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float64)  # type: ignore[no-any-return]
    if pieces <= 1:
        norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    elif width % pieces == 0:
        norms = torch.linalg.vector_norm(rows.reshape(*rows.shape[:-1], pieces, -1), dim=-1)
    else:
        cut = torch.split(rows, _NUMBERS, dim=-1)
        norms = torch.stack([torch.linalg.vector_norm(part, dim=-1) for part in cut], -1)
    return norms + math.sqrt(min(width, _NUMBERS) * torch.finfo(torch.float32).tiny)


def squared_norms(rows: Tensor) -> Tensor:
    """Squared norms over the last axis, in float64."""
    norms = norms_of(rows).double().square_()
    return norms[..., 0] if norms.shape[-1] == 1 else norms.sum(-1)
