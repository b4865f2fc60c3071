"""What every registered topology keeps, and those made of others: a new one is tested by being registered."""

import pickle
from html import escape
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from dpps.errors import UsageError
from dpps.topology import TOPOLOGIES, draw, parse
from tests.support.topology import FAMILIES, SIZES, assert_sound, product

every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.mark.parametrize("nodes", SIZES)
@every_family
def test_it_is_doubly_stochastic_with_self_loops_and_connects(family: str, nodes: int) -> None:
    topology = FAMILIES[family](nodes)
    assert topology.nodes == nodes
    assert topology.doubly_stochastic
    for t in range(topology.period or 20):
        assert_sound(topology.weights(t))
    union = sum(topology.weights(t).dense() for t in range(topology.period or 64))
    assert connected_components(csr_array(union), connection="strong", return_labels=False) == 1
    report = topology.validate()
    assert report.doubly_stochastic
    assert report.contraction < 1
    if report.exact_average_after is not None:
        np.testing.assert_allclose(product(topology, report.exact_average_after), 1 / nodes, atol=1e-11)


@every_family
def test_weights_of_a_phase_are_built_once_and_repeat(family: str) -> None:
    topology = FAMILIES[family](10)
    for t in range(topology.period or 3):
        assert topology.weights(t) is topology.weights(t)
        if topology.period is not None:
            assert topology.weights(t + 7 * topology.period) is topology.weights(t)


@every_family
def test_a_pickled_topology_is_the_same(family: str) -> None:
    topology = FAMILIES[family](10)
    copy = pickle.loads(pickle.dumps(topology))
    assert repr(copy) == repr(topology)
    for t in range(5):
        np.testing.assert_array_equal(copy.weights(t).dense(), topology.weights(t).dense())


@every_family
def test_rounds_before_the_first_are_refused(family: str) -> None:
    topology = FAMILIES[family](5)
    for ask in (topology.weights, topology.present):
        with pytest.raises(UsageError, match="round -1 "):
            ask(-1)


@given(
    st.sampled_from(sorted(FAMILIES.keys() - {"dropouts"})),
    st.integers(2, 20),
    st.sampled_from([0.1, 0.5, 0.9]),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
)
@settings(deadline=None, max_examples=80)
def test_dropouts_keep_double_stochasticity_and_the_absent_rows(
    family: str, nodes: int, probability: float, seed: int, t: int
) -> None:
    inside = FAMILIES[family](nodes)
    topology = inside.with_dropouts(probability, seed)
    weights, present = topology.weights(t), topology.present(t)
    assert_sound(weights)
    if present is None:
        assert weights is inside.weights(t)
        return
    assert present.any()
    dense = weights.dense()
    np.testing.assert_array_equal(dense[~present], np.eye(nodes)[~present])
    np.testing.assert_array_equal(dense[:, ~present], np.eye(nodes)[:, ~present])
    assert (np.diag(dense) >= np.diag(inside.weights(t).dense()) - 1e-15).all()


@every_family
def test_it_can_be_drawn(family: str, tmp_path: Path) -> None:
    topology = FAMILIES[family](6)
    draw(topology, tmp_path / "graph.svg")
    assert escape(repr(topology), quote=False) in (tmp_path / "graph.svg").read_text()


@pytest.mark.parametrize("nodes", [1, 0, -3])
@pytest.mark.parametrize("name", TOPOLOGIES.names())
def test_fewer_than_two_nodes_are_refused(name: str, nodes: int) -> None:
    with pytest.raises(UsageError, match=rf"nodes is {nodes}, .*2 or more") as caught:
        parse(name.replace("K", "1"), nodes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [name for name in TOPOLOGIES.names() if "K" in name])
@pytest.mark.parametrize("number", ["0", "11"])
def test_a_number_that_is_out_of_range_is_refused(name: str, number: str) -> None:
    with pytest.raises(UsageError, match=rf" is {number}, .* 1 to ") as caught:
        parse(name.replace("K", number), 10)
    assert "\n" not in str(caught.value)
