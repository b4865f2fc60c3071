"""Topologies: what holds for all of them, what each one promises, and every request they refuse."""

import json
import math
import pickle

import networkx as nx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components, shortest_path

from dpps.errors import UsageError
from dpps.topology import (
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
from dpps.topology.base import KEPT_ROUNDS

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


# What holds for every family


@pytest.mark.parametrize("nodes", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_doubly_stochastic_with_self_loops_and_connects(family: str, nodes: int) -> None:
    topology = FAMILIES[family](nodes)
    assert topology.nodes == nodes
    assert topology.doubly_stochastic
    for t in range(topology.period or 20):
        assert_sound(topology.weights(t))
    union = sum(topology.weights(t).dense() for t in range(topology.period or 64))
    assert connected_components(csr_array(union), connection="strong", return_labels=False) == 1
    assert topology.validate().doubly_stochastic


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_a_phase_are_built_once_and_repeat(family: str) -> None:
    topology = FAMILIES[family](10)
    for t in range(topology.period or 3):
        assert topology.weights(t) is topology.weights(t)
        if topology.period is not None:
            assert topology.weights(t + 7 * topology.period) is topology.weights(t)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pickled_topology_is_the_same(family: str) -> None:
    topology = FAMILIES[family](10)
    copy = pickle.loads(pickle.dumps(topology))
    assert repr(copy) == repr(topology)
    for t in range(5):
        np.testing.assert_array_equal(copy.weights(t).dense(), topology.weights(t).dense())


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
    assert (
        repr(Ring(9).with_dropouts({t: [1] for t in range(99)}))
        == "Ring(9).with_dropouts(<schedule of 99 rounds>)"
    )


# What each family promises


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


# Large networks


def test_large_networks_stay_sparse() -> None:
    weights = DOut(100_000, 4).weights(0)
    assert len(weights.values) == 400_000
    assert weights.doubly_stochastic
    assert len(Base(20_000, 1).weights(0).values) <= 40_000
    away = DOut(100_000, 4).with_dropouts(0.1)
    assert away.weights(0).doubly_stochastic
    assert len(away.weights(0).values) < 1_000_000


def test_reports_of_large_networks_agree_with_formulas() -> None:
    report = DOut(20_000, 3).validate()
    assert report.diameter == 10_000
    # eigenvalues of (1 + z + z^2) / 3 on the unit circle: |1 + 2 cos(2 pi / N)| / 3
    assert report.contraction == pytest.approx((1 + 2 * math.cos(2 * math.pi / 20_000)) / 3, abs=1e-12)
    assert Exponential(4096).validate().exact_average_after == 12
    base = Base(1500, 2)
    assert base.validate().exact_average_after == base.period


def test_estimated_contraction_agrees_with_the_exact_one(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = from_networkx(nx.karate_club_graph())
    exact = topology.validate()
    monkeypatch.setattr("dpps.topology.analysis.EXACT_NODES", 10)
    sampled = topology.validate()
    assert sampled.contraction == pytest.approx(exact.contraction, abs=1e-6)
    assert sampled.diameter <= exact.diameter


# Validation


def test_report_has_the_promised_fields() -> None:
    report = Exponential(10).validate().to_json()
    assert json.loads(json.dumps(report)) == pytest.approx(
        {
            "nodes": 10,
            "period": 4,
            "degree": 1,
            "doubly_stochastic": True,
            "connected_within": 4,
            "diameter": 3,
            "contraction": np.linalg.svd(product(Exponential(10), 4), compute_uv=False)[1],
            "exact_average_after": None,
        }
    )


@pytest.mark.parametrize(
    "topology",
    [
        *(DOut(9, 3), Ring(9), Exponential(9), Exponential(16), Complete(6), Ring(2)),
        *(Base(9, 1), Sequence([Ring(9), Base(9, 2)]), Sequence([DOut(12, 2), Ring(12), Exponential(12)])),
    ],
    ids=repr,
)
def test_report_agrees_with_dense_computation(topology: Topology) -> None:
    report = topology.validate()
    period = topology.period
    unions = {
        length: [sum(topology.weights(s + t).dense() for t in range(length)) for s in range(period)]
        for length in range(1, period + 1)
    }
    ways = {length: max(shortest_path(u, unweighted=True).max() for u in unions[length]) for length in unions}
    smallest = min(length for length in ways if np.isfinite(ways[length]))
    assert report.connected_within == smallest
    assert report.diameter == ways[smallest]
    singular = np.linalg.svd(product(topology, period), compute_uv=False)
    assert report.contraction == pytest.approx(singular[1], abs=1e-14)


@given(nodes=st.integers(2, 14), data=st.data())
def test_what_symmetry_shortens_is_what_the_general_way_finds(nodes: int, data: st.DataObject) -> None:
    """Circulant rounds: steps from node 0 against all shortest paths, connected or not."""
    ahead = data.draw(st.sets(st.integers(0, nodes - 1)).map(lambda found: sorted({0, *found})))
    W = sum(np.roll(np.eye(nodes), k, axis=0) for k in ahead) / len(ahead)
    ways = shortest_path(np.ascontiguousarray(W.T), unweighted=True)
    if np.isfinite(ways).all():
        assert Static(W).validate().diameter == ways.max()
    else:
        with pytest.raises(UsageError, match="never connects"):
            Static(W).validate()


def test_entries_outside_the_matrix_are_refused() -> None:
    for receiver, sender in ((3, 0), (0, 3), (-1, 0), (0, -1)):
        with pytest.raises(UsageError, match="outside the 3 x 3"):
            Weights.from_entries(3, [0, receiver], [0, sender], [1.0, 1.0])


def test_random_rounds_that_only_converge_are_not_called_exact() -> None:
    # the product of 64 rounds is 1/3 to the last digit, but no round made it so
    assert np.abs(product(OnePeerRandom(3), 64) - 1 / 3).max() < 1e-15
    assert OnePeerRandom(3).validate().exact_average_after is None


def test_exact_average_may_begin_late_in_the_period() -> None:
    rounds = [Base(5, 1).weights(t).dense() for t in range(5)]
    topology = Sequence([rounds[3], rounds[4], *rounds[:3]])
    assert np.abs(product(topology, 5) - 1 / 5).max() > 1e-3
    np.testing.assert_allclose(product(topology, 7), 1 / 5, atol=1e-15)
    assert topology.validate().exact_average_after == 7


class Faulty(Topology):
    """A user's topology with the given matrix, checked by nobody until ``validate``."""

    def __init__(self, matrix: list[list[float]]) -> None:
        super().__init__(len(matrix), period=1)
        self.matrix = np.array(matrix)

    def build(self, t: int) -> Weights:
        return Weights.from_matrix(self.matrix)

    def __repr__(self) -> str:
        return "Faulty()"


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([[0, 1], [1, 0]], r"node 0 has no self-loop; give W\[0, 0\] a positive weight"),
        ([[0.5, 0.5], [0.4, 0.5]], r"column 0 sums to 0\.9, not 1"),
        ([[0.6, 0.5], [0.4, 0.5]], r"row 0 sums to 1\.1, not 1"),
        ([[0.5, 0.6], [0.5, 0.4]], r"row 0 sums to 1\.1, not 1"),
        ([[1.5, -0.5], [-0.5, 1.5]], r"W\[0, 1\] is -0\.5; weights must be finite and not negative"),
        ([[0.5, np.nan], [0.5, 0.5]], r"W\[0, 1\] is nan; weights must be finite"),
        ([[np.inf, 0.5], [0.5, 0.5]], r"W\[0, 0\] is inf; weights must be finite"),
        ([[1, 0], [0, 1]], r"Faulty\(\) never connects: .* 2 separate parts, nodes 0 and 1"),
    ],
)
def test_validate_refuses(matrix: list[list[float]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Faulty(matrix).validate()


def test_validate_names_the_round_at_fault() -> None:
    topology = Sequence([Ring(3), Ring(3)])
    topology._built[1] = Weights.from_matrix([[1, 0, 0], [0, 0, 1], [0, 1, 0]])
    with pytest.raises(UsageError, match=r"round 1: node 1 has no self-loop"):
        topology.validate()


def test_one_way_graphs_never_connect() -> None:
    one_way = np.array([[0.5, 0], [0.5, 1]])
    with pytest.raises(UsageError, match="never connects"):
        Static(one_way).validate()


# Dropouts


def censored(W: np.ndarray, here: np.ndarray) -> np.ndarray:
    gone = ~here
    inverse = np.linalg.inv(np.eye(gone.sum()) - W[gone][:, gone])
    return W[here][:, here] + W[here][:, gone] @ inverse @ W[gone][:, here]


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


# networkx


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
    with pytest.raises(
        UsageError, match=r"cannot be balanced: it is not strongly connected.*edge 'b' -> 'c'"
    ):
        from_networkx(graph)


def test_balancing_gives_up_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpps.topology.networks.BALANCING_STEPS", 2)
    graph = nx.path_graph(9).to_directed()
    graph.add_edge(0, 5)
    with pytest.raises(UsageError, match="did not balance in 2 steps"):
        from_networkx(graph)


# Names


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
        ("exq", r"unknown topology 'exq': choose one of exp, .*; did you mean 'exp'\?"),
        ("rnig", "did you mean 'ring'"),
        ("4-ou", "did you mean 'K-out'"),
        ("base-", "did you mean 'base-K'"),
        ("-1-out", "did you mean 'K-out'"),
        ("", "choose one of exp, K-out, ring, complete, base-K, random"),
        ("11-out", "d is 11, must be from 1 to 10"),
        ("0-out", "d is 0, must be from 1 to 10"),
        ("base-10", "k is 10, must be from 1 to 9"),
    ],
)
def test_parse_refuses(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(text, 10)


# Bad input


@pytest.mark.parametrize("nodes", [1, 0, -3])
@pytest.mark.parametrize("name", ["exp", "1-out", "ring", "complete", "base-1", "random"])
def test_fewer_than_two_nodes_are_refused(name: str, nodes: int) -> None:
    with pytest.raises(UsageError, match=f"nodes is {nodes}, must be 2 or more: a network needs two nodes"):
        parse(name, nodes)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            lambda: DOut(10, 11),
            "d is 11, must be from 1 to 10: a node sends to itself and d - 1 of the others",
        ),
        (lambda: DOut(10, 0), "d is 0, must be from 1 to 10"),
        (lambda: DOut(10, 2.5), "d is 2.5, must be a whole number, from 1 to 10"),
        (lambda: Exponential("ten"), "nodes is 'ten', must be a whole number, 2 or more"),
        (lambda: Base(10, 0), "k is 0, must be from 1 to 9"),
        (lambda: Base(10, 10), "k is 10, must be from 1 to 9: a node has k peers per round"),
        (lambda: OnePeerRandom(10, -1), "seed is -1, must be 0 or more"),
        (lambda: Static(np.ones((2, 3))), r"shape \(2, 3\), must be square"),
        (lambda: Static([1.0]), r"shape \(1,\), must be square"),
        (lambda: Static([["a", "b"], ["c", "d"]]), "not a table of numbers"),
        (lambda: Static([[1.0]]), "nodes is 1, must be 2 or more"),
        (
            lambda: Static([[0.5, 0.4], [0.5, 0.5]]),
            r"the matrix: column 1 sums to 0\.9, not 1; make each column",
        ),
        (lambda: Static(COLUMN_ONLY.T), r"column 0 sums to 0\.8, not 1; the rows do: pass the transpose"),
        (lambda: Static([[0.0, 1.0], [1.0, 0.0]]), "node 0 has no self-loop"),
        (
            lambda: Static([[2.0, 0.5], [-1.0, 0.5]]),
            r"W\[1, 0\] is -1; weights must be finite and not negative",
        ),
        (lambda: Static([[np.nan, 0.5], [0.5, 0.5]]), r"W\[0, 0\] is nan"),
        (lambda: Sequence([]), "the sequence is empty"),
        (lambda: Sequence([Ring(4), Ring(5)]), r"Ring\(5\) has 5 nodes, the first of the sequence 4"),
        (lambda: Sequence([OnePeerRandom(4)]), r"OnePeerRandom\(4, 0\) never repeats"),
        (lambda: DOut(5, 1).validate(), r"DOut\(5, 1\) never connects: .* 5 separate parts"),
        (lambda: Ring(5).weights(-1), "round -1 does not exist: rounds count from 0"),
        (lambda: Ring(5).present(-1), "round -1 does not exist"),
        (lambda: Ring(5).with_dropouts(1.0), "dropout probability is 1.0, must be from 0 up to"),
        (lambda: Ring(5).with_dropouts(-0.1), "dropout probability is -0.1, must be from 0 up to"),
        (lambda: Ring(5).with_dropouts(math.nan), "dropout probability is nan, must be from 0 up to"),
        (lambda: Ring(5).with_dropouts("often"), "dropout probability is 'often'"),
        (lambda: Ring(5).with_dropouts(0.5, seed=-1), "seed is -1, must be 0 or more"),
        (lambda: Ring(5).with_dropouts({2: [5]}), "node away in round 2 is 5, must be from 0 to 4"),
        (lambda: Ring(5).with_dropouts({2: [-1]}), "node away in round 2 is -1, must be from 0 to 4"),
        (
            lambda: Ring(5).with_dropouts({2: 1}),
            r"round 2 of the schedule is 1: give the nodes away as a list",
        ),
        (lambda: Ring(5).with_dropouts({-1: [1]}), "round is -1, must be 0 or more"),
        (lambda: Ring(3).with_dropouts({7: [0, 1, 2]}), "everybody is away in round 7"),
        (lambda: Ring(5).with_dropouts(0.1).with_dropouts(0.1), "has dropouts already"),
        (lambda: from_networkx(nx.empty_graph(1)), "nodes is 1, must be 2 or more"),
        (lambda: from_networkx([(0, 1)]), "from_networkx got list, needs a networkx Graph or DiGraph"),
        (lambda: from_networkx(nx.empty_graph(3)).validate(), "never connects"),
    ],
)
def test_bad_input_is_refused_in_one_line(request_: object, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        request_()
    assert "\n" not in str(caught.value)
