"""All rows in one process: the simulation."""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from dpps.topology import Weights
from dpps.transport.base import Arrived, Exchange, Fabric, Link, average, combine, synchronised
from dpps.transport.control import Alone


class Stacked(Fabric):
    """Every node's row in one (N, d) tensor, on any device and in any floating type."""

    simulation = True

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.rows = range(nodes)
        self.control = Alone()
        self._entries = lru_cache(maxsize=64)(entries)
        self._pushed: tuple[Exchange, Tensor, Tensor, Link] | None = None

    def push(self, exchange: Exchange, s: Tensor, a: Tensor, link: Link) -> None:
        self._pushed = exchange, s, a, link

    def collect(self, seconds: float | None = None) -> Arrived:
        assert self._pushed is not None, "push first"
        (exchange, s, a, link), self._pushed = self._pushed, None
        present, everybody = exchange.present, frozenset(range(self.nodes))
        took_part = everybody if present is None else frozenset(np.flatnonzero(present).tolist())
        if exchange.weights is not None:
            mixed, scalars = self.mix(exchange.weights, s, a[:, None])
            return Arrived(mixed, scalars[:, 0], link, took_part)
        here = None if present is None else torch.from_numpy(present[list(self.rows)])
        means = self.mean(s, present), self.mean(a[:, None], present)
        return Arrived(*synchronised(s, a, *means, here), link, took_part)

    def mix(self, weights: Weights, *xs: Tensor) -> list[Tensor]:
        """For each x the new rows: row i becomes the sum over senders j of W[i, j] x_j."""
        return [combine(x, *self._entries(weights, x.device, x.dtype)) for x in xs]

    def max(self, v: Tensor) -> float:
        return float(v.max())

    def mean(self, x: Tensor, present: np.ndarray | None = None) -> Tensor:
        ids = torch.arange(self.nodes) if present is None else torch.from_numpy(np.flatnonzero(present))
        return average(x, ids.to(x.device))

    def gather(self, v: Tensor) -> Tensor:
        return v


def entries(weights: Weights, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of `combine` for a table of all rows."""
    senders, indptr = (
        torch.from_numpy(np.ascontiguousarray(p)).to(device) for p in (weights.senders, weights.indptr)
    )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return senders, indptr, torch.from_numpy(np.ascontiguousarray(weights.values)).to(device, wide)
