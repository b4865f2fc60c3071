"""A fabric knows which rows live here and how rows reach each other. Everything else is written once, against rows.

A round of the network has two halves: `push` hands the released rows to the network,
`collect` returns what has arrived. Between them nothing is released or charged, so a fabric may send the same rows again, let them wait on disk, or go on without those that
are late. What it has to remember from round to round (which shares of whom it has counted) is its *link*, a dictionary of tensors
in the protocol's state, so that a failed round leaves it as it was and a checkpoint holds it.

A fabric of your own is one file: a subclass of `Fabric` with these two methods, `mean` and `gather`, and a `Control` for what
processes tell each other beside the rows. `dpps.transport.stacked` is the smallest.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dpps.topology import Weights
from dpps.transport.control import Control

Link = Mapping[str, Tensor]


@dataclass(frozen=True)
class Exchange:
    """One round of the network, as everybody knows it beforehand.

    Attributes:
        round: its number.
        weights: who sends how much to whom; None: all who are present average with each other.
        present: which nodes take part; None: everybody.
        ahead: the weights of the next round of mixing, so that a fabric can prepare for it; None: not known.
        step: how far an honest node's perturbation moves its row at most (L2); infinite: not known.
        deviation: of the noise on each coordinate of its message; infinite: not known.
    """

    round: int
    weights: Weights | None
    present: np.ndarray | None = None
    ahead: Weights | None = None
    step: float = math.inf
    deviation: float = math.inf

    def lengthened(self, gain: float) -> "Exchange":
        """The same where rows move by so many times their updates and noise; infinite: not known."""
        if not math.isfinite(gain):  # its product with 0 would be no number
            return replace(self, step=math.inf, deviation=math.inf)
        return replace(self, step=self.step * gain, deviation=self.deviation * gain)


@dataclass(frozen=True)
class Arrived:
    """What a round has brought to the nodes held here.

    Attributes:
        s: their new rows.
        a: their new normalising scalars.
        link: what the fabric has to remember.
        took_part: ids of the nodes whose messages are counted in these rows, those held here included.
    """

    s: Tensor
    a: Tensor
    link: Link
    took_part: frozenset[int]


class Fabric(ABC):
    """Rows and how they reach each other. Row k of a tensor belongs to node `rows[k]`.

    Attributes:
        nodes: N.
        rows: ids of the nodes held here, ascending.
        simulation: whether all rows are here: then the real sensitivity can be looked at.
        meets: whether all nodes meet where `mean` and `gather` say so. Otherwise nodes come and go:
            nobody asks everybody, `mean` is a node's own estimate y = s / a,
            and a node scales its update by its own a, so that one which has lost mass is not moved more by
            its noise than the others.
        control: what processes tell each other beside the rows.
    """

    nodes: int
    rows: Sequence[int]
    simulation: bool
    meets: bool = True
    control: Control

    def start(self, s: Tensor, common: bool) -> Link:
        """Before round 0: the start rows, and whether all nodes start from the same one. Returns the first link."""
        return {}

    @abstractmethod
    def push(self, exchange: Exchange, s: Tensor, a: Tensor, link: Link) -> None:
        """Hand the released rows of this round to the network, without waiting for anybody.

        Args:
            exchange: who gets what.
            s: one message per row; it must stay as it is until `collect` has returned.
            a: the normalising scalar of each row.
            link: of this run, before the round.
        """

    @abstractmethod
    def collect(self, seconds: float | None = None) -> Arrived:
        """What has arrived of the round that was pushed last.

        Args:
            seconds: how long to wait; by default as long as the fabric waits for a peer. A fabric that can do without those who
                are late returns then and says in `took_part` who was there; another one raises.
        """

    @abstractmethod
    def mean(self, x: Tensor, present: np.ndarray | None = None) -> Tensor:
        """The mean row over all nodes (or over those present), the same bits everywhere."""

    @abstractmethod
    def gather(self, v: Tensor) -> Tensor:
        """One number per node, of all nodes, to everybody. In a round only the unit node-swap asks for it."""

    def max(self, v: Tensor) -> float:
        """The largest entry over all nodes of one number per row."""
        return float(self.gather(v).max())


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


def average(x: Tensor, ids: Tensor) -> Tensor:
    """The mean of the rows `ids` of a table, added up in their order."""
    ones = torch.ones(len(ids), dtype=torch.float64, device=x.device)
    ends = torch.tensor([0, len(ids)], device=x.device)
    return combine(x, ids, ends, ones)[0] / len(ids)


def synchronised(
    s: Tensor, a: Tensor, s_mean: Tensor, a_mean: Tensor, here: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Rows and scalars after all who are present have averaged: the mean, or for those who are away (`here`
    is False) their own."""
    if here is None:
        return s_mean.repeat(len(s), 1), a_mean.expand(len(a)).clone()
    return torch.where(here.to(s.device)[:, None], s_mean, s), torch.where(here, a_mean, a)
