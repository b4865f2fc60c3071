"""The report on a topology against dense computation, and what validation refuses."""

import json
import math

import networkx as nx
import numpy as np
import pytest
from scipy.sparse.csgraph import shortest_path

from dpps.errors import UsageError
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
from tests.support.topology import product


def test_reports_of_large_networks_agree_with_formulas() -> None:
    report = DOut(20_000, 3).validate()
    assert report.diameter == 10_000
    # eigenvalues of (1 + z + z^2) / 3 on the unit circle: |1 + 2 cos(2 pi / N)| / 3
    assert 0.99 < report.contraction <= (1 + 2 * math.cos(2 * math.pi / 20_000)) / 3 + 1e-12
    exact = DOut(900, 3).validate().contraction
    assert exact == pytest.approx((1 + 2 * math.cos(2 * math.pi / 900)) / 3, abs=1e-12)
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
        return Weights(self.matrix)

    def __repr__(self) -> str:
        return "Faulty()"


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([[0, 1], [1, 0]], r"node 0 .*self-loop.*W\[0, 0\]"),
        ([[0.5, 0.5], [0.4, 0.5]], r"column 0 .*0\.9"),
        ([[0.6, 0.5], [0.4, 0.5]], r"row 0 .*1\.1"),
        ([[0.5, 0.6], [0.5, 0.4]], r"row 0 .*1\.1"),
        ([[1.5, -0.5], [-0.5, 1.5]], r"W\[0, 1\] is -0\.5"),
        ([[0.5, np.nan], [0.5, 0.5]], r"W\[0, 1\] is nan"),
        ([[np.inf, 0.5], [0.5, 0.5]], r"W\[0, 0\] is inf"),
        ([[1, 0], [0, 1]], r"Faulty\(\) .* 2 .*nodes 0 and 1"),
    ],
)
def test_validate_refuses(matrix: list[list[float]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Faulty(matrix).validate()


def test_validate_names_the_round_at_fault() -> None:
    topology = Sequence([Ring(3), Ring(3)])
    topology._built[1] = Weights([[1, 0, 0], [0, 0, 1], [0, 1, 0]])
    with pytest.raises(UsageError, match=r"round 1: node 1 .*self-loop"):
        topology.validate()
