"""The coefficients of the certified bound against brute force, its mean and tail against samples."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpps.sensitivity import Coefficients, mean_abs, noise_factor
from dpps.sensitivity import coefficients as table
from dpps.topology import Base, DOut, Exponential, OnePeerRandom, Ring, Static, Topology
from tests.support.sensitivity import safe_mean, textbook_mean

# --- m(c) and the tail ------------------------------------------------------------------------------------------


def test_mean_of_four_halves() -> None:
    assert mean_abs(np.array([0.5, 0.5, -0.5, -0.5])) == pytest.approx(35 / 32, rel=2e-6)


def test_mean_of_one_coefficient_is_its_size() -> None:
    assert mean_abs(np.array([[0.0, -3.0], [1e-12, 0.0], [0.0, 0.0]])) == pytest.approx(
        [3, 1e-12, 0], rel=2e-6
    )


def test_mean_of_two_opposite_coefficients() -> None:
    assert mean_abs(np.array([1.0, -1.0])) == pytest.approx(1.5, rel=2e-6)


coefficient_rows = st.lists(st.floats(-1, 1), min_size=2, max_size=12).filter(
    lambda c: max(map(abs, c)) > 1e-3
)


@pytest.mark.parametrize("others", [1, 8, 30, 62])
def test_mean_of_one_large_and_many_small_coefficients_is_not_below_the_true_one(others: int) -> None:
    for small in np.geomspace(1e-4, 1, 40):
        c = np.array([1.0] + [small] * others)
        exact = textbook_mean(c)
        assert exact * (1 - 1e-8) <= mean_abs(c) <= exact * (1 + 2e-6)


@settings(deadline=None, max_examples=60)
@given(coefficient_rows)
def test_mean_agrees_with_adaptive_quadrature_from_above(row: list[float]) -> None:
    c = np.array(row)
    exact = textbook_mean(c)
    assert exact * (1 - 1e-8) <= mean_abs(c) <= exact * (1 + 1e-5)


@settings(deadline=None, max_examples=60)
@given(coefficient_rows)
def test_mean_lies_between_one_laplace_and_the_central_limit(row: list[float]) -> None:
    c = np.array(row)
    norm = float(np.linalg.norm(c))
    assert norm * (1 - 1e-9) <= mean_abs(c) <= norm * 2 / math.sqrt(math.pi) * (1 + 1e-9)


@settings(deadline=None, max_examples=40)
@given(coefficient_rows, st.integers(0, 2**32 - 1))
def test_mean_is_a_norm(row: list[float], seed: int) -> None:
    a = np.array(row)
    b = np.random.default_rng(seed).normal(size=a.size)
    assert mean_abs(a + b) <= (mean_abs(a) + mean_abs(b)) * (1 + 2e-6)
    assert mean_abs(-3 * a) == pytest.approx(3 * mean_abs(a))


def test_mean_and_tail_against_samples() -> None:
    rng = np.random.default_rng(1)
    d, x, samples = 100, 2.0, 20_000
    for c in ([1.0], [0.5, 0.5, -0.5, -0.5], [0.75, -0.5, -0.25], [0.125] * 8 + [-0.125] * 8):
        z = np.zeros((samples, d))
        for weight in c:
            z += weight * rng.laplace(size=(samples, d))
        mean = mean_abs(np.array(c))
        assert np.abs(z).mean() == pytest.approx(mean, rel=0.005)
        sums = np.abs(z).sum(1)
        allowed = math.exp(-x)
        assert (sums > mean * noise_factor(d, x)).mean() <= allowed
        # not vacuous: without the tail the same claim is false
        assert (sums > mean * d).mean() > allowed


@pytest.mark.parametrize("d", [1, 10, 2000, 200_000])
@pytest.mark.parametrize("x", [0.5, 5.0, 30.0])
def test_tail_constant_holds_and_cannot_be_cut_by_a_fifth(d: int, x: float) -> None:
    # a single coefficient: the sum of d values |L| has the Gamma(d) distribution, the extreme case of the proof
    assert stats.gamma.sf(noise_factor(d, x), d) <= math.exp(-x)
    if x == 30 and d >= 2000:
        assert stats.gamma.sf(d + 0.8 * (noise_factor(d, x) - d), d) > math.exp(-x)


@settings(deadline=None, max_examples=60)
@given(coefficient_rows)
def test_even_moments_are_below_those_of_an_exponential_of_the_same_mean(row: list[float]) -> None:
    # E Z^2q = (2q)! h_q(c^2), h_q the complete homogeneous symmetric polynomial; the proof claims <= (2q)! m(c)^2q
    c = np.array(row) / np.linalg.norm(row)
    series = np.zeros(8)
    series[0] = 1.0
    for square in c**2:  # prod_l 1 / (1 - c_l^2 z) = sum_q h_q z^q
        for q in range(1, len(series)):
            series[q] += square * series[q - 1]
    assert (series <= float(mean_abs(c)) ** (2 * np.arange(len(series))) * (1 + 1e-9)).all()


def test_it_is_tighter_than_bernstein_with_raw_moments() -> None:
    # ||c|| (sqrt(4 d x) + 1.2 x): v = 2 ||c||^2 d and odd moments by Cauchy-Schwarz
    for d in (10, 1000, 100_000):
        for x in (1.0, 10.0, 40.0):
            ours = table.LARGEST_MEAN * (noise_factor(d, x) - d)
            assert ours < math.sqrt(4 * d * x) + 1.2 * x


# --- coefficients -----------------------------------------------------------------------------------------------


def random_doubly_stochastic(n: int, seed: int) -> Static:
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.ones(4))
    return Static(
        sum(
            w * np.eye(n)[p]
            for w, p in zip(weights, [np.arange(n), *map(rng.permutation, [n] * 3)], strict=True)
        )
    )


def round_matrix(topology: Topology, clock: int, sync_every: int) -> np.ndarray:
    present = topology.present(clock)
    if not (sync_every and (clock + 1) % sync_every == 0):
        return topology.weights(clock).dense()
    here = np.ones(topology.nodes, bool) if present is None else present
    matrix = np.diag(1.0 - here)
    matrix[np.ix_(here, here)] = 1 / here.sum()
    return matrix


TOPOLOGIES: list[Callable[[], Topology]] = [
    lambda: DOut(7, 3),
    lambda: Exponential(10),
    lambda: Ring(6),
    lambda: Base(9, 2),
    lambda: OnePeerRandom(8, seed=2),
    lambda: random_doubly_stochastic(6, seed=4),
    lambda: Exponential(9).with_dropouts(0.3, seed=5),
]


@pytest.mark.parametrize("make", TOPOLOGIES)
def test_coefficients_against_dense_products(make: Callable[[], Topology]) -> None:
    topology, sync_every = make(), 4
    known = Coefficients(topology, sync_every)
    rng = np.random.default_rng(0)
    first, second = np.triu_indices(topology.nodes, k=1)
    for _ in range(6):
        clocks = rng.integers(0, 30, size=5).tolist()
        # a synchronisation of everybody leaves nothing to remember
        clocks = [c for c in clocks if (c + 1) % sync_every or topology.present(c) is not None]
        product = np.eye(topology.nodes)
        lags = list(known.lags(clocks))
        assert lags or not clocks
        for lag, clock in zip(lags, reversed(clocks), strict=False):
            product = product @ round_matrix(topology, clock, sync_every)
            c = product[first] - product[second]
            np.testing.assert_allclose(lag.product, product, atol=1e-12)
            np.testing.assert_allclose(lag.spread, np.abs(c), atol=1e-12)
            present = topology.present(clock)
            noisy = c if present is None else c[:, present]
            np.testing.assert_allclose(lag.mean, [safe_mean(row) for row in noisy], rtol=1e-5, atol=1e-12)
            assert lag.contraction == pytest.approx(np.abs(c).sum(1).max() / 2)


@pytest.mark.parametrize("topology", [Exponential(8), Exponential(16), Base(10, 1), Base(12, 2)])
def test_coefficients_vanish_where_the_average_is_exact(topology: Topology) -> None:
    assert topology.period is not None
    lags = list(Coefficients(topology, 0).lags(range(3, 40)))
    assert len(lags) <= 2 * topology.period
    assert lags[-1].spread.max() < 1e-12


def test_coefficients_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(table, "mean_abs", lambda c: calls.append(1) or mean_abs(c))
    known = Coefficients(Exponential(10), 5)
    for period in range(20):
        list(known.lags(range(4 * period, 4 * period + 4)))
    assert len(calls) <= 4 * 4  # 4 phases, 4 lags


@pytest.mark.parametrize("make", [Exponential, lambda n: Base(n, 2), OnePeerRandom])
def test_nodes_instead_of_pairs_is_looser_but_never_smaller(
    make: Callable[[int], Topology], monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = make(12)
    pairs = Coefficients(topology, 0)
    monkeypatch.setattr(table, "PAIRS_UP_TO", 4)
    nodes = Coefficients(topology, 0)
    rng = np.random.default_rng(0)
    for by_pair, by_node in zip(pairs.lags(range(6)), nodes.lags(range(6)), strict=False):
        own, past = rng.random(12), rng.random(12)
        exact = pairs.widest(own, by_pair.spread @ past + 2 * by_pair.mean)
        loose = nodes.widest(own, by_node.spread @ past + 2 * by_node.mean)
        assert exact <= loose + 1e-9
        assert loose <= 3 * exact
        assert by_pair.contraction <= by_node.contraction + 1e-12
