"""Absent nodes: the others go on, and every promise of the topology is kept."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dpps.topology import Complete, DOut, Exponential, Ring, Static
from tests.support.topology import assert_sound


def censored(W: np.ndarray, here: np.ndarray) -> np.ndarray:
    gone = ~here
    inverse = np.linalg.inv(np.eye(gone.sum()) - W[gone][:, gone])
    return W[here][:, here] + W[here][:, gone] @ inverse @ W[gone][:, here]


def test_dropouts_route_around_the_absent() -> None:
    # 0 -> 1 -> 2 -> 3 -> 4 -> 0 with 1 and 2 away: 0 sends to 3 what 2 would have sent it
    topology = DOut(5, 2).with_dropouts({0: [1, 2]})
    expected = DOut(3, 2).weights(0).dense()
    here = topology.present(0)
    assert here is not None
    np.testing.assert_array_equal(here, [True, False, False, True, True])
    np.testing.assert_allclose(topology.weights(0).dense()[here][:, here], expected)
    assert topology.present(1) is None
    np.testing.assert_array_equal(topology.weights(1).dense(), DOut(5, 2).weights(0).dense())


@given(st.integers(3, 15), st.integers(0, 10**6))
@settings(deadline=None, max_examples=40)
def test_dropouts_are_the_chain_seen_among_the_present(nodes: int, seed: int) -> None:
    topology = Complete(nodes).with_dropouts(0.4, seed)
    here = topology.present(0)
    assume(here is not None)
    expected = censored(Complete(nodes).weights(0).dense(), here)
    np.testing.assert_allclose(topology.weights(0).dense()[here][:, here], expected, atol=1e-13)


def test_absent_nodes_that_only_meet_each_other_are_no_trouble() -> None:
    # phase 2 of N = 8 joins i with i + 4: (0, 4) are away together, and 5's peer 1 is away alone
    topology = Exponential(8).with_dropouts({2: [0, 1, 4]})
    assert_sound(topology.weights(2))
    assert topology.weights(2).dense()[5, 5] == pytest.approx(1)


def test_dropouts_of_column_stochastic_weights_stay_column_stochastic() -> None:
    rng = np.random.default_rng(4)
    for nodes in (3, 6, 9):
        matrix = (rng.random((nodes, nodes)) < 0.4) * rng.random((nodes, nodes)) + np.eye(nodes)
        topology = Static(matrix / matrix.sum(axis=0)).with_dropouts(0.4)
        for t in range(40):
            dense = topology.weights(t).dense()
            np.testing.assert_allclose(dense.sum(axis=0), 1, atol=1e-12)
            assert (np.diag(dense) > 0).all()
            here = topology.present(t)
            if here is not None:
                np.testing.assert_array_equal(dense[~here], np.eye(nodes)[~here])


def test_the_sender_keeps_what_an_absent_node_would_swallow() -> None:
    sink = np.array([[0.5, 0.5, 0.0], [0.3, 0.5, 0.0], [0.2, 0.0, 1.0]])  # node 2 sends to nobody
    dense = Static(sink).with_dropouts({0: [2]}).weights(0).dense()
    np.testing.assert_allclose(dense, [[0.7, 0.5, 0], [0.3, 0.5, 0], [0, 0, 1]])


def test_dropout_draws_have_their_probability_and_depend_on_seed_and_round() -> None:
    topology = Ring(500).with_dropouts(0.3, seed=1)
    away = [topology.away(t) for t in range(20)]
    assert np.mean(away) == pytest.approx(0.3, abs=5 * math.sqrt(0.21 / 10_000))
    assert (away[0] != away[1]).any()
    np.testing.assert_array_equal(Ring(500).with_dropouts(0.3, seed=1).away(7), away[7])
    assert (Ring(500).with_dropouts(0.3, seed=2).away(7) != away[7]).any()


def test_somebody_always_stays() -> None:
    topology = Ring(2).with_dropouts(0.99)
    assert all(not topology.away(t).all() for t in range(200))


def test_no_dropouts_change_nothing() -> None:
    topology = Exponential(10).with_dropouts(0.0)
    assert all(topology.present(t) is None for t in range(20))
    assert topology.weights(6) is topology.inner.weights(6)


def test_a_long_absence_is_reported_as_a_long_window() -> None:
    report = Ring(5).with_dropouts({t: [2] for t in range(100)}).validate()
    assert report.connected_within == 101
    assert report.period is None
