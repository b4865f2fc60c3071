"""A bound on the sensitivity with a proof (docs/proofs.md) instead of tuned constants.

First what the topology alone says about a past round: how differently any two nodes have taken it in (`Coefficients`).
Then the bound that is made of it (`Unrolled`, `Certified`).
"""

import math
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpps.errors import UsageError
from dpps.noise import Laplace, Mechanism, NoNoise
from dpps.sensitivity.base import (
    SENSITIVITIES,
    Memory,
    ProtocolConfig,
    Released,
    RoundView,
    Sensitivity,
)
from dpps.topology import Topology

Floats = NDArray[np.float64]

PAIRS_UP_TO = 64
"""Up to this many nodes every pair has its own coefficients; beyond, a pair is bounded by its two nodes."""

WINDOW = 64
"""How many past rounds are looked at one by one; older ones are summed up in one bound."""

NEGLIGIBLE = 1e-3
"""Contraction from which on older rounds are summed up: that costs at most a thousandth of their bound."""

LARGEST_MEAN = 2 / math.sqrt(math.pi)
"""m(c) <= 2/sqrt(pi) ||c||_2: the value of many small coefficients of equal size (the central limit)."""

_KEPT_NUMBERS = 1 << 24
_ANGLES = 64


def mean_abs(c: Floats) -> Floats:
    r"""m(c) = E|sum_l c_l L_l| for independent standard Laplace L_l; c is (..., N).

    $$m(c) = \frac2\pi \int_0^\infty \Bigl(1 - \prod_l \frac1{1 + c_l^2 u^2}\Bigr) \frac{du}{u^2}$$
    With u = tan(phi) the integrand is smooth and periodic, so equally spaced angles converge exponentially
    fast where coefficients are of one size; where they differ most the error is 2e-7 (a search over 4,000 rows). c is
    scaled to ||c||_2 = 1 first: the angles are chosen for that. The result is rounded up by 1e-6.
    """
    norm = np.linalg.norm(c, axis=-1)
    unit = c / np.where(norm > 0, norm, 1.0)[..., None]
    angles = (np.arange(_ANGLES) + 0.5) * (math.pi / 2 / _ANGLES)
    total = np.zeros_like(norm)
    with np.errstate(over="ignore"):  # an infinite product is as good as the true one: its inverse is 0
        for phi in angles:
            survival = 1 / np.prod(1 + (unit * math.tan(phi)) ** 2, axis=-1)
            total += (1 - survival) / math.sin(phi) ** 2
    mean: Floats = norm * np.minimum(total / _ANGLES * (1 + 1e-6), LARGEST_MEAN)
    return mean


def noise_factor(dimension: int, x: float) -> float:
    """Sum of `dimension` values |<c, L>|, over m(c): above this with probability at most exp(-x)."""
    return dimension + math.sqrt(2 * dimension * x) + x


@dataclass(frozen=True)
class Lag:
    """Coefficients of one past round k, seen from round t. A row stands for a pair of nodes, or for one."""

    product: Floats
    """Phi(t, k) = W(t-1) ... W(k)."""
    spread: Floats
    """(rows, N): |c_l| with c = Phi_i - Phi_j (a pair), or Phi_i - reference (a node)."""
    mean: Floats
    """(rows,): m(c), over the nodes that added noise in round k."""
    contraction: float
    """Dobrushin's coefficient of the product, max over pairs of ||c||_1 / 2, or a bound on it."""


class Coefficients:
    """The coefficients of a topology and a synchronisation period; each is computed once.

    Sequences of rounds are known by their clocks, so a clock that restarts is no special case.
    """

    def __init__(self, topology: Topology, sync_every: int) -> None:
        self.topology, self.sync_every = topology, sync_every
        self.by_pairs = topology.nodes <= PAIRS_UP_TO
        self._first, self._second = np.triu_indices(topology.nodes, k=1)
        self._lags: OrderedDict[tuple[tuple[int, bool], ...], Lag] = OrderedDict()

    @property
    def rows(self) -> int:
        """How many rows every `Lag` has."""
        return len(self._first) if self.by_pairs else self.topology.nodes

    def lags(self, clocks: Sequence[int]) -> Iterator[Lag]:
        """The rounds with these clocks (oldest first), newest first, until older ones may be summed up."""
        steps = [self._step(clock) for clock in clocks[-WINDOW:]]
        for age in range(1, len(steps) + 1):
            lag = self._lag(tuple(steps[-age:]))
            yield lag
            if lag.contraction <= NEGLIGIBLE:
                return

    def widest(self, nodes: Floats, rows: Floats) -> float:
        """max over pairs of nodes_i + nodes_j + what the rows say of the pair."""
        if self.by_pairs:
            return float(np.max(nodes[self._first] + nodes[self._second] + rows))
        return float(np.sum(np.partition(nodes + rows, -2)[-2:]))

    def _step(self, clock: int) -> tuple[int, bool]:
        """What a round did to the rows: its phase, and whether it averaged over those present."""
        period = self.topology.period
        if self.topology.present(clock) is None:
            return (clock % period if period else clock), False
        return clock, self.sync_every > 0 and (clock + 1) % self.sync_every == 0

    def _matrix(self, step: tuple[int, bool]) -> Any:
        clock, averaged = step
        present = self.topology.present(clock)
        if not averaged or present is None:
            return self.topology.weights(clock).matrix
        matrix = np.diag((~present).astype(np.float64))
        matrix[np.ix_(present, present)] = 1 / present.sum()
        return matrix

    def _lag(self, steps: tuple[tuple[int, bool], ...]) -> Lag:
        if steps not in self._lags:
            # Phi(t, k) = Phi(t, k+1) W(k): the oldest round is the rightmost factor
            newer = self._lag(steps[1:]).product if len(steps) > 1 else np.eye(self.topology.nodes)
            product, noisy = newer @ self._matrix(steps[0]), self.topology.present(steps[0][0])
            self._lags[steps] = self._coefficients(product, noisy)
            numbers = product.size + self._lags[steps].spread.size
            while len(self._lags) * numbers > _KEPT_NUMBERS and len(self._lags) > 1:
                self._lags.popitem(last=False)
        self._lags.move_to_end(steps)
        return self._lags[steps]

    def _coefficients(self, product: Floats, noisy: NDArray[np.bool_] | None) -> Lag:
        if self.by_pairs:
            c = product[self._first] - product[self._second]
            contraction = 0.5 * float(np.abs(c).sum(1).max())
            if noisy is not None or not _circulant(product):
                means = mean_abs(c if noisy is None else c[:, noisy])
            else:
                means = mean_abs(product[0] - product)[self._second - self._first]
            return Lag(product, np.abs(c), means, contraction)
        away = np.abs(product - 1 / len(product))
        contraction = float(away.sum(1).max())
        # c = (Phi_i - r) - (Phi_j - r) for any reference r: 0 is better while few nodes have been mixed
        spread = away if contraction < 1 else product
        return Lag(product, spread, _node_means(product, spread, noisy), min(contraction, 1.0))


def _node_means(product: Floats, spread: Floats, noisy: NDArray[np.bool_] | None) -> Floats:
    """Numbers with m(c) <= means_i + means_j for the pair (i, j)."""
    if noisy is None and _circulant(product):
        widest = np.linalg.norm(product[0] - product[1:], axis=1).max()
        return np.full(len(product), 0.5 * LARGEST_MEAN * widest)
    means: Floats = LARGEST_MEAN * np.linalg.norm(spread if noisy is None else spread[:, noisy], axis=1)
    return means


def _circulant(matrix: Floats) -> bool:
    """Whether every row is the first one, shifted: then m(c) of a pair depends on its distance alone."""
    n = np.arange(len(matrix))
    return bool(np.allclose(matrix, matrix[0][(n - n[:, None]) % len(n)], rtol=0, atol=1e-12))


coefficients = lru_cache(maxsize=8)(Coefficients)
"""The coefficients of a topology and a synchronisation period; the same object for the same topology."""


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
        lags, start = _lags(memory, view), memory["start"]
        # B of this round: the start norms, or half the widest distance (c moves a mass of ||c||_1 / 2)
        apart = _coefficients(view).widest(start.numpy(), self._carried(memory, view, lags))
        bases = torch.full_like(start, 0.5 * apart) if lags else start
        # the rounds that were summed up in this round will not be needed one by one again
        kept = min(len(lags), WINDOW - 1)
        row = {
            "clocks": torch.tensor(view.clock),
            "norms": norms + extra + (start if lags else 0.0),
            "scales": torch.tensor(scale, dtype=torch.float64),
            "bases": bases,
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
            left = 1 - lags[-1].contraction  # older rounds come back through B
            carried = np.sum([lag.mean for lag in lags], axis=0)
            returned = table.widest(np.zeros(topology.nodes), carried) / left if left > 0 else math.inf
            gains.append(mechanism.scale(1.0) * factor * returned)
        return max(gains)

    def _noise(self, view: RoundView, released: Released) -> tuple[float, float]:
        return grid_rounding(view, released), released.scale

    def _factor(self, view: RoundView, rounds: int) -> float:
        return noise_factor(
            view.config.dimension, self.failure_exponent(view.config.topology, view.round, rounds)
        )

    def failure_exponent(self, topology: Topology, t: int, rounds: int) -> float:
        """Union bound over pairs, past rounds and t: the shares 1 / ((t+1)(t+2)) sum to 1 over all t."""
        pairs = topology.nodes * (topology.nodes - 1) / 2
        return math.log(pairs * rounds * (t + 1) * (t + 2) / self.delta)


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


def grid_rounding(view: RoundView, released: Released) -> float:
    """On a grid g: rounding moves a coordinate by at most g, discrete noise is within g of Laplace noise."""
    return 2 * view.config.dimension * released.step


def _need_laplace(mechanism: Mechanism) -> None:
    if not isinstance(mechanism, (Laplace, NoNoise)):
        raise UsageError(
            f"Certified bounds Laplace noise by its distribution and {mechanism.name!r} noise has another: "
            "use Laplace, or WorstCase (its noise norms leak)"
        )
