"""What each family of topologies promises."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from dpps.topology import (
    Complete,
    DOut,
    Exponential,
    OnePeerRandom,
    Ring,
    Sequence,
    Static,
)
from tests.support.topology import COLUMN_ONLY, SIZES, product


@given(st.integers(2, 40), st.data())
@settings(deadline=None, max_examples=30)
def test_d_out_sends_to_the_next_ones(nodes: int, data: st.DataObject) -> None:
    d = data.draw(st.integers(1, nodes))
    expected = np.zeros((nodes, nodes))
    for sender in range(nodes):
        for step in range(d):
            expected[(sender + step) % nodes, sender] += 1 / d
    topology = DOut(nodes, d)
    assert topology.period == 1
    np.testing.assert_array_equal(topology.weights(0).dense(), expected)
    assert (topology.weights(0).out_degree == d - 1).all()


@pytest.mark.parametrize("nodes", SIZES)
def test_exponential_sends_two_to_the_t_ahead(nodes: int) -> None:
    topology = Exponential(nodes)
    assert topology.period == math.floor(math.log2(nodes - 1)) + 1
    for t in range(2 * topology.period):
        expected = np.eye(nodes) / 2
        for sender in range(nodes):
            expected[(sender + 2 ** (t % topology.period)) % nodes, sender] += 1 / 2
        np.testing.assert_array_equal(topology.weights(t).dense(), expected)


@pytest.mark.parametrize("nodes", [2, 4, 8, 16, 32, 64])
def test_exponential_of_a_power_of_two_reaches_the_exact_average(nodes: int) -> None:
    rounds = int(math.log2(nodes))
    np.testing.assert_allclose(product(Exponential(nodes), rounds), 1 / nodes, atol=1e-15)
    assert Exponential(nodes).validate().exact_average_after == rounds


@pytest.mark.parametrize("nodes", [3, 5, 10, 50])
def test_exponential_of_other_sizes_never_does(nodes: int) -> None:
    report = Exponential(nodes).validate()
    assert report.exact_average_after is None
    assert 0 < report.contraction < 1


def test_ring_has_two_neighbours_and_two_nodes_share() -> None:
    np.testing.assert_allclose(Ring(5).weights(0).dense()[0], [1 / 3, 1 / 3, 0, 0, 1 / 3])
    np.testing.assert_array_equal(Ring(2).weights(0).dense(), [[0.5, 0.5], [0.5, 0.5]])


def test_complete_is_the_average() -> None:
    np.testing.assert_array_equal(Complete(7).weights(0).dense(), np.full((7, 7), 1 / 7))


@pytest.mark.parametrize("nodes", [2, 3, 10])
def test_one_peer_random_sends_to_one_other_and_receives_from_one(nodes: int) -> None:
    topology = OnePeerRandom(nodes, seed=1)
    for t in range(20):
        others = topology.weights(t).dense() - np.eye(nodes) / 2
        assert sorted(others.ravel())[-nodes:] == [0.5] * nodes
        assert (np.diag(others) == 0).all()
        assert ((others != 0).sum(axis=0) == 1).all()
        assert ((others != 0).sum(axis=1) == 1).all()


def test_one_peer_random_depends_on_seed_and_round_alone() -> None:
    one, same, other = OnePeerRandom(30, 1), OnePeerRandom(30, 1), OnePeerRandom(30, 2)
    same.weights(17)
    np.testing.assert_array_equal(one.weights(4).dense(), same.weights(4).dense())
    assert (one.weights(4).dense() != one.weights(5).dense()).any()
    assert (one.weights(4).dense() != other.weights(4).dense()).any()


def test_one_peer_random_meets_everybody_equally_often() -> None:
    topology, rounds = OnePeerRandom(4), 3000
    met = sum(topology.weights(t).dense() for t in range(rounds)) - np.eye(4) * rounds / 2
    away_from_a_third = np.abs(2 * met / rounds - (1 - np.eye(4)) / 3)
    assert away_from_a_third.max() < 5 * math.sqrt(2 / 9 / rounds)  # five standard deviations


def test_sequence_plays_each_part_for_its_period() -> None:
    fixed = np.full((4, 4), 0.25)
    topology = Sequence([Exponential(4), fixed, Ring(4)])
    assert topology.period == 4
    played = [topology.weights(t).dense() for t in range(8)]
    expected = [
        Exponential(4).weights(0),
        Exponential(4).weights(1),
        Static(fixed).weights(0),
        Ring(4).weights(0),
    ]
    for t, dense in enumerate(played):
        np.testing.assert_array_equal(dense, expected[t % 4].dense())


def test_sequence_is_doubly_stochastic_only_if_all_parts_are() -> None:
    assert not Sequence([Ring(3), COLUMN_ONLY]).doubly_stochastic
    assert not Sequence([Ring(3), COLUMN_ONLY]).validate().doubly_stochastic


def test_sequence_of_parts_that_connect_only_together() -> None:
    pairs = np.array([[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5]])
    crossed = pairs[[0, 2, 1, 3]][:, [0, 2, 1, 3]]
    report = Sequence([pairs, crossed]).validate()
    assert (report.connected_within, report.diameter, report.exact_average_after) == (2, 2, 2)
    assert Sequence([pairs, pairs, crossed]).validate().connected_within == 3


@pytest.mark.parametrize("form", [list, np.asarray, csr_array], ids=["list", "array", "sparse"])
def test_static_keeps_its_own_copy_of_any_matrix(form: type) -> None:
    matrix = Ring(4).weights(0).dense()
    given_matrix = form(matrix)
    topology = Static(given_matrix)
    if isinstance(given_matrix, np.ndarray):
        given_matrix[:] = 0
    np.testing.assert_array_equal(topology.weights(3).dense(), Ring(4).weights(0).dense())


def test_column_stochastic_weights_are_allowed_and_said_so() -> None:
    topology = Static(COLUMN_ONLY)
    assert not topology.doubly_stochastic
    assert not topology.weights(0).doubly_stochastic
    report = topology.validate()
    assert not report.doubly_stochastic
    assert report.exact_average_after is None
