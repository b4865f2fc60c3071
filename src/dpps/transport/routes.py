"""Which rows go from which process to which under one matrix of weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from dpps.errors import UsageError
from dpps.topology import Weights


@dataclass(frozen=True)
class Route:
    """What one process sends, receives and adds up under one matrix of weights."""

    needed: np.ndarray
    """Ids of the nodes whose rows are needed for rows with a sender elsewhere: the table, ascending."""
    own_places: slice
    own_rows: Tensor | slice
    outgoing: dict[int, Tensor | slice]
    incoming: dict[int, slice]
    inner_rows: Tensor
    """Receivers that need nobody else: they are computed while messages travel."""
    inner: tuple[Tensor, Tensor, Tensor]
    outer_rows: Tensor
    outer: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, weights: Weights, blocks: Sequence[range], rank: int, device: torch.device) -> "Route":
        own = blocks[rank]
        parts = [weights.senders[weights.indptr[i] : weights.indptr[i + 1]] for i in own]
        alone = np.array([bool(np.isin(p, own).all()) for p in parts], dtype=bool)
        inner, outer = np.flatnonzero(alone), np.flatnonzero(~alone)
        needed = np.unique(np.concatenate([np.empty(0, np.int64), *(parts[k] for k in outer)]))
        ends = np.searchsorted(needed, [0, *(b.stop for b in blocks)]).tolist()
        places = [slice(a, b) for a, b in pairwise(ends)]
        return cls(
            needed=needed,
            own_places=places[rank],
            own_rows=_rows(needed[places[rank]] - own.start, device),
            outgoing=_outgoing(weights, blocks, rank, device),
            incoming={p: at for p, at in enumerate(places) if p != rank and at.start < at.stop},
            inner_rows=_index(inner, device),
            inner=_part(weights, own, inner, np.arange(own.start, own.stop), device),
            outer_rows=_index(outer, device),
            outer=_part(weights, own, outer, needed, device),
        )


def _outgoing(
    weights: Weights, blocks: Sequence[range], rank: int, device: torch.device
) -> dict[int, Tensor | slice]:
    """Which of the rows here each peer needs."""
    own, wanted = blocks[rank], {}
    for peer, block in enumerate(blocks):
        entries = slice(weights.indptr[block.start], weights.indptr[block.stop])
        senders = np.unique(weights.senders[entries])
        rows = senders[np.isin(senders, own)] - own.start
        if peer != rank and rows.size:
            wanted[peer] = _rows(rows, device)
    return wanted


def _part(
    weights: Weights, own: range, receivers: np.ndarray, table: np.ndarray, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of `combine` for some of the receivers, over a table that holds the rows of the nodes `table`."""
    spans = [slice(weights.indptr[own.start + k], weights.indptr[own.start + k + 1]) for k in receivers]
    senders = np.concatenate([np.empty(0, np.int64), *(weights.senders[s] for s in spans)])
    values = np.concatenate([np.empty(0), *(weights.values[s] for s in spans)])
    offsets = np.cumsum([0, *(s.stop - s.start for s in spans)])
    return (
        _index(np.searchsorted(table, senders), device),
        _index(offsets, device),
        torch.from_numpy(values).to(device),
    )


def blocks(nodes: int, processes: int) -> list[range]:
    """Which nodes each process holds: contiguous, as equal as can be."""
    if not 1 <= processes <= nodes:
        raise UsageError(
            f"{processes} processes for {nodes} nodes: every process needs a node, start {nodes} or fewer"
        )
    ends = [k * nodes // processes for k in range(processes + 1)]
    return [range(a, b) for a, b in pairwise(ends)]


def _rows(rows: np.ndarray, device: torch.device) -> Tensor | slice:
    """A slice where rows lie side by side, so that nothing is copied."""
    if rows.size and rows[-1] - rows[0] + 1 == rows.size:
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return _index(rows, device)


def _index(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)
