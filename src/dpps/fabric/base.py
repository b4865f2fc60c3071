"""A fabric knows which rows live here and how rows reach each other. Everything else is written once, against rows."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dpps.topology import Weights


class Fabric(ABC):
    """The five verbs: `rows`, `mix`, `max`, `mean`, `gather`. Row k of a tensor belongs to node `rows[k]`."""

    nodes: int
    rows: Sequence[int]
    """Ids of the nodes held here, ascending."""
    simulation: bool
    """Whether all rows are here: then the real sensitivity can be looked at."""

    @abstractmethod
    def mix(self, weights: Weights, *xs: Tensor) -> list[Tensor]:
        """For each x the new rows: row i becomes the sum over senders j of W[i, j] x_j."""

    @abstractmethod
    def max(self, v: Tensor) -> float:
        """The largest entry over all nodes of one number per row."""

    @abstractmethod
    def mean(self, x: Tensor, present: np.ndarray | None = None) -> Tensor:
        """The mean row over all nodes (or over those present), the same bits everywhere."""

    @abstractmethod
    def gather(self, v: Tensor) -> Tensor:
        """One number per node, of all nodes, to everybody."""


def combine(table: Tensor, indices: Tensor, offsets: Tensor, values: Tensor) -> Tensor:
    """Row r = sum of values[e] * table[indices[e]] over its entries offsets[r]:offsets[r+1], in that order.

    One fused pass, O(entries x d). A row's bits depend only on its own entries, not on which other rows are computed with it:
    that is what makes one process and many agree bit for bit.
    """
    width = table if table.dtype in (torch.float32, torch.float64) else table.float()
    # torch.nn.functional.embedding_bag without its checks: sum mode, per-sample weights, last offset included
    mixed = torch.embedding_bag(
        width.contiguous(), indices, offsets, False, 0, False, values.to(width), True
    )[0]
    return mixed.to(table.dtype)
