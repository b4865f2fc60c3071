"""The partner graph: who shares noise that cancels with whom, and how much noise makes it safe against a coalition.

Partners i and j draw the same Gaussian n_ij from a secret that only they know; i adds it to its message and j subtracts it.
`docs/cancelling-noise.md` has the proof; in short, what the m honest nodes H send in a round has, per coordinate, the covariance
Sigma_H = sigma^2 I + tau^2 L_H, L_H the Laplacian of the partner graph among them, whatever a coalition of the others
subtracts. A change of row i by Delta is then a Gaussian mechanism of multiplier 1 / (Delta sqrt([Sigma_H^-1]_ii)).

Variances here are in units of what noise without partners would need, so the promise reads [Sigma_H^-1]_ii <= 1.
"""

import hashlib
import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

COMPLETE_UP_TO = 32
"""Up to this many nodes all are each other's partners, unless a graph is given."""
MEAN_VARIANCE = 1.25
"""Default variance of the noise in the mean, over the least possible. Less needs ever more pair noise in the messages, which
rows that are not yet mixed feel (docs/cancelling-noise.md has measurements)."""

_COALITIONS = 512  # looked at one by one; beyond that Fiedler's bound stands for all of them
_HAIR = 1e-9  # eigenvalues are rounded down, variances up, by this much

Edges = NDArray[np.int64]
Present = NDArray[np.bool_] | None
"""Which nodes take part in a round; None: everybody."""
Spectra = list[tuple[NDArray[np.float64], NDArray[np.float64]]]
"""(weights, eigenvalues) of honest rows: [Sigma^-1]_ii = sum of weight / (sigma^2 + tau^2 eigenvalue)."""


@dataclass(frozen=True)
class Shares:
    """Standard deviations of a message's noise, in units of what noise without partners would need: sigma, of the noise that
    a node keeps for itself, and tau, of the noise that each pair of partners shares."""

    independent: float
    pair: float


@dataclass(frozen=True, eq=False)
class Partners:
    """A partner graph and the noise that makes it safe against `colluders` nodes while `absentees` more are lost for good.

    `edges` is (E, 2), i < j in every row, or None for all pairs. `mean_variance` is as in `Pairs`.
    """

    nodes: int
    edges: Edges | None
    colluders: int
    mean_variance: float = MEAN_VARIANCE
    absentees: int = 0
    _known: dict[bytes, Shares] = field(default_factory=dict, init=False)

    def among(self, present: Present = None) -> Edges:
        """The pairs of the nodes that take part in a round."""
        if self.edges is None:
            here = np.arange(self.nodes) if present is None else np.flatnonzero(present)
            first, second = np.triu_indices(len(here), 1)
            return np.stack([here[first], here[second]], 1)
        return self.edges if present is None else self.edges[present[self.edges].all(1)]

    def shares(self, present: Present = None) -> Shares:
        """The noise of a round in which these nodes take part.

        Fewer nodes hide each other less, so it is solved anew for every set of nodes: the multiplier stays what was promised.
        """
        key = b"" if present is None else np.packbits(present).tobytes()
        if key not in self._known:
            if len(self._known) > 64:
                self._known.clear()
            self._known[key] = self._solved(present)
        return self._known[key]

    def _solved(self, present: Present) -> Shares:
        spectra = self.spectra(self.colluders + self.absentees, present)
        least = max(float(weights[values <= 0].sum()) for weights, values in spectra)
        own = self.mean_variance * least
        if own >= 1:
            return Shares(1.0, 0.0)  # so few are left that pair noise would help nobody
        low, high = 0.0, 1.0
        while _inverse(spectra, own, high) > 1:
            low, high = high, 4 * high
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (low, middle) if _inverse(spectra, own, middle) <= 1 else (middle, high)
        return Shares(_rounded_up(math.sqrt(own)), _rounded_up(math.sqrt(high)))

    def spectra(self, colluders: int, present: Present = None) -> Spectra:
        """What any honest node can count on when the worst coalition of this size is taken away.

        Exact for complete graphs, and where the coalitions can be looked at one by one. Otherwise the honest rows' second
        eigenvalue is at least lambda_2 - colluders (Fiedler 1973: taking a vertex away lowers it by at most 1), which is the
        worst place for all the weight that is not on the mean.
        """
        count = self.nodes if present is None else int(present.sum())
        honest = max(1, count - colluders)
        on_mean = np.array([1 / honest, 1 - 1 / honest])
        if self.edges is None or honest == 1:
            return [(on_mean, np.array([0.0, float(honest)]))]
        here = np.arange(self.nodes) if present is None else np.flatnonzero(present)
        laplacian = self._laplacian(present)[np.ix_(here, here)]
        if count <= COMPLETE_UP_TO and math.comb(count, count - honest) <= _COALITIONS:
            return _every_coalition(laplacian, honest)
        left = max(0.0, _connectivity(laplacian) - (count - honest))
        return [(on_mean, np.array([0.0, left]))]

    def _laplacian(self, present: Present) -> NDArray[np.float64]:
        laplacian = np.zeros((self.nodes, self.nodes))
        first, second = self.among(present).T
        laplacian[first, second] = laplacian[second, first] = -1
        np.fill_diagonal(laplacian, -laplacian.sum(1))
        return laplacian

    def loss(self, colluders: int) -> float:
        """The round's noise multiplier against that many colluders, over the promised one: below 1 if more than declared."""
        shares, known = self.shares(), min(colluders + self.absentees, self.nodes - 1)
        return 1 / math.sqrt(_inverse(self.spectra(known), shares.independent**2, shares.pair**2))

    def largest_eigenvalue(self, present: Present = None) -> float:
        """No eigenvalue of the Laplacian is above this, whoever is taken away."""
        count = self.nodes if present is None else int(present.sum())
        return float(count if self.edges is None else 2 * self.degree)

    def message_deviation(self, present: Present = None) -> float:
        """Standard deviation of the noise in a message of the node with most partners."""
        shares = self.shares(present)
        most = int(present.sum()) - 1 if self.edges is None and present is not None else self.degree
        return math.sqrt(shares.independent**2 + most * shares.pair**2)

    @cached_property
    def degree(self) -> int:
        """Partners of the node that has most."""
        return self.nodes - 1 if self.edges is None else int(np.bincount(self.edges.ravel()).max())

    @cached_property
    def strength(self) -> float:
        """lambda_2 - colluders - absentees: the algebraic connectivity that is surely left among the honest."""
        whole = float(self.nodes) if self.edges is None else _connectivity(self._laplacian(None))
        return whole - self.colluders - self.absentees

    def at(self, mean_variance: float) -> "Partners":
        """The same partners with another share of pair noise."""
        return replace(self, mean_variance=mean_variance)

    @property
    def mean_over_server(self) -> float:
        """Variance of the noise in the network's mean over that of a trusted server."""
        return self.shares().independent ** 2 * self.nodes

    @property
    def absences(self) -> int:
        """Nodes that may stay away unannounced in a round before the mean is noisier than without partners.

        When u nodes are silent, the pair noise on the edges between them and the others stays: u (N-u) of them in a complete
        graph, at most u times the degree otherwise. Without partners the others' sum has the variance N-u.
        """
        shares = self.shares()
        for away in range(1, self.nodes):
            cut = away * min(self.degree, self.nodes - away)
            if shares.independent**2 + shares.pair**2 * cut / (self.nodes - away) > 1 + 1e-6:
                return away - 1
        return self.nodes - 1

    @property
    def digest(self) -> str:
        """Tells one partner graph from another."""
        if self.edges is None:
            return "complete"
        return hashlib.sha256(np.ascontiguousarray(self.edges, dtype="<i8").tobytes()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """For the contract: everything that the promise rests on."""
        shares = self.shares()
        return {
            "trust": "pairs",
            "colluders": self.colluders,
            "graph": self.digest,
            "degree": self.degree,
            "strength": round(self.strength, 6),
            "sigma": shares.independent,
            "tau": shares.pair,
            **({"absentees": self.absentees} if self.absentees else {}),
        }


def _inverse(spectra: Spectra, own: float, pair: float) -> float:
    """The largest [Sigma^-1]_ii, given both variances."""
    return max(float((weights / (own + pair * values)).sum()) for weights, values in spectra)


def _rounded_up(value: float) -> float:
    """To nine digits, so that machines whose eigenvalues differ in the last ones draw the same noise."""
    digits = 9 - math.ceil(math.log10(value))
    return math.ceil(value * 10.0**digits * (1 + _HAIR)) / 10.0**digits


def _every_coalition(laplacian: NDArray[np.float64], honest: int) -> Spectra:
    """Of every honest set of this size, one entry for each of its nodes."""
    found: Spectra = []
    for chosen in combinations(range(len(laplacian)), honest):
        part = laplacian[np.ix_(chosen, chosen)].copy()
        np.fill_diagonal(part, 0)
        np.fill_diagonal(part, -part.sum(1))
        values, vectors = np.linalg.eigh(part)
        values = np.where(values < _HAIR, 0.0, values - _HAIR)
        found += [(row**2, values) for row in vectors]
    return found


def _connectivity(laplacian: NDArray[np.float64]) -> float:
    """lambda_2, rounded down."""
    return max(0.0, float(np.linalg.eigvalsh(laplacian)[1]) - _HAIR * len(laplacian))
