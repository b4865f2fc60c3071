"""Noise that cancels: partner graphs, how much noise they take, and what more colluders cost; against explicit covariances."""

import math
from itertools import combinations

import networkx
import numpy as np
import pytest
import torch

import dpps
from dpps.errors import UsageError
from dpps.noise import SecureNoise, SecurePairs, SeededPairs
from dpps.privacy import Contribution, Nobody, Pairs, Partners, Plan, Record
from dpps.privacy.partners import enough_degree
from dpps.runs import Options


def covariance(partners: Partners, honest: list[int]) -> np.ndarray:
    """Sigma_H, written out: every node's own noise, and every pair of honest partners by itself."""
    shares = partners.shares()
    sigma = shares.independent**2 * np.eye(len(honest))
    for i, j in partners.among().tolist():
        if i in honest and j in honest:
            column = np.zeros(len(honest))
            column[honest.index(i)], column[honest.index(j)] = 1, -1
            sigma += shares.pair**2 * np.outer(column, column)
    return sigma


def worst(partners: Partners, colluders: int) -> float:
    """The largest [Sigma_H^-1]_ii over all coalitions of that size."""
    largest = 0.0
    for honest in combinations(range(partners.nodes), partners.nodes - colluders):
        largest = max(largest, np.linalg.inv(covariance(partners, list(honest))).diagonal().max())
    return largest


@pytest.mark.parametrize("colluders", [0, 1, 3, 5])
def test_complete_graph_keeps_the_promise_exactly(colluders: int) -> None:
    partners = Pairs(colluders).partners(8)
    assert worst(partners, colluders) == pytest.approx(1, abs=1e-7)
    assert worst(partners, colluders) <= 1
    assert partners.loss(colluders) == pytest.approx(1, abs=1e-7)


@pytest.mark.parametrize("colluders", [0, 1, 2])
def test_small_graphs_are_solved_exactly(colluders: int) -> None:
    for seed in range(5):
        graph = networkx.random_regular_graph(4, 9, seed=seed)
        partners = Pairs(colluders, graph=graph).partners(9)
        assert worst(partners, colluders) == pytest.approx(1, abs=1e-6)
        assert worst(partners, colluders) <= 1


def test_an_irregular_graph_that_a_coalition_can_cut() -> None:
    """Two triangles joined by one edge: without an end of it, a triangle's node hides behind one other node or two."""
    graph = networkx.Graph([(0, 1), (1, 2), (0, 2), (3, 4), (4, 5), (3, 5), (2, 3)])
    partners = Pairs(1, graph=graph).partners(6)
    assert worst(partners, 1) == pytest.approx(1, abs=1e-6)
    assert partners.shares().independent ** 2 == pytest.approx(1.25 / 2, rel=1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_fiedlers_bound_is_never_below_the_exact_value(seed: int) -> None:
    """Random coalitions of a graph too large to look at all of them, and the worst that a search finds."""
    random = np.random.default_rng(seed)
    colluders = int(random.integers(0, 6))
    partners = Pairs(colluders, degree=16, seed=seed).partners(48)
    assert partners.strength > 0
    for _ in range(20):
        honest = sorted(random.permutation(48)[: 48 - colluders].tolist())
        assert np.linalg.inv(covariance(partners, honest)).diagonal().max() <= 1
    target = 0  # the coalition of a node's own partners is the natural worst one
    near = [j if i == target else i for i, j in partners.among().tolist() if target in (i, j)]
    honest = [k for k in range(48) if k not in near[:colluders]]
    assert np.linalg.inv(covariance(partners, honest)).diagonal().max() <= 1


def test_more_colluders_always_see_more() -> None:
    partners = Pairs(2).partners(9)
    losses = [partners.loss(c) for c in range(9)]
    assert losses == sorted(losses, reverse=True)
    assert losses[8] == pytest.approx(partners.shares().independent)
    for c in range(8):
        assert partners.loss(c) == pytest.approx(1 / math.sqrt(worst(partners, c)), rel=1e-6)


def test_records_at_several_nodes_are_at_most_a_group_and_nearly_reach_it() -> None:
    """docs/cancelling-noise.md, limits: little noise is left in the sum, where their shifts add up."""
    inverse = np.linalg.inv(covariance(Pairs(0).partners(10), list(range(10))))
    moved = [math.sqrt(inverse[:k, :k].sum()) for k in (1, 2, 10)]
    assert moved == pytest.approx([1, 1.89, 8.94], abs=0.01)


def test_the_mean_is_as_wanted_and_nothing_else_is_given_away() -> None:
    for nodes, colluders in ((10, 0), (10, 3), (1000, 10)):
        partners = Pairs(colluders).partners(nodes)
        floor = nodes / (nodes - colluders)
        assert partners.mean_over_server == pytest.approx(1.25 * floor, rel=1e-6)
    usual, noisier = Pairs(0).partners(10), Pairs(0, mean_variance=1.5625).partners(10)
    assert (usual.mean_over_server, usual.message_deviation() ** 2) == pytest.approx((1.25, 4.0625), rel=1e-6)
    assert (usual.absences, noisier.absences) == (2, 3)
    assert usual.at(1.5625).shares() == noisier.shares()


def test_absences_survived_by_a_covariance_written_out() -> None:
    """With one more node away unannounced the others' mean is noisier than without partners."""
    partners = Pairs(1, mean_variance=1.5).partners(8)

    def sum_variance(away: int) -> float:
        whole = covariance(partners, list(range(8)))
        return float(whole[away:, away:].sum()) / (8 - away)

    assert sum_variance(partners.absences) <= 1 < sum_variance(partners.absences + 1)


def test_fewer_nodes_hide_each_other_less_so_the_noise_grows() -> None:
    partners = Pairs(2).partners(10)
    present = np.ones(10, dtype=bool)
    present[[1, 4, 5]] = False
    few = partners.shares(present)
    honest = 7 - 2
    inverse = 1 / honest / few.independent**2 + (1 - 1 / honest) / (few.independent**2 + honest * few.pair**2)
    assert inverse == pytest.approx(1, abs=1e-7)
    assert few.independent > partners.shares().independent
    assert set(map(tuple, partners.among(present).tolist())) == set(combinations([0, 2, 3, 6, 7, 8, 9], 2))


def test_where_too_few_are_present_all_noise_is_independent() -> None:
    partners = Pairs(3).partners(10)
    present = np.zeros(10, dtype=bool)
    present[:4] = True
    assert (partners.shares(present).independent, partners.shares(present).pair) == (1.0, 0.0)


def test_the_default_graph() -> None:
    assert Pairs(2).partners(32).edges is None
    assert Pairs().partners(100).colluders == 33
    sparse = Pairs(10).partners(1000)
    assert sparse.edges is not None
    assert set(np.bincount(sparse.among().ravel())) == {enough_degree(10)} == {30}
    assert sparse.strength >= 0.3 * 30 - 0.5
    assert Pairs(10).partners(1000).digest == sparse.digest != Pairs(10, seed=1).partners(1000).digest


@pytest.mark.parametrize(
    ("pairs", "nodes"),
    [
        (Pairs(1, graph=networkx.star_graph(5)), 6),  # without its centre nobody has a partner
        (Pairs(2, graph=networkx.cycle_graph(6)), 6),  # a node between the two colluders is alone
        (Pairs(20, degree=16), 100),  # Fiedler's bound has nothing left
        (Pairs(0, mean_variance=4.0), 3),  # independent noise for less than the mean asked for
    ],
    ids=["star", "cycle", "strength", "mean-variance"],
)
def test_partners_who_would_share_no_noise_are_refused(pairs: Pairs, nodes: int) -> None:
    """Otherwise somebody asks for pairs, exchanges keys, and gets independent noise without a word."""
    with pytest.raises(UsageError, match=r"lambda_2 - C.*colluders.*mean_variance [14]"):
        pairs.partners(nodes)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match=r"colluders.*9.*10 nodes.*\b8\b"):
        Pairs(9).partners(10)
    with pytest.raises(UsageError, match="mean_variance is 1"):
        Pairs(mean_variance=1)
    with pytest.raises(UsageError, match="undirected"):
        Pairs(0, graph=networkx.path_graph(4)).partners(5)
    with pytest.raises(UsageError, match=r"degree.*3.*41 nodes"):
        Pairs(0, degree=3).partners(41)
    with pytest.raises(UsageError, match="one node"):
        Pairs().partners(1)
    two_triangles = networkx.disjoint_union(networkx.complete_graph(3), networkx.complete_graph(3))
    with pytest.raises(UsageError, match="2 parts"):
        Pairs(0, graph=two_triangles).partners(6)
    with pytest.raises(UsageError, match="loops"):
        Pairs(0, graph=networkx.Graph([(0, 1), (1, 1)])).partners(2)
    assert Nobody().partners(10) is None


# In the units


def test_calibrations_draw_noise_that_cancels_only_with_partners() -> None:
    plan = Plan(((1.0, 50),), lr_shared=0.5, batch_size=10, sampling=(0.1,) * 6, declared_sizes=(100,) * 6)
    with_pairs, alone = (Record(noise_multiplier=1.3, trust=t).calibrate(plan) for t in (Pairs(2), Nobody()))
    assert isinstance(with_pairs.source(dpps.Seeded(1)), SeededPairs)
    assert isinstance(with_pairs.source(SecureNoise()), SecurePairs)
    assert isinstance(alone.source(dpps.Seeded(1)), dpps.Seeded)


def test_the_coalition_is_named() -> None:
    record = Record(1.0, trust=Pairs(2))
    assert "up to 2 " in record.who()
    assert "secrets" in record.not_covered()
    assert "secrets" in Record(1.0, trust=Pairs(0)).who()
    assert "a third" in Record(1.0, trust=Pairs()).who()
    assert "up to 3 " in Record(1.0, trust=Pairs()).for_network(10).who()
    assert "secrets" not in Record(1.0).who() + Record(1.0).not_covered()


def test_on_a_complete_graph_the_mean_is_central_dp_sgd_with_a_quarter_more_variance() -> None:
    """One exact averaging: every node's row is the mean of the updates plus noise of 1.25 / N^2 of a message's variance."""
    nodes, d, clip = 8, 60_000, 1.0
    unit = Contribution(
        clip, mechanism="gaussian", noise_multiplier=3.0, trust=dpps.Pairs(0, mean_variance=1.25)
    )
    plan = Plan(((1.0, 1),), lr_shared=1.0, batch_size=1, declared_sizes=(1,) * nodes)
    calibration = unit.calibrate(plan)
    assert calibration.partners is not None
    protocol = dpps.DPPS(
        dpps.Complete(nodes),
        calibration.mechanism,
        calibration.sensitivity,
        noise=calibration.source(dpps.Seeded(3)),
    )
    state = protocol.start(torch.zeros(nodes, d, dtype=torch.float64))
    update = torch.zeros(nodes, d, dtype=torch.float64)
    update[:, 0] = torch.linspace(-1, 1, nodes)
    record = protocol.step(state, update)
    server = (record.scale / nodes) ** 2
    rows = state.y.numpy()
    assert np.allclose(rows, rows[0])
    assert rows[0, 1:].var() == pytest.approx(1.25 * server, rel=0.03)
    independent = record.scale**2 / nodes
    assert rows[0, 1:].var() < independent / 5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"unit": "node-swap", "trust": "pairs"}, "--trust pairs .*--unit node-swap"),
        ({"unit": "none", "trust": "pairs"}, "--trust pairs .*--unit none"),
        ({"unit": "contribution", "trust": "pairs"}, "--mechanism laplace"),
        ({"colluders": 2}, "--colluders .*--trust pairs"),
        ({"mean_variance": 2.0}, "--mean-variance .*--trust pairs"),
        ({"trust": "pairs", "mean_variance": 1.0}, r"mean_variance.*1\.0.*above 1"),
        ({"trust": "pairs", "colluders": 9}, "colluders.*9.* 8 "),
        ({"trust": "everybody"}, "trust"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Options(**options).resolve()  # type: ignore[arg-type]


def test_what_is_left_open_is_named_in_the_statement() -> None:
    config = Options(noise_multiplier=1.0, trust="pairs").resolve()
    assert (config.colluders, config.mean_variance) == (3, 1.25)
    unit = config.privacy()
    assert unit is not None
    assert "up to 3 " in unit.who()
