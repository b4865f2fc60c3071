"""The certified sensitivity: its coefficients against brute force, its estimate against the formula, its claim in whole runs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpps.errors import UsageError
from dpps.noise import Event, Laplace, Mechanism, NoiseSource, NoNoise, Seeded, non_private
from dpps.protocol import DPPS, RoundRecord
from dpps.sensitivity import (
    Certified,
    Oracle,
    Paper,
    Released,
    RoundView,
    Sensitivity,
    WorstCase,
    mean_abs,
    noise_factor,
)
from dpps.sensitivity import certified as table
from dpps.sensitivity.certified import Coefficients
from dpps.topology import Base, DOut, Exponential, OnePeerRandom, Ring, Static, Topology
from tests.support.protocol import Scripted
from tests.support.sensitivity import safe_mean, textbook_mean

# --- m(c) and the tail ------------------------------------------------------------------------------------------


def test_mean_by_hand() -> None:
    """Of four halves, of one coefficient (its size), and of two opposite ones."""
    assert mean_abs(np.array([0.5, 0.5, -0.5, -0.5])) == pytest.approx(35 / 32, rel=2e-6)
    single = np.array([[0.0, -3.0], [1e-12, 0.0], [0.0, 0.0]])
    assert mean_abs(single) == pytest.approx([3, 1e-12, 0], rel=2e-6)
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


LAPLACE = Laplace(budget=5, noise_rate=0.001)


# --- the estimate is the formula --------------------------------------------------------------------------------


@dataclass
class Past:
    clock: int
    norms: np.ndarray
    scale: float


def by_definition(
    topology: Topology, past: list[Past], now: np.ndarray, start: np.ndarray, t: int, d: int, delta: float
) -> float:
    """S(t) straight from the theorem, all rounds one by one."""
    n = topology.nodes
    x = math.log(n * (n - 1) / 2 * max(1, len(past)) * (t + 1) * (t + 2) / delta)
    best = 0.0
    for i in range(n):
        for j in range(i):
            total, product = now[i] + now[j], np.eye(n)
            for event in reversed(past):
                product = product @ topology.weights(event.clock).dense()
                c = product[i] - product[j]
                total += np.abs(c) @ event.norms + event.scale * safe_mean(c) * noise_factor(d, x)
            total += np.abs(product[i] - product[j]) @ start
            best = max(best, total)
    return best


@pytest.mark.parametrize("private_start", [False, True])
def test_estimate_is_the_theorem_through_a_clock_restart_and_a_resume(private_start: bool) -> None:
    n, d, sensitivity = 6, 30, Certified(delta=1e-4)
    topology = Exponential(n)
    protocol = DPPS(topology, Laplace(5, 0.1), sensitivity, sync_every=7, noise=Seeded(1))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(n, d, generator=generator, dtype=torch.float64)
    state = protocol.start(rows if private_start else rows[:1].repeat(n, 1))
    start = rows.abs().sum(1).numpy() if private_start else np.zeros(n)
    past: list[Past] = []
    synchronised = []
    for t in range(14):
        if t == 5:
            protocol.restart_clock(state, 0.1)
        eps = torch.randn(n, d, generator=generator, dtype=torch.float64) * torch.rand(
            n, 1, generator=generator
        )
        norms = eps.abs().sum(1).numpy()
        clock = state.clock
        state.memory = {name: value.clone() for name, value in state.memory.items()}  # as from a checkpoint
        record = protocol.step(state, eps)
        expected = by_definition(topology, past, norms, start, t, d, sensitivity.delta)
        assert record.estimated == pytest.approx(expected, rel=1e-4)
        past.append(Past(clock, norms, record.scale))
        if record.synchronised:
            synchronised.append(t)
            past, start = [], np.zeros(n)
    assert synchronised == [11]  # not 6 and 13: the clock restarted in round 5


def test_estimate_does_not_change_memory() -> None:
    protocol = DPPS(Ring(5), LAPLACE, Certified(), noise=Seeded(0))
    state = protocol.start(torch.zeros(5, 3))
    protocol.step(state, torch.ones(5, 3))
    before = {name: value.clone() for name, value in state.memory.items()}
    norms = torch.ones(5, dtype=torch.float64)
    view = RoundView(state.config, state.round, state.clock, 1.0, norms, state.s)
    assert Certified().estimate(state.memory, view) == Certified().estimate(state.memory, view)
    for name, value in before.items():
        assert torch.equal(state.memory[name], value)


def test_grid_adds_two_steps_per_coordinate() -> None:
    protocol = DPPS(Exponential(4), LAPLACE, Certified(), noise=Seeded(0))
    state = protocol.start(torch.zeros(4, 10))
    view = RoundView(state.config, 0, 0, 1.0, torch.ones(4, dtype=torch.float64), state.s)
    released = Released(2.0, 0.0, torch.zeros(4, dtype=torch.float64), False, step=0.01)
    after = Certified().advance(state.memory, view, released)
    assert after["norms"][0].tolist() == pytest.approx([1 + 2 * 0.01 * 10] * 4)


# --- whole runs: the real distance is never above the bound -----------------------------------------------------


def run(
    topology: Topology,
    sensitivity: Sensitivity,
    *,
    d: int,
    rounds: int,
    sync_every: int = 0,
    mechanism: Mechanism = LAPLACE,
    watch: dict[str, Sensitivity] | None = None,
    private_start: bool = False,
    restarts: Sequence[int] = (),
    noise: NoiseSource | None = None,
    seed: int = 0,
) -> list[RoundRecord]:
    """A closed loop with gradient-like perturbations: sparse, of uneven norms, shrinking over time."""
    torch.set_num_threads(1)
    n, generator = topology.nodes, torch.Generator().manual_seed(seed)
    protocol = DPPS(
        topology,
        mechanism,
        sensitivity,
        sync_every=sync_every,
        noise=noise or Seeded(seed),
        watch={"real": Oracle()} | (watch or {}),
    )
    rows = 0.05 * torch.randn(n if private_start else 1, d, generator=generator)
    state = protocol.start(rows.expand(n, d))
    records = []
    for t in range(rounds):
        if t in restarts:
            protocol.restart_clock(state, 0.1 ** (1 + restarts.index(t)))
        eps = torch.randn(n, d, generator=generator) * (torch.rand(n, d, generator=generator) < 0.3)
        size = 10 * (0.5 + 0.5 * torch.rand(n, 1, generator=generator)) * math.exp(-t / 100) * state.rate
        records.append(protocol.step(state, eps / eps.abs().sum(1, keepdim=True) * size))
    return records


def ratios(records: list[RoundRecord]) -> np.ndarray:
    return np.array([(r.estimated or 0.0) / (r.real or math.nan) for r in records])


@pytest.mark.parametrize("sync_every", [4, 5])
@pytest.mark.parametrize("topology", [DOut(10, 2), DOut(10, 8), Exponential(10)], ids=str)
def test_never_below_the_real_distance_and_below_twice_of_it(topology: Topology, sync_every: int) -> None:
    watch: dict[str, Sensitivity] = {"paper": Paper(0.78, 0.55), "worst": WorstCase()}
    records = run(topology, Certified(), d=7850, rounds=120, sync_every=sync_every, watch=watch)
    certified = ratios(records)
    paper = np.median([r.watched["paper"] / (r.real or math.nan) for r in records])
    print(f"{topology}: median certified/real {np.median(certified):.2f}, paper/real {paper:.2f}")
    assert certified.min() >= 1
    assert np.median(certified) < 2.0
    assert all(r.watched["worst"] >= (r.real or 0.0) for r in records)


@pytest.mark.parametrize(
    ("topology", "options"),
    [
        (DOut(50, 2), {"sync_every": 5, "rounds": 20}),
        (Exponential(8), {"rounds": 80}),
        (DOut(6, 2), {"rounds": 100, "mechanism": Laplace(50, 0.001)}),
        (OnePeerRandom(12, seed=1), {"rounds": 40, "mechanism": Laplace(50, 0.001)}),
        (Exponential(10).with_dropouts(0.2, seed=3), {"sync_every": 5, "rounds": 60}),
        (DOut(10, 4), {"sync_every": 5, "rounds": 30, "private_start": True}),
        (Exponential(10), {"sync_every": 5, "rounds": 40, "restarts": (13, 27)}),
        (Exponential(70), {"sync_every": 4, "rounds": 10}),
        (Base(66, 2), {"sync_every": 6, "rounds": 10}),
    ],
    ids=str,
)  # fmt: skip
def test_never_below_the_real_distance(topology: Topology, options: dict[str, object]) -> None:
    records = run(topology, Certified(), d=1500, watch={"worst": WorstCase()}, **options)  # type: ignore[arg-type]
    assert ratios(records).min() >= 1
    assert all(r.watched["worst"] >= (r.real or 0.0) for r in records)


def test_older_rounds_summed_up_early_are_still_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = Laplace(50, 0.001)
    exact = run(DOut(8, 3), Certified(), d=400, rounds=40, mechanism=quiet)
    monkeypatch.setattr(table, "NEGLIGIBLE", 0.7)
    monkeypatch.setattr(table, "WINDOW", 3)
    summed = run(DOut(8, 3), Certified(), d=400, rounds=40, mechanism=quiet)
    assert ratios(summed).min() >= 1
    assert np.median(ratios(summed)) > np.median(ratios(exact))


def test_memory_stays_small_without_synchronisation() -> None:
    protocol = DPPS(DOut(6, 4), Laplace(500, 0.001), Certified(), noise=Seeded(0))
    state = protocol.start(torch.zeros(6, 20))
    for _ in range(100):
        protocol.step(state, torch.ones(6, 20))
    assert 0 < len(state.memory["clocks"]) < 20


class WithoutNoisePart(Certified):
    """Sabotaged: forgets the noise of past rounds."""

    def _factor(self, view: RoundView, rounds: int) -> float:
        return 0.0


class WithoutThePast(Certified):
    """Sabotaged: forgets past perturbations."""

    def advance(self, memory, view, released):  # type: ignore[no-untyped-def]
        after = dict(super().advance(memory, view, released))
        return {**after, "norms": 0 * after["norms"], "bases": 0 * after["bases"]}


@pytest.mark.parametrize("sabotaged", [WithoutNoisePart(), WithoutThePast()], ids=str)
def test_sabotaged_twin_is_caught(sabotaged: Sensitivity) -> None:
    # noise is calibrated to the true bound; the twin only watches
    mechanism = LAPLACE if isinstance(sabotaged, WithoutNoisePart) else Laplace(500, 0.001)
    records = run(DOut(10, 2), Certified(), d=3000, rounds=40, mechanism=mechanism, watch={"twin": sabotaged})
    assert any(r.watched["twin"] < (r.real or 0.0) for r in records)
    assert ratios(records).min() >= 1


def test_worst_case_holds_for_noise_that_certified_calls_impossible() -> None:
    huge = [30 * np.sign(np.arange(4)[:, None] - 1.5) * np.ones((4, 50)) for _ in range(6)]
    loud = Laplace(5, 0.05)
    source = Scripted(huge)
    certified = run(Ring(4), Certified(), d=50, rounds=6, mechanism=loud, noise=source)
    assert ratios(certified).min() < 1
    worst = run(Ring(4), WorstCase(), d=50, rounds=6, mechanism=loud, noise=Scripted(huge))
    assert ratios(worst).min() >= 1


def test_without_noise_only_perturbations_count() -> None:
    records = run(Exponential(8), Certified(), d=60, rounds=20, mechanism=NoNoise())
    watched = run(Exponential(8), WorstCase(), d=60, rounds=20, mechanism=NoNoise())
    assert ratios(records).min() >= 1
    assert [r.estimated for r in records] == pytest.approx([r.estimated for r in watched])


# --- gain -------------------------------------------------------------------------------------------------------


def test_gain_tells_boundedness_without_synchronisation() -> None:
    topology, certified = Exponential(8), Certified()
    gains = {d: certified.gain(LAPLACE, topology, d, rounds=150) for d in (1500, 3500)}
    assert gains[1500] < 0.9
    assert gains[3500] > 1.1

    def largest(d: int) -> tuple[float, float]:
        protocol = DPPS(topology, LAPLACE, certified, noise=Seeded(0))
        state = protocol.start(torch.zeros(8, d, dtype=torch.float64))  # rounding is no part of the gain
        push = torch.full((8, d), 1.0 / d)  # norm 1 in every round: at most 2 + 2 + 2 from the last three
        s = [protocol.step(state, push).estimated or 0.0 for _ in range(150)]
        return max(s[:75]), max(s[75:])

    early, late = largest(1500)
    assert late < 1.05 * early
    assert late <= 6 / (1 - gains[1500])
    early, late = largest(3500)
    assert late > 1e3 * early


def test_gain_of_the_mean_alone_is_one_at_2600_parameters_and_the_tail_comes_on_top() -> None:
    quarters = np.array([0.25] * 4 + [-0.25] * 4)
    mean_alone = 0.001 / 5 * 2600 * (35 / 32 + float(mean_abs(quarters)))
    assert mean_alone == pytest.approx(0.98, abs=0.01)
    assert (
        Certified().gain(LAPLACE, Exponential(8), 2000) < 1 < Certified().gain(LAPLACE, Exponential(8), 2400)
    )


def test_gain_counts_rounds_beyond_the_window() -> None:
    slow = Certified().gain(LAPLACE, DOut(40, 2), 100)
    fast = Certified().gain(LAPLACE, DOut(40, 20), 100)
    assert 0 < fast < slow < math.inf


# --- refusals ---------------------------------------------------------------------------------------------------


class Triangular(Mechanism):
    norm, name = 1, "triangular"

    def scale(self, sensitivity: float) -> float:
        return sensitivity

    def draw(self, stream: np.random.Generator, out: np.ndarray) -> None:
        out[...] = stream.random(out.shape) - stream.random(out.shape)

    def event(self, noise_multiplier: float) -> Event:
        return non_private()


def test_noise_of_another_distribution_is_refused() -> None:
    protocol = DPPS(Ring(4), Triangular(), Certified())
    with pytest.raises(UsageError, match=r"'triangular'.*Laplace"):
        protocol.start(torch.zeros(4, 2))
    with pytest.raises(UsageError, match="triangular"):
        Certified().gain(Triangular(), Ring(4), 10)
    DPPS(Ring(4), Triangular(), WorstCase()).start(torch.zeros(4, 2))


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-6, math.nan])
def test_delta_must_be_a_probability(delta: float) -> None:
    with pytest.raises(UsageError, match="delta"):
        Certified(delta)


# Floating point: rows that are equal on paper differ in their last bits, and the certified bound covers that


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sensitivity", [Certified(), WorstCase()], ids=["certified", "worst-case"])
@pytest.mark.parametrize("size", [0.01, 1.0, 300.0])
def test_rows_that_are_equal_on_paper_only_are_covered(dtype, sensitivity, size) -> None:
    """After a synchronisation nobody perturbs: mixing equal rows leaves them different in their last bits, and S was 0."""
    protocol = DPPS(
        Base(3, 1), Laplace(1.0, 1.0), sensitivity, sync_every=4, noise=Seeded(0), watch={"real": Oracle()}
    )
    generator = torch.Generator().manual_seed(0)
    state = protocol.start((size * torch.randn(1, 500, generator=generator)).to(dtype).repeat(3, 1))
    differed = 0
    for t in range(40):
        quiet = t % 4 in (0, 1, 2)
        eps = torch.zeros(3, 500) if quiet else 1e-3 * size * torch.randn(3, 500, generator=generator)
        rows = state.s.double()
        record = protocol.step(state, eps)
        if quiet:
            apart = float(torch.cdist(rows, rows, p=1).max())
            differed += apart > 0
            assert record.estimated >= apart
            assert (record.used > 0) == (record.scale > 0)
            assert t % 4 == 0 or record.scale > 0
    assert differed > 5


def test_what_rounding_adds_is_little() -> None:
    def estimates(dtype: torch.dtype) -> list[float]:
        generator = torch.Generator().manual_seed(0)
        protocol = DPPS(Exponential(10), Laplace(5, 1e-3), Certified(), sync_every=5, noise=Seeded(0))
        state = protocol.start(torch.randn(1, 2000, generator=generator).to(dtype).repeat(10, 1))
        found = []
        for _ in range(60):
            eps = torch.randn(10, 2000, generator=generator) / 200
            found.append(protocol.step(state, eps.to(dtype)).estimated)
        return found

    assert estimates(torch.float32) == pytest.approx(estimates(torch.float64), rel=2e-3)
