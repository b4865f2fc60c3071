"""What tests of the protocol share."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

import dpps
from dpps.noise import Mechanism, NoiseSource, Outgoing
from dpps.topology import Weights


def column_stochastic(n: int) -> dpps.Topology:
    """Node 0 keeps less than it should: columns sum to 1, rows do not."""
    w = dpps.Ring(n).weights(0).dense()
    w = 0.5 * w + 0.5 * np.eye(n)
    w[:, 0] = 0
    w[0, 0], w[1, 0] = 0.3, 0.7
    return dpps.Static(w)


class Wire(dpps.Stacked):
    """Keeps the messages that leave."""

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes)
        self.sent: list[Tensor] = []

    def mix(self, weights: Weights, *xs: Tensor) -> list[Tensor]:
        self.sent.append(xs[0].clone())
        return super().mix(weights, *xs)


class Scripted(NoiseSource):
    """Noise handed over in advance, one (rows, d) array of unit-scale noise per round."""

    def __init__(self, unit_noise: Sequence[np.ndarray | Tensor]) -> None:
        self._unit = [torch.as_tensor(n) for n in unit_noise]

    def release(self, mechanism: Mechanism, scale: float, out: Outgoing) -> Tensor:
        noise = self._unit[out.round][list(out.nodes)].to(out.half) * scale
        out.half.add_(noise)
        return noise.abs().sum(1).to("cpu", torch.float64)
