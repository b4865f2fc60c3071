"""Whom a node trusts: nobody (all of its noise is its own), or partners with whom it shares noise that cancels in the sum.

Partners i and j draw the same Gaussian n_ij from a secret that only they know; i adds it to its message and j subtracts it.
`docs/cancelling-noise.md` has the proof; in short, what the m honest nodes H send in a round has, per coordinate, the covariance
Sigma_H = sigma^2 I + tau^2 L_H, L_H the Laplacian of the partner graph among them, whatever a coalition of the others
subtracts. A change of row i by Delta is then a Gaussian mechanism of multiplier 1 / (Delta sqrt([Sigma_H^-1]_ii)).

Variances here are in units of what noise without partners would need, so the promise reads [Sigma_H^-1]_ii <= 1.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpps.errors import UsageError

if TYPE_CHECKING:
    import networkx

COMPLETE_UP_TO = 32
"""Nodes among whom everybody is everybody's partner, unless a graph is given."""
LARGEST = 4096
"""Nodes of a partner graph that is not complete: its strength comes from all eigenvalues of a dense matrix."""
MEAN_VARIANCE = 1.25
"""The variance of the noise in the mean, over the least possible. Less would need ever more pair noise in the
messages, which rows that are not yet mixed feel (docs/cancelling-noise.md has measurements)."""
OTHER_MEAN_VARIANCES = (1.1, 1.25, 1.5625, 2.0, 4.0)
"""What `dpps plan` compares the chosen one with."""

_COALITIONS = 512  # looked at one by one; beyond that Fiedler's bound stands for all of them
_STRENGTH = 0.3  # of the degree, that a random regular graph must keep when the coalition is taken away
_HAIR = 1e-9  # eigenvalues are rounded down, variances up, by this much

Edges = NDArray[np.int64]
Spectra = list[tuple[NDArray[np.float64], NDArray[np.float64]]]
"""(weights, eigenvalues) of honest rows: [Sigma^-1]_ii = sum of weight / (sigma^2 + tau^2 eigenvalue)."""


@dataclass(frozen=True)
class Nobody:
    """Every node's noise is its own and independent: nothing is shared, nothing cancels."""

    name = "nobody"

    def partners(self, nodes: int) -> None:
        """There are none."""

    def for_network(self, nodes: int) -> "Nobody":
        """The same in a network of so many nodes."""
        return self

    def who(self) -> str:
        """What is said of other nodes in a statement: nothing rests on them, whatever they do."""
        return ""

    def not_covered(self) -> str:
        """What is not covered because of it."""
        return ""


@dataclass(frozen=True)
class Pairs:
    """Partners share noise that cancels in the sum: the mean is nearly as exact as with a trusted server.

    Args:
        colluders: how many other nodes may pool their secrets with the observer; a third of the nodes, rounded down, if left out.
        mean_variance: variance of the noise in the network's mean over the least that so many colluders allow (which without
            colluders is a trusted server's). Closer to 1 needs ever more pair noise in every message.
        graph: who is whose partner, on nodes 0 to N-1; by default everybody up to 32 nodes, above that a random regular graph.
        degree: of that random graph; by default enough for the colluders.
        seed: of that random graph; public.
        absentees: how many nodes may be lost for good: the noise that the others shared with them is taken back, which an observer
            then knows, so the noise is solved for so many colluders more. Between organisations only.
    """

    colluders: int | None = None
    mean_variance: float = MEAN_VARIANCE
    graph: "networkx.Graph[int] | None" = None
    degree: int | None = None
    seed: int = 0
    absentees: int = 0
    name = "pairs"

    def __post_init__(self) -> None:
        if self.absentees < 0:
            raise UsageError(f"absentees is {self.absentees}: it must be 0 or more")
        if self.colluders is not None and self.colluders < 0:
            raise UsageError(f"colluders is {self.colluders}: it must be 0 or more")
        if not 1 < self.mean_variance < math.inf:
            why = "it must be above 1 (1 would need endless pair noise); 1.25 is usual"
            raise UsageError(f"mean_variance is {self.mean_variance}: {why}")
        if self.graph is not None and self.degree is not None:
            raise UsageError(f"a graph and degree {self.degree} were given: choose one")

    def for_network(self, nodes: int) -> "Pairs":
        """The same in a network of so many nodes, with the number of colluders, which statements name."""
        return replace(self, colluders=self.coalition(nodes))

    def coalition(self, nodes: int) -> int:
        """How many colluders a network of so many nodes must stand."""
        return nodes // 3 if self.colluders is None else self.colluders

    @lru_cache(maxsize=8)  # noqa: B019 - frozen, and few
    def partners(self, nodes: int) -> "Partners":
        """The partner graph of a network of so many nodes, and how much noise it takes."""
        colluders = self.coalition(nodes)
        if nodes < 2:
            raise UsageError("a network of one node has no partners: trust nobody instead")
        if colluders > nodes - 2:
            raise UsageError(
                f"colluders is {colluders}: with {nodes} nodes it must be {nodes - 2} or less, because pair noise hides a "
                "node behind at least one other honest node; trust nobody instead"
            )
        if colluders + self.absentees > nodes - 2:
            raise UsageError(
                f"colluders is {colluders} and absentees {self.absentees}: with {nodes} nodes both together must be {nodes - 2} or "
                "less, because pair noise hides a node behind at least one other honest node that is there; use fewer"
            )
        edges = self._edges(nodes, colluders + self.absentees)
        made = Partners(nodes, edges, colluders, self.mean_variance, self.absentees)
        if made.shares().pair == 0:  # solved in vain: all noise would be independent, and nothing cancel
            raise UsageError(
                f"the partner graph (strength lambda_2 - C = {made.strength:.3g}) has no use for pair noise against {colluders} "
                f"colluders at mean_variance {self.mean_variance:g}: use more partners, fewer colluders or a smaller mean_variance"
            )
        return made

    def who(self) -> str:
        """The coalition, in a statement."""
        gone = "1 node that is" if self.absentees == 1 else f"{self.absentees} nodes that are"
        lost = f", and the noise that was shared with up to {gone} lost for good" if self.absentees else ""
        if self.colluders == 0:
            return f" but knows no node's secrets{lost.replace(', and', ' but', 1)}"
        many = "a third of the nodes, rounded down," if self.colluders is None else self.colluders
        return f" and knows the data and the secrets of up to {many} of the other nodes acting together{lost}"

    def not_covered(self) -> str:
        """What is not covered because of it."""
        return (
            "; if more nodes than that pool their secrets, epsilon is larger (dpps plan prints how much, down to all others "
            "together); nodes that lie about their keys are not covered unless the transport proves who owns a key"
        ) + (
            f"; if more nodes than {self.absentees} are lost for good, this promise holds and the model becomes less accurate"
            if self.absentees
            else ""
        )

    def _edges(self, nodes: int, colluders: int) -> Edges | None:
        if self.graph is not None:
            return _edges_of(self.graph, nodes)
        degree = self.degree
        if degree is None:
            degree = nodes if nodes <= COMPLETE_UP_TO else enough_degree(colluders)
            if 4 * degree > nodes:
                return None
        if not 1 <= degree < nodes or degree * nodes % 2:
            raise UsageError(
                f"degree is {degree}: every one of {nodes} nodes must have 1 to {nodes - 1} partners, and nodes x degree must be even"
            )
        if degree == nodes - 1:
            return None
        import networkx

        return _edges_of(networkx.random_regular_graph(degree, nodes, seed=self.seed), nodes)


Trust = Nobody | Pairs
NOBODY = Nobody()
TRUSTS: dict[str, type[Trust]] = {Nobody.name: Nobody, Pairs.name: Pairs}
"""What `dpps train --trust` offers."""


@dataclass(frozen=True)
class Shares:
    """Standard deviations of a message's noise, in units of what noise without partners would need.

    Attributes:
        independent: sigma, of the noise that a node keeps for itself.
        pair: tau, of the noise that each pair of partners shares; 0: none.
    """

    independent: float
    pair: float


@dataclass(frozen=True, eq=False)
class Partners:
    """A partner graph and the noise that makes it safe against a coalition.

    Args:
        nodes: N.
        edges: (E, 2), i < j in every row, or None: everybody is everybody's partner.
        colluders: how many nodes may pool their secrets.
        mean_variance: as in `Pairs`.
        absentees: how many may be lost for good.
    """

    nodes: int
    edges: Edges | None
    colluders: int
    mean_variance: float = MEAN_VARIANCE
    absentees: int = 0
    _known: dict[bytes, Shares] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether everybody is everybody's partner."""
        return self.edges is None

    def among(self, present: NDArray[np.bool_] | None = None) -> Edges:
        """The pairs of the nodes that take part in a round."""
        if self.edges is None:
            here = np.arange(self.nodes) if present is None else np.flatnonzero(present)
            first, second = np.triu_indices(len(here), 1)
            return np.stack([here[first], here[second]], 1)
        return self.edges if present is None else self.edges[present[self.edges].all(1)]

    def shares(self, present: NDArray[np.bool_] | None = None) -> Shares:
        """The noise of a round in which these nodes take part.

        Fewer nodes hide each other less, so it is solved anew for every set of nodes: the multiplier stays what was promised.
        """
        key = b"" if present is None else np.packbits(present).tobytes()
        if key not in self._known:
            if len(self._known) > 64:
                self._known.clear()
            self._known[key] = self._solved(present)
        return self._known[key]

    def _solved(self, present: NDArray[np.bool_] | None) -> Shares:
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

    def spectra(self, colluders: int, present: NDArray[np.bool_] | None = None) -> Spectra:
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

    def _laplacian(self, present: NDArray[np.bool_] | None) -> NDArray[np.float64]:
        laplacian = np.zeros((self.nodes, self.nodes))
        first, second = self.among(present).T
        laplacian[first, second] = laplacian[second, first] = -1
        np.fill_diagonal(laplacian, -laplacian.sum(1))
        return laplacian

    def loss(self, colluders: int) -> float:
        """The round's multiplier against so many colluders, over the promised one: below 1 when they are more than declared."""
        shares, known = self.shares(), min(colluders + self.absentees, self.nodes - 1)
        return 1 / math.sqrt(_inverse(self.spectra(known), shares.independent**2, shares.pair**2))

    def largest_eigenvalue(self, present: NDArray[np.bool_] | None = None) -> float:
        """No eigenvalue of the Laplacian is above this, whoever is taken away."""
        count = self.nodes if present is None else int(present.sum())
        return float(count if self.edges is None else 2 * self.degree)

    def most_partners(self, present: NDArray[np.bool_] | None = None) -> int:
        """No node has more partners than this among the nodes that take part."""
        return int(present.sum()) - 1 if self.edges is None and present is not None else self.degree

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
        return Partners(self.nodes, self.edges, self.colluders, mean_variance, self.absentees)

    @property
    def message_variance(self) -> float:
        """Of the noise in a message of the node with most partners."""
        shares = self.shares()
        return shares.independent**2 + self.degree * shares.pair**2

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
        shares, count = self.shares(), 0
        for away in range(1, self.nodes):
            cut = away * min(self.degree, self.nodes - away)
            if shares.independent**2 + shares.pair**2 * cut / (self.nodes - away) > 1 + 1e-6:
                break
            count = away
        return count

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
            "trust": Pairs.name,
            "colluders": self.colluders,
            "graph": self.digest,
            "degree": self.degree,
            "strength": round(self.strength, 6),
            "sigma": shares.independent,
            "tau": shares.pair,
            **({"absentees": self.absentees} if self.absentees else {}),
        }


def enough_degree(colluders: int) -> int:
    """The least even degree at which a random regular graph keeps three tenths of it when the colluders are gone.

    lambda_2 of a random k-regular graph is close to k - 2 sqrt(k-1) (Friedman 2008).
    """
    degree = 2
    while degree - 2 * math.sqrt(degree - 1) - colluders < _STRENGTH * degree:
        degree += 2
    return degree


def _edges_of(graph: "networkx.Graph[int]", nodes: int) -> Edges:
    import networkx

    if graph.is_directed() or graph.is_multigraph() or set(graph.nodes) != set(range(nodes)):
        raise UsageError(
            f"the partner graph is {graph}: it must be an undirected networkx.Graph on the nodes 0 to {nodes - 1}"
        )
    edges: Sequence[tuple[int, int]] = sorted((min(i, j), max(i, j)) for i, j in graph.edges)
    if any(i == j for i, j in edges):
        raise UsageError("the partner graph has a node that is its own partner: leave loops out")
    if (parts := networkx.number_connected_components(graph)) > 1:
        raise UsageError(f"the partner graph is in {parts} parts, which cannot hide each other: connect them")
    if nodes > LARGEST:
        raise UsageError(
            f"a partner graph of {nodes} nodes: its strength is known up to {LARGEST}; use the complete one (degree={nodes - 1})"
        )
    return np.array(edges, dtype=np.int64)


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
