"""What each family of topologies promises, their names, and what they refuse."""

import math

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from dpps.errors import UsageError
from dpps.topology import (
    KEPT_ROUNDS,
    Base,
    Complete,
    DOut,
    Exponential,
    OnePeerRandom,
    Ring,
    Sequence,
    Static,
    Topology,
    Weights,
    from_networkx,
    parse,
)
from dpps.topology.base import random_bits
from tests.support.topology import COLUMN_ONLY, SIZES, assert_sound, product


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


def test_a_ring_has_two_neighbours_and_a_complete_graph_is_the_average() -> None:
    np.testing.assert_allclose(Ring(5).weights(0).dense()[0], [1 / 3, 1 / 3, 0, 0, 1 / 3])
    np.testing.assert_array_equal(Ring(2).weights(0).dense(), [[0.5, 0.5], [0.5, 0.5]])
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


@pytest.mark.parametrize("topology", [Static(COLUMN_ONLY), Sequence([Exponential(3), COLUMN_ONLY])], ids=repr)
def test_column_stochastic_weights_are_allowed_and_said_so(topology: Topology) -> None:
    assert not topology.doubly_stochastic
    assert not topology.weights(topology.examined - 1).doubly_stochastic
    report = topology.validate()
    assert not report.doubly_stochastic
    assert report.exact_average_after is None


# The Base-(k+1) graph


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_base_reaches_the_exact_average_for_any_number_of_nodes(k: int) -> None:
    for nodes in range(max(2, k + 1), 41):
        topology = Base(nodes, k)
        for t in range(topology.period):
            weights = topology.weights(t)
            assert_sound(weights)
            assert weights.out_degree.max() <= k
        np.testing.assert_allclose(product(topology, topology.period), 1 / nodes, atol=1e-14)
        # the length its authors prove: 2 log_{k+1}(N) + 2
        assert topology.period <= 2 * math.log(nodes, k + 1) + 2


def test_base_needs_one_round_per_side_of_a_grid() -> None:
    assert [Base(8, 1).period, Base(9, 2).period, Base(12, 3).period, Base(36, 5).period] == [3, 2, 2, 2]
    assert Base(7, 6).period == 1


def test_base_takes_the_shorter_of_its_two_constructions() -> None:
    # 24 = 8 x 3: 3 rounds for the groups of three, 3 across; by its binary digits it would be 9
    assert Base(24, 1).period == 6
    # 22 = 2 x 11, but its digits in base 5, 42, are quicker: 4 rounds, not 5
    assert Base(22, 4).period == 4


# Graphs of networkx


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


# Randomness and weights


def test_bits_are_those_of_their_key_on_every_machine() -> None:
    assert random_bits("dropouts", 0, 0, 2).tolist() == [8946749878732634909, 12672053358009148234]
    assert random_bits("dropouts", 0, 0, 3)[:2].tolist() == random_bits("dropouts", 0, 0, 2).tolist()


def test_every_part_of_the_key_counts() -> None:
    keys = [("dropouts", 0, 0), ("matching", 0, 0), ("dropouts", 1, 0), ("dropouts", 0, 1)]
    assert len({int(random_bits(*key, 1)[0]) for key in keys}) == len(keys)


def test_entries_outside_the_matrix_are_refused() -> None:
    for receiver, sender in ((3, 0), (0, 3), (-1, 0), (0, -1)):
        with pytest.raises(ValueError):
            Weights.from_entries(3, [0, receiver], [0, sender], [1.0, 1.0])


# Names, copies, and bad input


def test_a_topology_that_never_repeats_keeps_few_rounds() -> None:
    topology = OnePeerRandom(4)
    first = topology.weights(0)
    for t in range(3 * KEPT_ROUNDS):
        topology.weights(t)
    assert len(topology._built) == KEPT_ROUNDS
    again = topology.weights(0)
    assert again is not first
    np.testing.assert_array_equal(again.dense(), first.dense())


@pytest.mark.parametrize(
    "topology",
    [
        DOut(10, 4),
        Exponential(10),
        Ring(5),
        Complete(3),
        Base(10, 2),
        OnePeerRandom(6, 3),
        Sequence([DOut(10, 4), Ring(10)]),
        Exponential(10).with_dropouts(0.1, seed=2),
        Exponential(10).with_dropouts({3: [1, 2]}),
    ],
    ids=repr,
)
def test_repr_makes_the_same_topology(topology: Topology) -> None:
    copy = eval(repr(topology))
    for t in range(5):
        np.testing.assert_array_equal(copy.weights(t).dense(), topology.weights(t).dense())


def test_repr_of_a_long_schedule_is_short() -> None:
    away = Ring(9).with_dropouts({t: [1] for t in range(99)})
    assert repr(away) == "Ring(9).with_dropouts(<schedule of 99 rounds>)"


def test_large_networks_stay_sparse() -> None:
    weights = DOut(100_000, 4).weights(0)
    assert len(weights.values) == 400_000
    assert weights.doubly_stochastic
    assert len(Base(20_000, 1).weights(0).values) <= 40_000
    away = DOut(100_000, 4).with_dropouts(0.1)
    assert away.weights(0).doubly_stochastic
    assert len(away.weights(0).values) < 1_000_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("exp", "Exponential(10)"),
        ("4-out", "DOut(10, 4)"),
        ("10-out", "DOut(10, 10)"),
        ("ring", "Ring(10)"),
        ("complete", "Complete(10)"),
        ("base-2", "Base(10, 2)"),
        ("random", "OnePeerRandom(10, 0)"),
    ],
)
def test_parse(text: str, expected: str) -> None:
    assert repr(parse(text, 10)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exq", "topology 'exq': .*exp.*'exp'"),
        ("rnig", "'rnig'.*'ring'"),
        ("4-ou", "'4-ou'.*'K-out'"),
        ("base-", "'base-'.*'base-K'"),
        ("-1-out", "'-1-out'.*'K-out'"),
        ("", "base-K, complete, exp, K-out, random, ring"),
    ],
)
def test_parse_refuses(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(text, 10)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (lambda: DOut(10, 2.5), "d is 2.5, .*1 to 10"),
        (lambda: Exponential("ten"), "nodes is 'ten', .*2 or more"),
        (lambda: OnePeerRandom(10, -1), "seed is -1, .*0 or more"),
        (lambda: Static(np.ones((2, 3))), r"shape \(2, 3\)"),
        (lambda: Static([1.0]), r"shape \(1,\)"),
        (lambda: Static([["a", "b"], ["c", "d"]]), "numbers"),
        (lambda: Static([[1.0]]), "nodes is 1, .*2 or more"),
        (lambda: Static([[0.5, 0.4], [0.5, 0.5]]), r"matrix: column 1 .*0\.9"),
        (lambda: Static(COLUMN_ONLY.T), r"column 0 .*0\.8.*transpose"),
        (lambda: Sequence([]), "sequence"),
        (lambda: Sequence([Ring(4), Ring(5)]), r"Ring\(5\) has 5 nodes.* 4"),
        (lambda: Sequence([OnePeerRandom(4)]), r"OnePeerRandom\(4, 0\)"),
        (lambda: Static([[0.5, 0], [0.5, 1]]).validate(), r"Static\(.*nodes 0 and 1"),
        (lambda: Ring(5).with_dropouts(1.0), "dropout probability .*1.0"),
        (lambda: Ring(5).with_dropouts(math.nan), "dropout probability .*nan"),
        (lambda: Ring(5).with_dropouts("often"), "dropout probability .*'often'"),
        (lambda: Ring(5).with_dropouts(0.5, seed=-1), "seed is -1, .*0 or more"),
        (lambda: Ring(5).with_dropouts({2: [5]}), "round 2 is 5, .*0 to 4"),
        (lambda: Ring(5).with_dropouts({2: 1}), "round 2 .* 1: .*list"),
        (lambda: Ring(5).with_dropouts({-1: [1]}), "round is -1, .*0 or more"),
        (lambda: Ring(3).with_dropouts({7: [0, 1, 2]}), "round 7"),
        (lambda: Ring(5).with_dropouts(0.1).with_dropouts(0.1), "dropouts"),
        (lambda: from_networkx([(0, 1)]), "from_networkx .*list.*Graph or DiGraph"),
    ],
)
def test_bad_input_is_refused_in_one_line(request_: object, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        request_()
    assert "\n" not in str(caught.value)
