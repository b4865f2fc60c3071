"""Topologies of every kind, and what is asked of all of them."""

import networkx as nx
import numpy as np

from dpps.topology import (
    Base,
    Complete,
    DOut,
    Exponential,
    OnePeerRandom,
    Ring,
    Sequence,
    Topology,
    Weights,
    from_networkx,
)

SIZES = [2, 3, 4, 5, 7, 8, 10, 13, 16, 17, 31, 32, 50]
FAMILIES = {
    "2-out": lambda n: DOut(n, 2),
    "N-out": lambda n: DOut(n, n),
    "exp": Exponential,
    "ring": Ring,
    "complete": Complete,
    "base-1": lambda n: Base(n, 1),
    "base-N": lambda n: Base(n, n - 1),
    "random": lambda n: OnePeerRandom(n, seed=5),
    "sequence": lambda n: Sequence([Exponential(n), Ring(n)]),
    "cycle": lambda n: from_networkx(nx.cycle_graph(n)),
    "directed cycle": lambda n: from_networkx(nx.cycle_graph(n, create_using=nx.DiGraph)),
    "dropouts": lambda n: Exponential(n).with_dropouts(0.2, seed=3),
}
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
