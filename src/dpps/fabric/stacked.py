"""All rows in one process: the simulation."""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from dpps.fabric.base import Fabric, combine
from dpps.topology import Weights


class Stacked(Fabric):
    """Every node's row in one (N, d) tensor, on any device and in any floating type."""

    simulation = True

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.rows = range(nodes)
        self._entries = lru_cache(maxsize=64)(_entries)

    def mix(self, weights: Weights, *xs: Tensor) -> list[Tensor]:
        return [combine(x, *self._entries(weights, x.device, x.dtype)) for x in xs]

    def max(self, v: Tensor) -> float:
        return float(v.max())

    def mean(self, x: Tensor, present: np.ndarray | None = None) -> Tensor:
        ids = torch.arange(self.nodes) if present is None else torch.from_numpy(np.flatnonzero(present))
        ids = ids.to(x.device)
        ones = torch.ones(len(ids), dtype=torch.float64, device=x.device)
        ends = torch.tensor([0, len(ids)], device=x.device)
        return combine(x, ids, ends, ones)[0] / len(ids)

    def gather(self, v: Tensor) -> Tensor:
        return v


def _entries(weights: Weights, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    senders, indptr = (
        torch.from_numpy(np.ascontiguousarray(p)).to(device) for p in (weights.senders, weights.indptr)
    )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return senders, indptr, torch.from_numpy(np.ascontiguousarray(weights.values)).to(device, wide)
