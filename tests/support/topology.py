"""Topologies of every kind, and what is asked of all of them."""

from collections.abc import Callable
from functools import partial

import networkx as nx
import numpy as np

from dpps.topology import (
    TOPOLOGIES,
    Base,
    DOut,
    Exponential,
    Ring,
    Sequence,
    Topology,
    Weights,
    from_networkx,
    parse,
)

SIZES = [2, 3, 4, 5, 7, 8, 10, 13, 16, 17, 31, 32, 50]
FAMILIES: dict[str, Callable[[int], Topology]] = {
    **{
        name: partial(parse, name.replace("K", "1" if name == "base-K" else "2"))
        for name in TOPOLOGIES.names()
    },
    "N-out": lambda n: DOut(n, n),
    "base-N": lambda n: Base(n, n - 1),
    "sequence": lambda n: Sequence([Exponential(n), Ring(n)]),
    "cycle": lambda n: from_networkx(nx.cycle_graph(n)),
    "directed cycle": lambda n: from_networkx(nx.cycle_graph(n, create_using=nx.DiGraph)),
    "dropouts": lambda n: Exponential(n).with_dropouts(0.2, seed=3),
}
"""All that are registered, at their smallest number, and those made of others."""
COLUMN_ONLY = np.array([[0.5, 0.0, 0.3], [0.5, 0.5, 0.0], [0.0, 0.5, 0.7]])


def product(topology: Topology, rounds: int) -> np.ndarray:
    total = np.eye(topology.nodes)
    for t in range(rounds):
        total = topology.weights(t).dense() @ total
    return total


def assert_sound(weights: Weights) -> None:
    """Doubly stochastic, with self-loops, stored as promised; checked on the dense matrix."""
    dense = weights.dense()
    np.testing.assert_allclose(dense.sum(axis=0), 1, atol=1e-12)
    np.testing.assert_allclose(dense.sum(axis=1), 1, atol=1e-12)
    assert (np.diag(dense) > 0).all()
    assert (weights.values > 0).all()
    assert weights.doubly_stochastic
    assert weights.indptr.dtype == weights.senders.dtype == np.int64
    rows = np.split(weights.senders, weights.indptr[1:-1])
    assert all((np.diff(row) > 0).all() for row in rows)
