"""The instruments of an audit: a fabric that writes down what leaves, and noise sources for many networks or
with too little noise."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from dpps.errors import RunError, UsageError
from dpps.noise.mechanisms import Mechanism
from dpps.noise.source import NoiseSource, Outgoing, SecureNoise
from dpps.topology import Weights
from dpps.transport import Fabric, Stacked
from dpps.transport.base import combine

NoiseFor = Callable[[int], NoiseSource]
"""A source of noise for a seed."""

SABOTAGE = 2 / 3
"""The twin's noise, as a part of what it should be."""


class Wiretap(Stacked):
    """`copies` networks of `nodes` nodes side by side, and a record of everything that leaves a node."""

    def __init__(self, nodes: int, copies: int = 1) -> None:
        super().__init__(nodes)
        self.copies = copies
        self.rows = range(nodes * copies)
        self.messages: list[Tensor] = []
        self.received: list[Tensor] = []
        """The rows after mixing: whoever has the messages and the weights knows them."""
        self.scalars: list[Tensor] = []

    def mix(self, weights: Weights, *xs: Tensor) -> list[Tensor]:
        mixed = [combine(x, *_side_by_side(weights, self.copies)) for x in xs]
        self.messages.append(xs[0].clone())  # the protocol uses its memory again
        self.received.append(mixed[0])
        return mixed

    def max(self, v: Tensor) -> float:
        return Fabric.max(self, v)

    def gather(self, v: Tensor) -> Tensor:
        self.scalars.append(v)
        networks = v.view(self.copies, self.nodes)
        if bool((networks != networks[0]).any()):
            raise RunError("scalars differ between networks side by side: audit these one by one (copies=1)")
        return networks[0]

    def mean(self, x: Tensor, present: np.ndarray | None = None) -> Tensor:
        raise UsageError("a wiretap does not synchronise: set sync_every to 0")


@lru_cache(maxsize=8)
def _side_by_side(weights: Weights, copies: int) -> tuple[Tensor, Tensor, Tensor]:
    senders = weights.senders + weights.nodes * np.arange(copies)[:, None]
    starts = weights.indptr[:-1] + len(weights.senders) * np.arange(copies)[:, None]
    ends = np.append(starts.ravel(), copies * len(weights.senders))
    values = np.tile(weights.values, copies)
    return torch.from_numpy(senders.ravel()), torch.from_numpy(ends), torch.from_numpy(values)


class Joined(SecureNoise):
    """Secure noise for many short rows as for one long one: its draws are independent per coordinate, and one long draw is
    quick. Noise norms are not known by row then, so whoever relies on them gets NaN."""

    def release(self, mechanism: Mechanism, scale: float, out: Outgoing) -> Tensor:
        s, perturbation, half = (x.view(1, -1) for x in (out.s, out.perturbation, out.half))
        super().release(mechanism, scale, replace(out, s=s, perturbation=perturbation, half=half, nodes=[0]))
        return torch.full((len(out.nodes),), math.nan, dtype=torch.float64)


class Weakened(NoiseSource):
    """Sabotage: the noise of another source, cut by a third, sold as whole."""

    def __init__(self, source: NoiseSource) -> None:
        self.source = source

    def grid(self, scale: float) -> float:
        return self.source.grid(scale)

    def discreteness(self, step: float) -> float:
        return self.source.discreteness(step)

    def for_local_part(self) -> NoiseSource:
        return Weakened(self.source.for_local_part())

    def release(self, mechanism: Mechanism, scale: float, out: Outgoing) -> Tensor:
        return self.source.release(mechanism, SABOTAGE * scale, out)


def weakened(noise: NoiseFor) -> NoiseFor:
    """The sabotaged twin of a source."""
    return lambda seed: Weakened(noise(seed))
