"""Graphs of networkx."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpps.errors import UsageError
from dpps.topology import (
    from_networkx,
)
from tests.support.topology import assert_sound


def test_undirected_graphs_get_metropolis_weights() -> None:
    star = nx.star_graph(3)
    expected = [[0.25, 0.25, 0.25, 0.25], [0.25, 0.75, 0, 0], [0.25, 0, 0.75, 0], [0.25, 0, 0, 0.75]]
    np.testing.assert_allclose(from_networkx(star).weights(0).dense(), expected)


@given(st.integers(0, 10**6))
@settings(deadline=None, max_examples=20)
def test_directed_graphs_are_balanced_on_their_own_edges(seed: int) -> None:
    graph = nx.gnp_random_graph(9, 0.25, seed=seed, directed=True)
    nx.add_cycle(graph, range(9))
    weights = from_networkx(graph).weights(0)
    assert_sound(weights)
    graph.add_edges_from((i, i) for i in range(9))
    # W[i, j] belongs to the edge j -> i
    np.testing.assert_array_equal(weights.dense() > 0, nx.to_numpy_array(graph).T > 0)


def test_node_names_loops_and_parallel_edges_do_not_matter() -> None:
    graph = nx.MultiGraph([("a", "b"), ("a", "b"), ("b", "c"), ("c", "c")])
    np.testing.assert_allclose(
        from_networkx(graph).weights(0).dense(), from_networkx(nx.path_graph(3)).weights(0).dense()
    )


def test_directed_graphs_with_a_one_way_edge_cannot_be_balanced() -> None:
    graph = nx.DiGraph([("a", "b"), ("b", "a"), ("b", "c")])
    with pytest.raises(UsageError, match=r"edge 'b' -> 'c'.*Static"):
        from_networkx(graph)


def test_balancing_gives_up_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpps.topology.families.BALANCING_STEPS", 2)
    graph = nx.path_graph(9).to_directed()
    graph.add_edge(0, 5)
    with pytest.raises(UsageError, match=r"2 steps.*Static"):
        from_networkx(graph)
