"""A fabric knows which rows live here and how rows reach each other. Everything else is written once, against rows.

A round of the network has two halves: `push` hands the released rows to the network, `collect` returns what has arrived.
Between them nothing is released or charged, so a fabric may send the same rows again, let them wait on disk, or go on
without those that are late. What it has to remember from round to round (which shares of whom it has counted) is its *link*, a dictionary of tensors
in the protocol's state, so that a failed round leaves it as it was and a checkpoint holds it.

A fabric of your own is one file: a subclass of `Fabric` with these two methods, `mean` and `gather`, and with `everybody` and
`rounds_until_heard` where several processes run together. `Stacked` is the smallest.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpps.topology import Weights

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
    """

    s: Tensor
    a: Tensor
    link: Link


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
        shares_noise: whether nodes that come and go share noise that cancels, which must not be scaled.
        stop_after: the round after which all processes stop; None: nobody has asked, as far as is known here.
    """

    nodes: int
    rows: Sequence[int]
    simulation: bool
    meets: bool = True
    shares_noise: bool = False
    stop_after: int | None = None

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
                are late returns then; another one raises.
        """

    def gossip(self, steps: Sequence[Exchange], s: Tensor, a: Tensor, link: Link) -> Arrived:
        """A whole round: push and collect, once for each of its gossip steps."""
        arrived = Arrived(s, a, link)
        for step in steps:
            self.push(step, arrived.s, arrived.a, arrived.link)
            arrived = self.collect()
        return arrived

    def scaled(self, base: Tensor, message: Tensor, a: Tensor) -> Tensor:
        """The released rows as they are handed to the network: as they are, unless nodes come and go.

        Args:
            base: the rows before their updates.
            message: one message per row.
            a: the normalising scalar of each row.
        """
        return message

    @abstractmethod
    def mean(self, x: Tensor, present: np.ndarray | None = None) -> Tensor:
        """The mean row over all nodes (or over those present), the same bits everywhere."""

    @abstractmethod
    def gather(self, v: Tensor) -> Tensor:
        """One number per node, of all nodes, to everybody. In a round only the unit node-swap asks for it."""

    def max(self, v: Tensor) -> float:
        """The largest entry over all nodes of one number per row."""
        return float(self.gather(v).max())

    # What processes tell each other beside the rows. At the start and at resume each tells a few numbers about itself; a request
    # to stop travels on the rows. Nobody waits for it: who asks says after which round everybody stops, late enough for all.

    def everybody(self, value: float) -> list[float]:
        """One number of every process, by rank. All processes call it at the same point of the run."""
        return [value]

    def rounds_until_heard(self, rounds: Iterable[Weights | None]) -> int | None:
        """How many of the coming rounds it takes until what this process says on its rows is known to all; None: never.

        Args:
            rounds: the weights of each; None for one in which everybody hears everybody.
        """
        return 0

    def ask_to_stop(self, after: int) -> None:
        """Let everybody stop after this round. Of several requests the earliest counts, and all hear of it in time."""
        self.stop_after = after if self.stop_after is None else min(after, self.stop_after)


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


class Stacked(Fabric):
    """All rows in one (N, d) tensor, on any device and in any floating-point type."""

    simulation = True

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.rows = range(nodes)
        self._entries = lru_cache(maxsize=64)(entries)
        self._pushed: tuple[Exchange, Tensor, Tensor, Link] | None = None

    def push(self, exchange: Exchange, s: Tensor, a: Tensor, link: Link) -> None:
        self._pushed = exchange, s, a, link

    def collect(self, seconds: float | None = None) -> Arrived:
        assert self._pushed is not None, "push first"
        (exchange, s, a, link), self._pushed = self._pushed, None
        if exchange.weights is not None:
            s, a = self.mix(exchange.weights, s, a[:, None])
            return Arrived(s, a[:, 0], link)
        present = exchange.present
        here = None if present is None else torch.from_numpy(present)
        means = self.mean(s, present), self.mean(a[:, None], present)
        return Arrived(*synchronised(s, a, *means, here), link)

    def mix(self, weights: Weights, *xs: Tensor) -> list[Tensor]:
        """The mixed rows of each x: row i becomes the sum over senders j of W[i, j] x_j."""
        return [combine(x, *self._entries(weights, x.device, x.dtype)) for x in xs]

    def mean(self, x: Tensor, present: np.ndarray | None = None) -> Tensor:
        ids = torch.arange(self.nodes) if present is None else torch.from_numpy(np.flatnonzero(present))
        return average(x, ids.to(x.device))

    def gather(self, v: Tensor) -> Tensor:
        return v


def entries(weights: Weights, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of `combine` for a table of all rows."""
    parts = weights.senders, weights.indptr, weights.values
    senders, indptr, values = (torch.from_numpy(part).to(device) for part in parts)
    return senders, indptr, values.to(torch.float64 if dtype == torch.float64 else torch.float32)


TAIL = 41.0
"""By how many standard deviations of one coordinate the norm of noise exceeds its expectation at most, see `Bound`."""
_SLACK = 1.01  # rounding, and grids


class Bound(NamedTuple):
    r"""How long an honest node's row can be by what the contract of a run makes possible; infinite where nothing is known.

    All rows start from one public row $s_0$. In a round a node moves its row by at most $\Delta$ (the clip) and adds noise of
    standard deviation $\sigma$ per coordinate; momentum makes both count $1 / (1 - \beta)$ times, spread over later rounds. Mixing
    makes each $y_i = s_i / a_i$ a convex combination of others, so that with $m$ the smallest $a_i$ so far

    $$\|s_i\| \le a_i \Bigl(\|s_0\| + \sum_t \Delta_t / m + \|n_i\|\Bigr),$$

    where $n_i$ is a sum of noise, independent between rounds, whose coordinates have variances of at most
    $V = \sum_t (\sigma_t / m)^2$: a convex combination of one round's noise varies no more than the noise of one of its
    messages, whatever partners share. The norm is a Lipschitz function of the noise; Gaussian and Laplace noise satisfy a
    Poincare inequality (with constant 4 for a Laplace variable of scale 1), so
    $P(\|n_i\| > \sqrt V (\sqrt d + 41)) < 10^{-12}$ (Bobkov and Ledoux, Probability Theory and Related Fields 107, 1997).

    Attributes:
        start: norm of the common start row.
        steps: sum of the largest perturbations.
        variance: sum of the variances of the noise.
        smallest: of all a so far.
    """

    start: float
    steps: float = 0.0
    variance: float = 0.0
    smallest: float = 1.0

    def after(self, exchange: Exchange, a: Tensor) -> "Bound":
        """With the perturbation and the noise of one more round; `a` of all nodes before it."""
        steps, variance = self.steps + exchange.step, self.variance + exchange.deviation**2
        return Bound(self.start, steps, variance, min(self.smallest, float(a.min())))

    def limits(self, a: Tensor, dimension: int) -> Tensor | None:
        """The longest row of each node; None where nothing is known."""
        moved = self.steps + math.sqrt(self.variance) * (math.sqrt(dimension) + TAIL)
        most = self.start + moved / self.smallest
        return _SLACK * most * a if math.isfinite(most) else None
