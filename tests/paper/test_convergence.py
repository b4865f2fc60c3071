"""The statements on convergence (Lemmas 4 to 6, Theorem 2), on a problem whose constants are known."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import dpps
from dpps.paper import Constants, Problem, Rates, convergence
from dpps.paper.convergence import SIGMA, TOPOLOGY
from tests.support.paper import (
    CONNECTED,
    SLACK,
    Constant,
    Recorder,
    mixing,
    problem_and_point,
    replicate,
    rows,
    spectral,
)


@pytest.mark.parametrize("seed", range(3))
def test_known_problem_gradients_and_constants(seed):
    problem, s, l = problem_and_point(seed)
    k = Constants.of(problem, dpps.DOut(4, 3), 0.0, 0.0)
    s.requires_grad_()
    l.requires_grad_()
    g_s, g_l = torch.autograd.grad(problem.value(s, l).sum(), (s, l))
    torch.testing.assert_close(problem.gradient_shared(s.detach(), l.detach()), g_s)
    torch.testing.assert_close(problem.gradient_local(s.detach(), l.detach()), g_l)
    s, l = s.detach(), l.detach()
    tight = {"L_s": 0.0, "L_l": 0.0, "L_ls": 0.0}
    for step in rows(200, 5, seed + 7, 0.05)[:, None, None]:
        short = step[..., :2]
        changes = {
            "L_s": (problem.gradient_shared(s + step, l) - problem.gradient_shared(s, l), step),
            "L_ls": (problem.gradient_local(s + step, l) - problem.gradient_local(s, l), step),
            "L_l": (problem.gradient_local(s, l + short) - problem.gradient_local(s, l), short),
        }
        for name, (change, move) in changes.items():
            tight[name] = max(tight[name], float(change.norm(dim=2).max() / move.norm()))
        assert float(problem.gradient_shared(s + step, l).norm(dim=2).max()) <= k.sigma_g / 2
    for name, found in tight.items():
        assert 0.05 * getattr(k, name) < found <= getattr(k, name)


def test_known_problem_is_not_convex():
    problem, s, l = problem_and_point(0, spread=0.0)
    points = torch.stack([problem.value(s + x, l).mean() for x in torch.linspace(0, 40, 81)])
    assert (points[2:] + points[:-2] - 2 * points[1:-1]).min() < -1e-4


# Lemma 4


def one_round(problem, s, l, rates, sigma, ratio, topology, seed):
    """One round of PartPSP from (s, l) through the protocol: the two differences of F that Lemma 4 bounds, and Delta_l, Delta_s."""
    n, copies, d = problem.shape
    random = torch.Generator().manual_seed(seed)
    protocol = dpps.DPPS(topology, dpps.Laplace(1.0, rates.gamma_n), Constant(ratio), noise=dpps.Seeded(seed))
    state = protocol.start(s.reshape(n, -1))
    mean = s.mean(0)
    g_l = problem.gradient_local(s, l)
    after = l - rates.gamma_l * convergence._noised(g_l, sigma, random)
    g_s = convergence._noised(problem.gradient_shared(s, after), sigma, random)
    protocol.step(state, (-rates.gamma_s * g_s).reshape(n, -1))
    moved = state.s.view(n, copies, d).mean(0)
    values = [problem.value(x, y).mean(0) for x, y in ((mean, l), (mean, after), (moved, after))]
    delta_l = float(g_l.square().sum(2).mean())
    delta_s = float(problem.gradient_shared(mean, after).mean(0).square().sum(1).mean())
    return values[1] - values[0], values[2] - values[1], delta_l, delta_s


def lemma_4(k, r, d, ratio, apart, delta_l, delta_s, gamma_b3):
    """The two right sides; `gamma_b3` is the rate beside L_s on the noise: printed gamma_s, belongs gamma_n. E||n_i||^2 = 2 d S^2/b^2."""
    local = k.L_ls**2 / 2 * apart + (1 + k.L_l) * (r.gamma_l * k.sigma_l) ** 2
    local += (r.gamma_l**2 * (1 + k.L_l) - r.gamma_l) * delta_l
    shared = (r.gamma_n / 2 + 4 * k.L_s * r.gamma_s**2 - r.gamma_s / 2) * delta_s
    shared += 4 * k.L_s * r.gamma_s**2 * (k.sigma_s**2 + k.sigma_g**2)
    shared += (r.gamma_n / 2 + k.L_s * gamma_b3**2) * 2 * d * ratio**2
    shared += (r.gamma_s * k.L_s**2 / 2 + 4 * k.L_s**3 * r.gamma_s**2) * apart
    return local, shared


def lower(samples):
    """Mean minus four standard errors."""
    return float(samples.mean() - 4 * samples.std() / math.sqrt(len(samples)))


@pytest.mark.parametrize("seed", range(6))
def test_lemma_4_holds_on_random_instances_where_gamma_n_is_below_gamma_s(seed):
    topology, sigma, ratio = dpps.DOut(4, 2), 0.4, 2.0
    rates = Rates(1, gamma_s=0.02 * 2**seed, gamma_l=0.05 * 1.5**seed, gamma_n=0.009 * 2**seed)
    problem, s, l = problem_and_point(seed, spread=0.2 + 0.3 * seed)
    k = Constants.of(problem, topology, sigma, sigma)
    wide, s, l = replicate(problem, s, l, 4000)
    local, shared, delta_l, delta_s = one_round(wide, s, l, rates, sigma, ratio, topology, seed)
    apart = float((s - s.mean(0)).square().sum(2).mean())
    for gamma_b3 in (rates.gamma_n, rates.gamma_s):
        bounds = lemma_4(k, rates, 5, ratio, apart, delta_l, delta_s, gamma_b3)
        assert lower(local) <= bounds[0]
        assert lower(shared) <= bounds[1]


def test_lemma_4_as_printed_fails_for_gamma_n_above_gamma_s_and_holds_with_gamma_n_in_b3():
    """It lacks Theorem 2's condition gamma_n < gamma_s / 2. Two equal nodes at their minimum: the noise alone raises F."""
    topology, ratio, d = dpps.Complete(2), 1e-3, 5
    rates = Rates(1, gamma_s=0.01, gamma_l=0.1, gamma_n=4.0)
    v = torch.zeros(2, 1, d, dtype=torch.float64)
    v[..., 0] = 1
    problem = Problem(v, torch.zeros_like(v), torch.zeros(2, 1, 1, dtype=torch.float64), 0.3)
    wide, s, l = replicate(problem, torch.zeros_like(v), torch.zeros(2, 1, 1, dtype=torch.float64), 4000)
    _, shared, delta_l, delta_s = one_round(wide, s, l, rates, 0.0, ratio, topology, 0)
    k = Constants(L_s=2.0, L_l=2.18, L_ls=0.6, q=0.0, sigma_s=0.0, sigma_l=0.0, sigma_g=0.0)
    assert (delta_l, delta_s) == (0.0, 0.0)
    _, printed = lemma_4(k, rates, d, ratio, 0.0, delta_l, delta_s, rates.gamma_s)
    _, corrected = lemma_4(k, rates, d, ratio, 0.0, delta_l, delta_s, rates.gamma_n)
    assert lower(shared) > 2 * printed
    assert float(shared.mean()) < corrected
    by_hand = k.L_s / 2 * rates.gamma_n**2 * 2 * d * ratio**2 / 2  # L_s/2 gamma_n^2 E||n||^2 / N
    assert float(shared.mean()) == pytest.approx(by_hand, rel=0.05)


def test_lemma_4_step_b3_is_an_equality_with_gamma_n_and_not_with_gamma_s():
    noise, gamma_n, gamma_s = Recorder(5), 0.01, 0.1
    protocol = dpps.DPPS(dpps.DOut(4, 2), dpps.Laplace(1.0, gamma_n), Constant(2.0), noise=noise)
    state, gradient = protocol.start(rows(4, 6, 0)), rows(4, 6, 1)
    before = state.s.mean(0)
    protocol.step(state, -gamma_s * gradient)
    n = noise.added / gamma_n
    left = (state.s.mean(0) - before).square().sum()
    torch.testing.assert_close(left, (gamma_n * n.mean(0) - gamma_s * gradient.mean(0)).square().sum())
    assert float(left) < 0.5 * float((gamma_s * n.mean(0) - gamma_s * gradient.mean(0)).square().sum())


class TwoNumbers(nn.Module):
    """F(s, l; xi) = xi (s l + l): with xi = +-1 its mean is 0 everywhere, so are all gradients of F."""

    def __init__(self):
        super().__init__()
        self.s = nn.Parameter(torch.zeros(1))
        self.l = nn.Parameter(torch.zeros(1))

    def forward(self, xi):
        return xi * (self.s * self.l + self.l)


def test_lemma_4_step_b2_needs_a_fresh_batch_for_the_shared_gradient():
    """Algorithm 2 takes both gradients from one batch: l^(t+1) depends on it, so the shared gradient is biased by O(gamma_l).

    Both nodes have the batches +1 and -1; in the first round one node draws the one, one the other: a mean over both outcomes.
    """
    orders = ([1.0, -1.0], [-1.0, 1.0])
    sets = [TensorDataset(torch.tensor(order)[:, None], torch.zeros(2, 1)) for order in orders]
    learner = dpps.Run(
        dpps.PartPSP(
            TwoNumbers(), ["s"], lr_shared=0.1, lr_local=0.2, batch_size=1, loss=lambda out, _: out.mean()
        ),
        sets,
        topology=dpps.Complete(2),
        seed=0,
    ).start(epochs=1)
    learner.step()
    assert float(learner.shared) == pytest.approx(0.1 * 0.2), "gamma_s gamma_l, though F is 0 everywhere"


# Lemma 5


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_lemma_5_second_moment_of_the_noise(share):
    """An equality when S(t) = S; S(t) below S stays below the bound."""
    b, gamma_n, S, d, noise = 4.0, 0.03, 10.0, 64, Recorder(6)
    protocol = dpps.DPPS(dpps.Ring(8), dpps.Laplace(b, gamma_n), Constant(share * S), noise=noise)
    state = protocol.start(torch.zeros(8, d, dtype=torch.float64))
    squares = []
    for _ in range(40):
        protocol.step(state)
        squares.append((noise.added / gamma_n).square().sum(1))
    found, bound = float(torch.cat(squares).mean()), 2 * d * S**2 / b**2
    assert found == pytest.approx(share**2 * bound, rel=0.08), "5 standard errors"
    assert found <= 1.08 * bound


# Lemma 6


def test_lemma_6_the_inequality_it_cites_does_not_hold_node_by_node():
    """It bounds ||y_i - mean s|| by node i's own start, gradients and noise. Here node 2 has none of these, for every C and q."""
    protocol = dpps.DPPS(dpps.DOut(3, 2))
    state = protocol.start(torch.zeros(3, 1, dtype=torch.float64))
    protocol.step(state, torch.tensor([[1.0], [0.0], [0.0]], dtype=torch.float64))
    assert float((state.y[2] - state.s.mean(0)).norm()) == pytest.approx(1 / 3)


@pytest.mark.parametrize(("topology", "q"), CONNECTED)
@settings(max_examples=8)
@given(seed=st.integers(0, 1000))
def test_lemma_6_the_same_inequality_holds_for_all_nodes_together(topology, q, seed):
    """Enough: ||W(t-1)...W(k) - 1/N||_2 <= C q^(t-k), and Frobenius norms of all rows in place of one node's."""
    n, d, C = topology.nodes, 3, mixing(topology, q, spectral)
    noise = Recorder(seed)
    protocol = dpps.DPPS(topology, dpps.Laplace(1.0, 0.1), Constant(1.0), noise=noise)
    state = protocol.start(rows(n, d, seed))
    bound = C * float(state.s.norm())
    for t in range(20):
        protocol.step(state, rows(n, d, seed + t))
        bound = q * (bound + C * float((noise.added + noise.perturbation).norm()))
        assert float((state.y - state.s.mean(0)).norm()) <= bound * SLACK


@pytest.mark.parametrize("seed", range(3))
def test_lemma_6_conclusion_on_the_known_problem(seed):
    topology, sigma, ratio, d, T = dpps.DOut(4, 2), 0.3, 3.0, 5, 60
    problem, s, l = problem_and_point(seed)
    k = Constants.of(problem, topology, sigma, 0.0)
    gamma_s, gamma_n = (1 - k.q) / (2 * math.sqrt(15) * k.C * k.L_s), 0.02
    wide, s, l = replicate(problem, s, l, 200)
    random = torch.Generator().manual_seed(seed)
    protocol = dpps.DPPS(topology, dpps.Laplace(1.0, gamma_n), Constant(ratio), noise=dpps.Seeded(seed))
    state = protocol.start(s.reshape(4, -1))
    start, apart, delta_s = float(s.square().sum(2).mean()), 0.0, 0.0
    for _ in range(T):
        y = state.y.view(4, 200, d)
        mean = state.s.view(4, 200, d).mean(0)
        apart += float((y - mean).square().sum(2).mean())
        l = l - 0.1 * wide.gradient_local(y, l)
        delta_s += float(wide.gradient_shared(mean, l).mean(0).square().sum(1).mean())
        g_s = convergence._noised(wide.gradient_shared(y, l), sigma, random)
        protocol.step(state, (-gamma_s * g_s).reshape(4, -1))
    far = (k.C / (1 - k.q)) ** 2
    bound = 60 * d * gamma_n**2 * far * ratio**2 * T
    bound += 30 * gamma_s**2 * far * T * (k.sigma_s**2 + k.sigma_g**2)
    bound += 10 * k.C**2 * start / (1 - k.q**2) + 60 * gamma_s**2 * far * delta_s
    assert 0.001 * bound < apart <= bound


# Theorem 2


@pytest.fixture(scope="module")
def known():
    return Problem.draw(
        convergence.NODES, 8, convergence.SHARED, convergence.LOCAL, convergence.COUPLING, seed=1
    )


def test_theorem_2_step_sizes_and_explicit_bound_hold_and_the_gradients_fall_with_t(known):
    k, totals = Constants.of(known, TOPOLOGY, *SIGMA), []
    for rounds in (1024, 2048):
        rates = convergence.theorem_rates(rounds)
        assert rates.hold(k)
        found = convergence.simulate(known, rates, budget=convergence.BUDGET, sigma=SIGMA)
        left, right = convergence.explicit_bound(k, rates, found, convergence.SHARED, convergence.BUDGET)
        assert 0 < left <= right
        totals.append((found.delta_s + found.delta_l).mean())
    assert totals[1] / totals[0] < 2**-0.5, "at least as fast as 1/sqrt(T)"


def test_theorem_2_step_size_conditions_can_fail(known):
    k = Constants.of(known, TOPOLOGY, *SIGMA)
    assert not convergence.theorem_rates(256).hold(k), "T is not sufficiently large"
    assert not Rates(1024, 0.01, 0.25, 0.006).hold(k), "gamma_n above gamma_s / 2"


def test_theorem_2_noise_term_goes_with_one_over_b_squared_and_falls_faster_in_t_than_the_theorem_says(known):
    """From a stationary point with exact gradients there is nothing but noise, and it is gamma_n^2/gamma_s = T^(-3/2) large. The
    theorem's T^(-1/2) comes from bounding (b1), which is 0: the noise is independent of the gradient and has mean 0."""
    start = known.stationary()

    def noise_share(rounds, budget):
        rates = convergence.theorem_rates(rounds)
        return convergence.simulate(known, rates, budget=budget, start=start).delta_s.mean()

    usual = noise_share(512, 20.0)
    assert usual / noise_share(512, 40.0) == pytest.approx(4, rel=0.1)
    assert usual / noise_share(1024, 20.0) == pytest.approx(2**1.5, rel=0.1)
    assert noise_share(512, None) < 0.01 * usual


# The experiment


def test_series_recovers_a_known_slope():
    x = (1.0, 2.0, 4.0, 8.0)
    wobble = np.exp(np.random.default_rng(0).normal(0, 0.05, (4, 30)))
    series = convergence.Series("made up", "b", x, np.array(x)[:, None] ** -2 * wobble, -2.0)
    low, high = series.interval
    assert low < -2 < high
    assert high - low < 0.1
    assert series.agrees
    assert not convergence.Series("made up", "b", x, series.values, -1.5).agrees
    assert not convergence.Series("made up", "T", x, series.values, -2.5).agrees, "falls too slowly"
    assert convergence.Series("made up", "T", x, series.values, -0.5).agrees, "falls faster than the bound"


def test_convergence_writes_its_files_and_says_when_conditions_fail(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(convergence, "QUICK", convergence.Size(3, (16, 32), (8, 16), (10.0, 20.0)))
    monkeypatch.setattr(convergence, "NOISE_ROUNDS", 16)
    series = convergence.run(tmp_path / "new", quick=True)
    assert {p.name for p in (tmp_path / "new").iterdir()} == {
        f"convergence.{end}" for end in ("csv", "svg", "png", "html")
    }
    page = (tmp_path / "new" / "convergence.html").read_text()
    assert "<svg" in page
    assert "Theorem 2" in page
    assert "runs: False" in capsys.readouterr().out, "T = 16 is too small"
    assert [s.exponent for s in series] == [-0.5, -0.5, -0.5, 1.0, -2.0]
    lines = (tmp_path / "new" / "convergence.csv").read_text().splitlines()
    assert len(lines) == 1 + 3 * (2 * 2 + 2 + 2 + 1), "a line per run and seed"
