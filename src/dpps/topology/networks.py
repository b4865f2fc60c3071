"""Topologies from networkx graphs."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpps.errors import UsageError
from dpps.topology.base import node_count
from dpps.topology.families import Static
from dpps.topology.weights import Weights

if TYPE_CHECKING:
    from scipy.sparse import csr_array

BALANCING_STEPS = 100_000
"""How often rows and columns are scaled at most to make a directed graph's weights doubly stochastic."""


def from_networkx(graph: Any) -> Static:
    """The graph with doubly stochastic weights; node i is the i-th of ``graph.nodes``.

    Undirected: Metropolis weights 1 / (1 + the larger degree of the two). Directed: the weights on the edges
    and self-loops of the graph whose rows and columns sum to 1 (Sinkhorn). Self-loops are added, parallel edges
    count once, and edge attributes are not read.
    """
    import networkx as nx  # a quarter of a second to load, and few ask

    if not isinstance(graph, nx.Graph):
        raise UsageError(f"from_networkx got {type(graph).__name__}, needs a networkx Graph or DiGraph")
    labels = list(graph.nodes)
    number = {label: i for i, label in enumerate(labels)}
    nodes = node_count(len(labels))
    links = {(number[v], number[u]) for u, v in graph.edges() if u != v}
    if not graph.is_directed():
        return Static(_metropolis(nodes, links | {(j, i) for i, j in links}).matrix())
    return Static(_balanced(nodes, links, labels))


def _metropolis(nodes: int, links: set[tuple[int, int]]) -> Weights:
    receivers, senders = _columns(links)
    degree = np.bincount(receivers, minlength=nodes)
    values = 1.0 / (1.0 + np.maximum(degree[receivers], degree[senders]))
    return Weights.symmetric(nodes, receivers, senders, values)


def _balanced(nodes: int, links: set[tuple[int, int]], labels: list[Any]) -> "csr_array":
    from scipy.sparse import csr_array, diags_array

    receivers, senders = _columns(links | {(i, i) for i in range(nodes)})
    pattern = csr_array((np.ones(receivers.size), (receivers, senders)), shape=(nodes, nodes))
    _check_every_edge_on_a_cycle(pattern, labels)
    rows, columns = _sinkhorn(pattern)
    return diags_array(rows) @ pattern @ diags_array(columns)


def _check_every_edge_on_a_cycle(pattern: "csr_array", labels: list[Any]) -> None:
    """With self-loops, doubly stochastic weights exist if and only if every edge lies on a cycle."""
    from scipy.sparse.csgraph import connected_components

    _, component = connected_components(pattern, directed=True, connection="strong")
    receivers, senders = pattern.nonzero()
    one_way = np.flatnonzero(component[receivers] != component[senders])
    if one_way.size:
        sender, receiver = labels[senders[one_way[0]]], labels[receivers[one_way[0]]]
        raise UsageError(
            f"the directed graph cannot be balanced: it is not strongly connected, no way leads back from "
            f"{receiver!r} to {sender!r}, so doubly stochastic weights cannot use the edge {sender!r} -> "
            f"{receiver!r}; add a way back, or use Static with weights whose columns alone sum to 1"
        )


def _sinkhorn(pattern: "csr_array") -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Scales of rows and columns with which both sum to 1, by making now the ones and now the others so."""
    transposed = pattern.T.tocsr()
    rows = np.ones(pattern.shape[0])
    for _ in range(BALANCING_STEPS):
        columns = 1.0 / (transposed @ rows)
        error = np.abs(rows * (pattern @ columns) - 1.0).max()
        if error <= 1e-12:
            return rows, columns
        rows = 1.0 / (pattern @ columns)
    raise UsageError(
        f"the directed graph did not balance in {BALANCING_STEPS} steps, a row sum is still {error:.1g} off 1: "
        f"add edges, or give the weights yourself with Static"
    )


def _columns(links: set[tuple[int, int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    table = np.array(sorted(links), dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]
