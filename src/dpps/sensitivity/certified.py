"""Sensitivities with a proof (docs/certified-sensitivity.md) instead of tuned constants."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from dpps.errors import UsageError
from dpps.noise.mechanisms import Laplace, Mechanism, NoNoise
from dpps.sensitivity.base import (
    SENSITIVITIES,
    Memory,
    ProtocolConfig,
    Released,
    RoundView,
    Sensitivity,
)
from dpps.sensitivity.coefficients import WINDOW, Coefficients, Floats, Lag, coefficients, noise_factor
from dpps.topology import Topology


class Unrolled(Sensitivity):
    r"""A bound from the unrolled recursion, over the rounds k since all rows were equal.

    $$s_i^{(t+1/2)} - s_j^{(t+1/2)} = \varepsilon_i^{(t)} - \varepsilon_j^{(t)}
      + \sum_k \sum_l c_l (\varepsilon_l^{(k)} + \gamma_n n_l^{(k)}), \qquad c = \Phi(t,k)_i - \Phi(t,k)_j$$

    Every node broadcasts the norm of its perturbation (and of its start row, if the rows start different).
    Memory has one row per past round: its clock, the norms, the scale of its noise, and B, numbers with
    ||sum_l c_l s_l(k)||_1 <= sum_l |c_l| B_l for every c that sums to 0. Beside these, `start` bounds what the rows are
    apart by themselves (different start values, or the last mixing's rounding), and `size` the norm of every row.

    Mixing rounds: rows that are equal on paper differ in their last bits. So floating point enters as one more
    perturbation, bounded by the size of the rows.
    """

    @abstractmethod
    def _noise(self, view: RoundView, released: Released) -> tuple[float, float]:
        """What to add to each node's norm, and the scale of noise that is bounded by its distribution."""

    @abstractmethod
    def _factor(self, view: RoundView, rounds: int) -> float:
        """Bound on ||sum_l c_l n_l||_1 over m(c), for unit noise of any of so many past rounds."""

    def start(self, config: ProtocolConfig, s: Tensor) -> Memory:
        norms = config.fabric.gather(s.abs().sum(1, dtype=torch.float64).cpu())
        return _forgotten(torch.zeros_like(norms) if config.common_start else norms, norms.max())

    def estimate(self, memory: Memory, view: RoundView) -> float:
        norms = _rounded(memory, view)
        rows = self._carried(memory, view, _lags(memory, view))
        return _coefficients(view).widest((norms + memory["start"]).numpy(), rows)

    def advance(self, memory: Memory, view: RoundView, released: Released) -> Memory:
        norms = _rounded(memory, view)
        extra, scale = self._noise(view, released)
        size = memory["size"] + norms.max() + extra + self._loudest(view, scale)
        if released.synchronised:
            return _forgotten(torch.zeros_like(norms), size)
        lags = _lags(memory, view)
        # the rounds that were summed up in this round will not be needed one by one again
        kept = min(len(lags), WINDOW - 1)
        row = {
            "clocks": torch.tensor(view.clock),
            "norms": norms + extra + (memory["start"] if lags else 0.0),
            "scales": torch.tensor(scale, dtype=torch.float64),
            "bases": self._base(memory, view, lags),
        }
        longer = {
            name: torch.cat([memory[name][len(memory[name]) - kept :], row[name][None]]) for name in row
        }
        return {**longer, "start": torch.full_like(norms, _mixing(view, float(size))), "size": size}

    def _loudest(self, view: RoundView, scale: float) -> float:
        """Bound on the norm of everybody's noise of this round, but for a probability below 1e-30 over any run.

        Round t spends delta / ((t+1)(t+2)), so T rounds leave delta / (T+1) unspent: that pays for it.
        """
        if scale == 0:
            return 0.0
        config, t = view.config, view.round
        x = 70 + math.log(config.topology.nodes * (t + 1) * (t + 2))
        return scale * noise_factor(config.dimension, x)

    def _base(self, memory: Memory, view: RoundView, lags: list[Lag]) -> Tensor:
        """B of this round: the start norms, or half the widest distance D (c moves a mass of ||c||_1 / 2)."""
        if not lags:
            return memory["start"]
        apart = self._carried(memory, view, lags)
        start = memory["start"]
        return torch.full_like(start, 0.5 * _coefficients(view).widest(start.numpy(), apart))

    def _carried(self, memory: Memory, view: RoundView, lags: list[Lag]) -> Floats:
        """What past rounds can have put between the nodes of each row: one by one, then B for the older."""
        apart = np.zeros(_coefficients(view).rows)
        if not lags:
            return apart
        norms, scales, bases = (memory[name].numpy() for name in ("norms", "scales", "bases"))
        factor = self._factor(view, len(lags))
        for age, lag in enumerate(lags, start=1):
            apart += lag.spread @ norms[-age] + scales[-age] * factor * lag.mean
        apart += lags[-1].spread @ bases[-len(lags)]
        return apart


@SENSITIVITIES.register("certified")
@dataclass(frozen=True)
class Certified(Unrolled):
    r"""A bound on the real distance, in all rounds at once with probability 1 - delta over the noise.

    Perturbations enter with the norms that every node broadcasts; noise enters with its distribution,
    $\|\sum_l c_l n_l\|_1 \le \theta\, m(c)\,(d + \sqrt{2 d x} + x)$ but for probability $e^{-x}$, so nothing
    about its actual values is published. Round t may spend delta / ((t+1)(t+2)), whatever the length of the
    run. The perturbation norms are still data-dependent. Topology, dropouts and clock restarts must not be
    chosen by looking at the noise.

    Args:
        delta: probability, over the noise of the whole run, that the bound fails in any round.
    """

    delta: float = 1e-6

    @classmethod
    def from_options(cls, options: Any) -> Self:
        return cls(options.delta)

    needs_noise_norms = False

    def __post_init__(self) -> None:
        if not 0 < self.delta < 1:
            raise UsageError(f"delta is {self.delta}: it must lie between 0 and 1, exclusive, such as 1e-6")

    def start(self, config: ProtocolConfig, s: Tensor) -> Memory:
        _need_laplace(config.mechanism)
        return super().start(config, s)

    def gain(self, mechanism: Mechanism, topology: Topology, dimension: int, *, rounds: int = 1000) -> float:
        """Factor with which the noise of past rounds comes back in S when nobody synchronises.

        S stays bounded if it is below 1, and grows without end if it is above 1 in every phase. Delta is
        spread over time, so the gain rises, very slowly, with the length of the run.

        Args:
            mechanism: Laplace noise.
            topology: who sends to whom.
            dimension: d_s, the length of a row.
            rounds: length of the run.
        """
        _need_laplace(mechanism)
        table = coefficients(topology, 0)
        gains = []
        for phase in range(topology.examined):
            lags = list(table.lags(range(phase, phase + WINDOW)))
            factor = noise_factor(dimension, self.failure_exponent(topology, rounds, len(lags)))
            gains.append(mechanism.scale(1.0) * factor * _returned(table, lags))
        return max(gains)

    def _noise(self, view: RoundView, released: Released) -> tuple[float, float]:
        return _rounding(view, released), released.scale

    def _factor(self, view: RoundView, rounds: int) -> float:
        return noise_factor(
            view.config.dimension, self.failure_exponent(view.config.topology, view.round, rounds)
        )

    def failure_exponent(self, topology: Topology, t: int, rounds: int) -> float:
        """Union bound over pairs, past rounds and t: the shares 1 / ((t+1)(t+2)) sum to 1 over all t."""
        pairs = topology.nodes * (topology.nodes - 1) / 2
        return math.log(pairs * rounds * (t + 1) * (t + 2) / self.delta)


@SENSITIVITIES.register("worst-case")
@dataclass(frozen=True)
class WorstCase(Unrolled):
    r"""A bound that always holds: noise enters with $2\,\tau(\Phi) \max_l \|n_l\|_1$, tau of Dobrushin.

    It needs the largest of the exact noise norms to be broadcast, and that leaks: message and noise norm
    together can identify the value that the noise was to hide. For study; to protect, use `Certified`.
    """

    def _noise(self, view: RoundView, released: Released) -> tuple[float, float]:
        return view.config.fabric.max(released.noise_norms) + _rounding(view, released), 0.0

    def _factor(self, view: RoundView, rounds: int) -> float:
        return 0.0


def _coefficients(view: RoundView) -> Coefficients:
    return coefficients(view.config.topology, view.config.sync_every)


def _lags(memory: Memory, view: RoundView) -> list[Lag]:
    return list(_coefficients(view).lags(memory["clocks"].tolist()))


def _rounded(memory: Memory, view: RoundView) -> Tensor:
    """The norms of the perturbations: adding one to a row rounds each coordinate, and the norm itself is a sum of d numbers."""
    norms = view.all_norms
    unit = torch.finfo(view.half.dtype).eps
    return torch.where(norms > 0, norms + unit * (memory["size"] + 4 * norms), norms)


def _mixing(view: RoundView, size: float) -> float:
    """What floating point adds to a row of this norm in one round: noise is added, k weighted messages are added up.

    Adding k numbers in any order is wrong by at most k u times the sum of their sizes (u: half a last place), weights and
    products are rounded by u each, the noised message twice; the weights of a row sum to 1. Two more u cover products of u.
    """
    config, weights = view.config, view.config.topology.weights(view.clock)
    averaged = config.sync_every > 0 and (view.clock + 1) % config.sync_every == 0
    terms = config.topology.nodes if averaged else int(np.diff(weights.indptr).max())
    numbers = torch.finfo(view.half.dtype)
    return (terms + 6) * numbers.eps / 2 * size + config.dimension * numbers.tiny


def _forgotten(start: Tensor, size: Tensor) -> Memory:
    """Memory without past rounds; `start` bounds what the rows differ by as it is."""
    nothing = start.new_zeros(0, len(start))
    return {
        "clocks": torch.zeros(0, dtype=torch.int64),
        "norms": nothing,
        "scales": start.new_zeros(0),
        "bases": nothing,
        "start": start,
        "size": size,
    }


def _rounding(view: RoundView, released: Released) -> float:
    """On a grid g: rounding moves a coordinate by at most g, discrete noise is within g of Laplace noise."""
    return 2 * view.config.dimension * released.step


def _returned(table: Coefficients, lags: list[Lag]) -> float:
    """Sum over the lags of m(c) for the worst pair; older rounds come back through B."""
    left = 1 - lags[-1].contraction
    if left <= 0:
        return math.inf
    return table.widest(np.zeros(table.topology.nodes), np.sum([lag.mean for lag in lags], axis=0)) / left


def _need_laplace(mechanism: Mechanism) -> None:
    if not isinstance(mechanism, (Laplace, NoNoise)):
        raise UsageError(
            f"Certified bounds Laplace noise by its distribution and {mechanism.name!r} noise has another: "
            "use Laplace, or WorstCase (its noise norms leak)"
        )
