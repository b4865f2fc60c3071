"""The paper's statements on privacy and on the mean, in numbers and through the shipped protocol: what holds, what does not, what it needs."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.utils.data import TensorDataset

import dpps
from dpps.errors import UsageError
from dpps.learning import clip_rows
from dpps.paper import convergence
from dpps.sensitivity import Unclipped, real_sensitivity
from tests.support.paper import CONNECTED, SLACK, Constant, Recorder, dobrushin, log_ratio, mixing, rows
from tests.support.protocol import Scripted, column_stochastic

# Lemma 1 and Theorem 1


@given(st.integers(1, 6), st.floats(0.1, 50), st.floats(0.01, 10), st.integers(0, 1000))
def test_lemma_1_the_density_ratio_of_laplace_noise(d, sensitivity, epsilon, seed):
    a, b, message = rows(3, d, seed)
    b = a + (b - a) * sensitivity / float((b - a).abs().sum())  # now at distance S exactly
    scale = dpps.Laplace(epsilon).scale(sensitivity)
    assert abs(log_ratio(message, a, b, scale)) <= epsilon * SLACK
    assert log_ratio(a, a, b, scale) == pytest.approx(epsilon), "attained: no smaller epsilon is true"


def test_lemma_1_the_noise_that_is_drawn_has_the_density_that_is_claimed():
    noise = Recorder(1)
    protocol = dpps.DPPS(dpps.Ring(4), dpps.Laplace(2.0, 0.5), Constant(3.0), noise=noise)
    record = protocol.step(protocol.start(torch.zeros(4, 2500, dtype=torch.float64)))
    drawn = noise.added.flatten().numpy()
    assert record.scale == pytest.approx(0.5 * 3.0 / 2.0)
    assert stats.kstest(drawn, stats.laplace(scale=record.scale).cdf).pvalue > 0.01
    assert stats.kstest(drawn, stats.laplace(scale=1.3 * record.scale).cdf).pvalue < 1e-6


@given(st.integers(2, 6), st.integers(1, 5), st.floats(0.1, 10), st.floats(0.01, 2), st.integers(0, 1000))
def test_theorem_1_one_message_costs_b_over_gamma_n_when_s_covers_the_real_distance(n, d, b, gamma_n, seed):
    noise = Recorder(seed)
    protocol = dpps.DPPS(dpps.Exponential(n), dpps.Laplace(b, gamma_n), dpps.Oracle(), noise=noise)
    state = protocol.start(rows(n, d, seed))
    for t in range(3):
        record = protocol.step(state, rows(n, d, seed + t, 0.1))
        assert record.epsilon == pytest.approx(b / gamma_n)
        for i, j in itertools.permutations(range(n), 2):
            ratio = log_ratio(noise.message[i], noise.half[i], noise.half[j], record.scale)
            assert ratio <= b / gamma_n * SLACK
        attained = max(
            log_ratio(x, x, y, record.scale) for x, y in itertools.permutations(noise.half.unbind(), 2)
        )
        assert attained == pytest.approx(b / gamma_n)


def opposite_kicks(c_prime, decay=0.6):
    """Two nodes pushed in opposite directions right after a synchronisation: the round's record and its recorder."""
    noise = Recorder(0)
    protocol = dpps.DPPS(
        dpps.Exponential(4),
        dpps.Laplace(5.0, 0.1),
        dpps.Paper(c_prime, decay),
        sync_every=2,
        noise=noise,
        watch={"real": dpps.Oracle()},
    )
    kick = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    state = protocol.start(torch.zeros(4, 2, dtype=torch.float64))
    for _ in range(2):
        protocol.step(state, kick)
    return protocol.step(state, kick), noise


def test_theorem_1_needs_lemma_2_a_distance_above_s_costs_more_than_b_over_gamma_n():
    record, noise = opposite_kicks(c_prime=0.8)
    worst = max(log_ratio(x, x, y, record.scale) for x, y in itertools.permutations(noise.half.unbind(), 2))
    assert record.epsilon == pytest.approx(50.0), "claimed"
    assert worst == pytest.approx(50.0 / 0.8), "true"


# Lemma 2


def test_lemma_2_proof_step_one_row_of_w_does_not_determine_the_rows():
    """The proof turns y_i = [W]_i s / [W]_i a (one equation) into s_j = a_j y_i for all j (N equations)."""
    protocol = dpps.DPPS(dpps.DOut(3, 2))
    s = torch.tensor([[0.0], [2.0], [4.0]], dtype=torch.float64)
    state = protocol.start(s)
    protocol.step(state)
    assert state.a.tolist() == [1.0, 1.0, 1.0]
    for i in range(3):
        claimed = state.a[:, None] * state.y[i]  # a y_i^T = s, claimed for each i
        assert not torch.allclose(claimed, s)
    claimed_zero = (s - state.y).abs().sum(1)  # term (a) of the proof: ||s_i^(t+1/2) - y_i^(t+1)||_1
    assert claimed_zero.tolist() == [2.0, 1.0, 1.0]
    equal = protocol.start(torch.full((3, 1), 7.0, dtype=torch.float64))
    protocol.step(equal)
    assert (equal.y == 7).all(), "it holds when all rows are equal, where there is nothing to hide"


@pytest.mark.parametrize("c_prime", [0.5, 0.78, 0.95])
def test_lemma_2_conclusion_fails_after_a_synchronisation_for_c_prime_below_1(c_prime):
    record, _ = opposite_kicks(c_prime)
    assert record.real == pytest.approx(2.0), "2 max ||eps||_1"
    assert record.estimated == pytest.approx(2 * c_prime), "2 C' max ||eps||_1"
    assert record.real > record.estimated


def test_lemma_2_conclusion_holds_in_that_round_from_c_prime_1_on():
    record, _ = opposite_kicks(1.0)
    assert record.real <= record.estimated * SLACK


def test_lemma_2_conclusion_fails_for_c_prime_1_where_some_nodes_have_the_noise_and_others_the_perturbation():
    unit = np.array([[[1.0], [0.0], [-1.0], [0.0]], np.zeros((4, 1))])
    protocol = dpps.DPPS(
        dpps.DOut(4, 2),
        dpps.Laplace(0.02),
        dpps.Paper(1.0, 0.9),
        noise=Scripted(unit),
        watch={"real": dpps.Oracle()},
    )
    state = protocol.start(torch.zeros(4, 1, dtype=torch.float64))
    tiny = torch.full((4, 1), 0.01, dtype=torch.float64)
    protocol.step(state, tiny)
    record = protocol.step(state, torch.tensor([[0.0], [0.5], [0.0], [-0.5]], dtype=torch.float64))
    assert record.real == pytest.approx(2.0)
    assert record.estimated == pytest.approx(0.9 * (0.02 + 2))


@pytest.mark.parametrize(("topology", "decay"), CONNECTED)
@settings(max_examples=8)
@given(seed=st.integers(0, 1000), sync=st.sampled_from([0, 3]))
def test_lemma_2_conclusion_holds_for_c_prime_of_n_times_the_mixing_constant(topology, decay, seed, sync):
    """Enough: C' = N C where half the L1 distance of two rows of W(t-1)...W(k) is at most C lambda^(t-k), C >= 1."""
    n, d = topology.nodes, 3
    bound = dpps.Paper(n * mixing(topology, decay, dobrushin), decay, recursion="node")
    protocol = dpps.DPPS(
        topology,
        dpps.Laplace(1.0, 0.001),
        bound,
        sync_every=sync,
        noise=dpps.Seeded(seed),
        watch={"real": dpps.Oracle()},
    )
    state = protocol.start(rows(n, d, seed))
    rng = np.random.default_rng(seed)
    for t in range(12):  # a heavy tail: now and then one node moves far more than the others
        heavy = torch.from_numpy(rng.pareto(0.7, (n, 1)))
        record = protocol.step(state, rows(n, d, seed + t) * heavy)
        assert record.real <= record.estimated * SLACK


# Assumptions 2 and 4, and what Theorem 2 asks of gamma_n


def test_assumption_2d_says_that_the_clip_never_acts():
    """At s_1 = s_2 its right side is 0 for every L_sc, so the clipped gradient must equal the gradient."""
    gradient = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    assert (gradient - clip_rows(gradient, 5.0)).norm() > 0, "||g||_1 = 7 is clipped to 5: no L_sc will do"
    assert torch.equal(gradient, clip_rows(gradient, 7.0))


def estimates(noise_rate, rounds, kick_every_round, d=2000):
    protocol = dpps.DPPS(
        dpps.Exponential(4), dpps.Laplace(1.0, noise_rate), dpps.Paper(0.8, 0.6), noise=dpps.Seeded(3)
    )
    state = protocol.start(torch.zeros(4, d, dtype=torch.float64))
    kick = torch.full((4, d), 1 / d, dtype=torch.float64)
    return [
        protocol.step(state, kick if t == 0 or kick_every_round else None).estimated for t in range(rounds)
    ]


def test_assumption_4_is_at_odds_with_remark_1_the_estimate_grows_by_a_known_factor():
    """lambda (1 + 2 C' gamma_n d_s / b) a round: above 1 no constant S is above all S(t)."""
    factor = 0.6 * (1 + 2 * 0.8 * 0.001 * 2000 / 1.0)
    found = np.array(estimates(0.001, 25, kick_every_round=False))
    assert factor == pytest.approx(2.52)
    assert np.median(found[1:] / found[:-1]) == pytest.approx(factor, rel=0.05)
    assert found[-1] > 1e8 * found[0]


def test_assumption_4_holds_on_average_while_that_factor_is_below_1():
    factor = 0.6 * (1 + 2 * 0.8 * 0.0001 * 2000 / 1.0)
    limit = 2 * 0.8 / (1 - factor)  # fixed point of S = factor S + 2 C' ||eps||_1
    found = np.array(estimates(0.0001, 60, kick_every_round=True))
    assert factor < 1
    assert found[-20:].mean() == pytest.approx(limit, rel=0.1)


def test_theorem_2_asks_for_a_noise_rate_that_makes_epsilon_of_a_round_grow_with_t():
    def epsilon(rounds):
        rates = convergence.theorem_rates(rounds)
        protocol = dpps.DPPS(dpps.Ring(3), dpps.Laplace(5.0, rates.gamma_n), Constant(1.0))
        return protocol.step(protocol.start(torch.zeros(3, 2))).epsilon

    assert epsilon(1000) == pytest.approx(5.0 * 1000 / 4)
    assert epsilon(100_000) == pytest.approx(100 * epsilon(1000))


# Lemma 3


@pytest.mark.parametrize("topology", [dpps.DOut(5, 3), dpps.Exponential(5), column_stochastic(5)])
def test_lemma_3_the_mean_moves_by_mean_noise_and_mean_perturbation(topology):
    """Columns that sum to 1 are enough; Definition 1 asks for rows too."""
    noise = Recorder(2)
    protocol = dpps.DPPS(topology, dpps.Laplace(1.0, 0.2), Unclipped(1.0, start_distance=1000.0), noise=noise)
    state = protocol.start(rows(5, 4, 0))
    for t in range(10):
        before, eps = state.s.mean(0), rows(5, 4, t)
        protocol.step(state, eps)
        torch.testing.assert_close(state.s.mean(0), before + noise.added.mean(0) + eps.mean(0))


def test_lemma_3_needs_columns_that_sum_to_1():
    with pytest.raises(UsageError, match="column"):
        dpps.Static(column_stochastic(5).weights(0).dense().T)


def test_lemma_3_in_partpsp():
    torch.manual_seed(0)
    noise = Recorder(4)
    sets = [TensorDataset(torch.randn(12, 6), torch.randint(0, 3, (12,))) for _ in range(4)]
    unit = dpps.NodeSwap(budget=5.0, noise_rate=0.01, sensitivity=dpps.Paper(0.8, 0.6), clip=1.0)
    model = dpps.models.MLP((6, 4, 3))
    learner = dpps.Run(
        dpps.PartPSP(model, ["layer1"], batch_size=4),
        sets,
        topology=dpps.DOut(4, 2),
        privacy=unit,
        noise=noise,
    ).start(epochs=2)
    for _ in range(6):
        before = learner.shared
        learner.step()
        moved = noise.added.mean(0) + noise.perturbation.mean(0)
        torch.testing.assert_close(learner.shared, before + moved)
        assert float(noise.perturbation.abs().sum(1).max()) <= 0.1 * 1.0 * (1 + 1e-5)


def test_real_sensitivity_is_what_definition_5_asks_for():
    x = rows(5, 3, 0)
    pairs = itertools.combinations(x.unbind(), 2)
    assert real_sensitivity(x) == pytest.approx(max(float((a - b).abs().sum()) for a, b in pairs))
