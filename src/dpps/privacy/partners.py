"""Whom a node trusts: nobody (all of its noise is its own), or partners with whom it shares noise that cancels in the sum."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from dpps.errors import UsageError
from dpps.noise.pairs.graph import COMPLETE_UP_TO, MEAN_VARIANCE, Edges, Partners

if TYPE_CHECKING:
    import networkx

LARGEST = 4096
"""Nodes of a partner graph that is not complete: its strength comes from all eigenvalues of a dense matrix."""
OTHER_MEAN_VARIANCES = (1.1, 1.25, 1.5625, 2.0, 4.0)
"""What `dpps plan` compares the chosen one with."""

_STRENGTH = 0.3  # of the degree, that a random regular graph must keep when the coalition is taken away


@dataclass(frozen=True)
class Nobody:
    """Independent noise at every node: nothing is shared, and nothing cancels."""

    name = "nobody"

    def partners(self, nodes: int) -> None:
        """There are none."""

    def for_network(self, nodes: int) -> "Nobody":
        """It is the same in every network."""
        return self

    def who(self) -> str:
        """Nothing: the guarantee does not depend on other nodes."""
        return ""

    not_covered = who


@dataclass(frozen=True)
class Pairs:
    """Partners share noise that cancels in the sum, so the mean is nearly as accurate as with a trusted
    server.

    Args:
        colluders: how many other nodes may pool their secrets with the observer; by default a third of the
            nodes, rounded down.
        mean_variance: variance of the noise in the mean, as a multiple of the minimum possible against that
            many colluders. With no colluders, 1 equals a trusted server. The closer to 1, the more pair
            noise every message carries.
        graph: the partner graph on nodes 0 to N-1; by default all pairs up to 32 nodes, and a random
            regular graph above that.
        degree: of that random graph; by default enough for the colluders.
        seed: of that random graph; public.
        absentees: how many nodes may be lost for good. The noise shared with them is removed again and so
            becomes known to an observer; therefore the noise is calibrated for that many more colluders.
            Between organisations only.
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
