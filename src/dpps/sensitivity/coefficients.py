"""What the topology alone says about a past round: how differently any two nodes have taken it in.

The proof of everything used here is in docs/certified-sensitivity.md.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
        self.topology = topology
        self.sync_every = sync_every
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
            self._lags[steps] = self._coefficients(
                newer @ self._matrix(steps[0]), self.topology.present(steps[0][0])
            )
            numbers = sum(a.size for a in (newer, self._lags[steps].spread))
            while len(self._lags) * numbers > _KEPT_NUMBERS and len(self._lags) > 1:
                self._lags.popitem(last=False)
        self._lags.move_to_end(steps)
        return self._lags[steps]

    def _coefficients(self, product: Floats, noisy: NDArray[np.bool_] | None) -> Lag:
        if self.by_pairs:
            c = product[self._first] - product[self._second]
            contraction = 0.5 * float(np.abs(c).sum(1).max())
            return Lag(product, np.abs(c), self._pair_means(product, c, noisy), contraction)
        away = np.abs(product - 1 / len(product))
        contraction = float(away.sum(1).max())
        # c = (Phi_i - r) - (Phi_j - r) for any reference r: 0 is better while few nodes have been mixed
        spread = away if contraction < 1 else product
        return Lag(product, spread, _node_means(product, spread, noisy), min(contraction, 1.0))

    def _pair_means(self, product: Floats, c: Floats, noisy: NDArray[np.bool_] | None) -> Floats:
        if noisy is not None:
            return mean_abs(c[:, noisy])
        if not _circulant(product):
            return mean_abs(c)
        by_distance = np.concatenate([[0.0], mean_abs(product[0] - product[1:])])
        means: Floats = by_distance[self._second - self._first]
        return means


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


@lru_cache(maxsize=8)
def coefficients(topology: Topology, sync_every: int) -> Coefficients:
    """The coefficients of this topology; the same object for the same topology."""
    return Coefficients(topology, sync_every)
