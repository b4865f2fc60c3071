"""DPPS rounds against the NumPy oracle, the invariants of push-sum, and every bad input."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dpps
import oracle
from dpps.errors import RunError, UsageError
from dpps.noise import Scripted

TOPOLOGIES = st.sampled_from(
    [
        lambda n: dpps.DOut(n, min(n, 3)),
        dpps.Exponential,
        dpps.Ring,
        dpps.Complete,
        lambda n: dpps.Base(n, 1),
        lambda n: dpps.OnePeerRandom(n, seed=3),
    ]
)


def column_stochastic(n: int) -> dpps.Topology:
    """Node 0 keeps less than it should: columns sum to 1, rows do not."""
    w = dpps.Ring(n).weights(0).dense()
    w = 0.5 * w + 0.5 * np.eye(n)
    w[:, 0] = 0
    w[0, 0], w[1, 0] = 0.3, 0.7
    return dpps.Static(w)


@given(
    TOPOLOGIES,
    st.integers(2, 7),
    st.integers(1, 5),
    st.integers(0, 4),
    st.booleans(),
    st.sampled_from(["network", "node"]),
    st.integers(0, 2**32),
)
def test_equals_the_oracle(make, n, d, sync_every, common_start, recursion, seed):
    rng = np.random.default_rng(seed)
    topology, rounds = make(n), 9
    s0 = np.tile(rng.normal(size=d), (n, 1)) if common_start else rng.normal(size=(n, d))
    eps = rng.normal(size=(rounds, n, d))
    noise = rng.laplace(size=(rounds, n, d))
    settings = {"budget": 2.0, "noise_rate": 0.3}
    protocol = dpps.DPPS(
        topology,
        dpps.Laplace(**settings),
        dpps.Paper(0.8, 0.6, recursion),
        sync_every=sync_every,
        noise=Scripted(noise),
        track_real=True,
    )
    state = protocol.start(torch.from_numpy(s0))
    judge = oracle.dpps(
        s0,
        lambda t: topology.weights(t).dense(),
        eps,
        noise,
        c_prime=0.8,
        decay=0.6,
        sync_every=sync_every,
        recursion=recursion,
        common_start=common_start,
        **settings,
    )
    for t, (s, a, y, sensitivity) in enumerate(judge):
        half = state.s.numpy() + eps[t]
        record = protocol.step(state, torch.from_numpy(eps[t]))
        np.testing.assert_allclose(state.s.numpy(), s, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(state.a.numpy(), a, rtol=1e-12)
        np.testing.assert_allclose(state.y.numpy(), y, rtol=1e-9, atol=1e-12)
        assert record.estimated == pytest.approx(sensitivity)
        assert record.real == pytest.approx(
            max(np.abs(half[i] - half[j]).sum() for i in range(n) for j in range(n))
        )
        assert record.epsilon == pytest.approx(2.0 / 0.3)
        assert record.synchronised == (sync_every > 0 and (t + 1) % sync_every == 0)


def test_column_stochastic_weights_equal_the_oracle_and_a_sums_to_n():
    n, rounds, rng = 5, 12, np.random.default_rng(0)
    topology = column_stochastic(n)
    s0, eps = rng.normal(size=(n, 3)), np.zeros((rounds, n, 3))
    protocol = dpps.DPPS(topology, dpps.NoNoise())
    state = protocol.start(torch.from_numpy(s0))
    judge = oracle.dpps(
        s0, lambda t: topology.weights(t).dense(), eps, eps, budget=1, noise_rate=0, c_prime=1, decay=0.5
    )
    for s, a, y, _ in judge:
        protocol.step(state)
        np.testing.assert_allclose(state.s.numpy(), s)
        np.testing.assert_allclose(state.a.numpy(), a)
        np.testing.assert_allclose(state.y.numpy(), y)
        assert state.a.sum().item() == pytest.approx(n)
    assert not np.allclose(state.a.numpy(), 1)
    for _ in range(300):
        protocol.step(state)
    np.testing.assert_allclose(
        state.y.numpy(), np.tile(s0.mean(0), (n, 1)), rtol=1e-6
    )  # push-sum corrects what W distorts


@given(TOPOLOGIES, st.integers(2, 9), st.integers(0, 5))
def test_a_stays_one_and_the_sum_changes_only_by_perturbation_and_noise(make, n, sync_every):
    rng = np.random.default_rng(1)
    protocol = dpps.DPPS(make(n), dpps.NoNoise(), sync_every=sync_every)
    state = protocol.start(torch.from_numpy(rng.normal(size=(n, 4))))
    for _ in range(10):
        eps = torch.from_numpy(rng.normal(size=(n, 4)))
        before = state.s.sum(0)
        protocol.step(state, eps)
        torch.testing.assert_close(state.s.sum(0), before + eps.sum(0))
        torch.testing.assert_close(state.a, torch.ones(n, dtype=torch.float64))


def test_sum_with_noise_changes_by_the_noise():
    n, d = 6, 50
    noise = np.random.default_rng(2).laplace(size=(1, n, d))
    protocol = dpps.DPPS(
        dpps.Exponential(n), dpps.Laplace(1.0), dpps.Bounded(distance=1.0), noise=Scripted(noise)
    )
    state = protocol.start(torch.zeros(n, d, dtype=torch.float64))
    protocol.step(state)
    np.testing.assert_allclose(state.s.sum(0).numpy(), noise[0].sum(0))


@pytest.mark.parametrize("topology", [dpps.Complete(7), dpps.DOut(7, 7)])
def test_weights_one_over_n_give_the_exact_average(topology):
    values = torch.randn(7, 5, dtype=torch.float64)
    protocol = dpps.DPPS(topology, dpps.NoNoise())
    state = protocol.start(values)
    protocol.step(state)
    torch.testing.assert_close(state.y, values.mean(0).expand(7, 5))


@pytest.mark.parametrize(
    ("topology", "rounds"), [(dpps.Exponential(16), 4), (dpps.Base(12, 1), None), (dpps.Base(7, 2), None)]
)
def test_finite_time_exact_average(topology, rounds):
    rounds = rounds or topology.period
    values = torch.randn(topology.nodes, 3, dtype=torch.float64)
    protocol = dpps.DPPS(topology, dpps.NoNoise())
    state = protocol.start(values)
    for _ in range(rounds):
        protocol.step(state)
    torch.testing.assert_close(state.y, values.mean(0).expand_as(values), rtol=1e-12, atol=1e-12)


def test_zero_noise_rate_is_plain_push_sum():
    eps = torch.randn(20, 6, 8)
    runs = []
    for mechanism, sensitivity in (
        (dpps.Laplace(5, noise_rate=0), dpps.Paper(0.8, 0.5)),
        (dpps.NoNoise(), None),
    ):
        protocol = dpps.DPPS(dpps.DOut(6, 2), mechanism, sensitivity, sync_every=4)
        state = protocol.start(torch.zeros(6, 8))
        for e in eps:
            protocol.step(state, e)
        runs.append(state.s)
    assert torch.equal(*runs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_after_a_synchronisation_all_rows_are_bit_equal_in_every_type(dtype):
    protocol = dpps.DPPS(
        dpps.Exponential(10), dpps.Laplace(5, 1e-3), dpps.Paper(0.8, 0.5), sync_every=3, noise=dpps.Seeded(1)
    )
    state = protocol.start(torch.zeros(10, 130, dtype=dtype))
    for t in range(9):
        record = protocol.step(state, torch.randn(10, 130).to(dtype) / 100)
        equal = bool((state.s == state.s[0]).all())
        assert equal == record.synchronised == ((t + 1) % 3 == 0)
        assert state.s.dtype == dtype


def test_rows_may_come_in_any_memory_order():
    values = torch.randn(5, 6).T.contiguous().T  # column-major
    eps = torch.randn(6, 5).T
    results = []
    for v, e in ((values, eps), (values.contiguous(), eps.contiguous())):
        protocol = dpps.DPPS(
            dpps.Ring(5), dpps.Laplace(1), dpps.Bounded(1.0, start_distance=100.0), noise=dpps.Seeded(0)
        )
        state = protocol.start(v)
        protocol.step(state, e)
        results.append(state.s)
    assert torch.equal(*results)


def test_permuting_the_nodes_of_a_complete_graph_permutes_nothing_but_rounding():
    values = torch.randn(6, 4, dtype=torch.float64)
    out = []
    for order in (torch.arange(6), torch.randperm(6, generator=torch.Generator().manual_seed(1))):
        protocol = dpps.DPPS(dpps.Complete(6), dpps.NoNoise())
        state = protocol.start(values[order])
        protocol.step(state)
        out.append(state.s)
    torch.testing.assert_close(*out)


def test_seeded_noise_is_keyed_by_node_and_round_and_repeats():
    def run(seed):
        protocol = dpps.DPPS(dpps.Complete(4), dpps.Laplace(1), dpps.Bounded(1.0), noise=dpps.Seeded(seed))
        state = protocol.start(torch.zeros(4, 40))
        protocol.step(state)
        return state.s

    assert torch.equal(run(7), run(7))
    assert not torch.equal(run(7), run(8))
    assert not torch.equal(run(None), run(None))


# Absent nodes


def test_an_absent_node_keeps_its_row_and_applies_no_perturbation():
    topology = dpps.Exponential(6).with_dropouts({1: [2], 2: [2]})
    protocol = dpps.DPPS(
        topology, dpps.Laplace(1), dpps.Bounded(1.0, start_distance=100.0), sync_every=3, noise=dpps.Seeded(0)
    )
    state = protocol.start(torch.randn(6, 9))
    protocol.step(state, torch.ones(6, 9))
    before = state.s[2].clone()
    for _ in range(2):  # the second of these rounds synchronises those present
        record = protocol.step(state, torch.ones(6, 9))
        assert torch.equal(state.s[2], before)
        assert not record.synchronised
    assert bool((state.s[[0, 1, 3, 4, 5]] == state.s[0]).all())
    protocol.step(state, torch.ones(6, 9))
    assert not torch.equal(state.s[2], before)


def test_private_start_values_need_everybody_in_round_0_and_a_true_bound():
    bound = dpps.Bounded(distance=0, clip=0, start_distance=1.0)
    away = dpps.Exponential(4).with_dropouts({0: [2]})
    with pytest.raises(UsageError, match="away in round 0"):
        dpps.DPPS(away, dpps.Laplace(1), bound).start(torch.rand(4, 1))
    with pytest.raises(UsageError, match="more than start_distance 1"):
        dpps.DPPS(dpps.Exponential(4), dpps.Laplace(1), bound).start(
            torch.tensor([[0.0], [5.0], [0.0], [0.0]])
        )


# A round is a transaction


class Fails(dpps.Stacked):
    def mix(self, weights, *xs):
        raise RuntimeError("the network is down")


def test_a_failing_round_leaves_the_state_as_it_was():
    protocol = dpps.DPPS(dpps.Ring(4), dpps.Laplace(1, 1e-3), dpps.Paper(0.8, 0.5), fabric=Fails(4))
    state = protocol.start(torch.zeros(4, 3))
    with pytest.raises(RuntimeError, match="network is down"):
        protocol.step(state, torch.ones(4, 3))
    assert (state.round, state.clock) == (0, 0)
    assert torch.equal(state.s, torch.zeros(4, 3))
    assert torch.equal(state.memory["carried"], torch.zeros(4, dtype=torch.float64))


class Scribe:
    def __init__(self):
        self.lines = []

    def charge(self, **line):
        self.lines.append(line)


def test_the_ledger_is_charged_before_anything_leaves():
    scribe = Scribe()
    protocol = dpps.DPPS(dpps.Ring(4), dpps.Laplace(1), dpps.Bounded(1.0), fabric=Fails(4), ledger=scribe)
    state = protocol.start(torch.zeros(4, 3))
    with pytest.raises(RuntimeError, match="network is down"):
        protocol.step(state)
    assert [line["round"] for line in scribe.lines] == [0]


def test_a_refusing_ledger_keeps_the_message_from_leaving():
    class Refuses:
        def charge(self, **_):
            raise RunError("over budget")

    sent = []

    class Watched(dpps.Stacked):
        def mix(self, weights, *xs):
            sent.append(xs)
            return super().mix(weights, *xs)

    protocol = dpps.DPPS(
        dpps.Ring(4), dpps.Laplace(1), dpps.Bounded(1.0), fabric=Watched(4), ledger=Refuses()
    )
    state = protocol.start(torch.zeros(4, 3))
    with pytest.raises(RunError, match="over budget"):
        protocol.step(state)
    assert sent == []
    assert state.round == 0


def test_nothing_unnoised_reaches_the_fabric():
    """Every coordinate of every message differs from the row, by noise that differs from row to row and round to round."""
    seen = []

    class Watched(dpps.Stacked):
        def mix(self, weights, *xs):
            seen.append(xs[0].clone())
            return super().mix(weights, *xs)

    protocol = dpps.DPPS(
        dpps.Ring(4), dpps.Laplace(1), dpps.Bounded(1.0, clip=0.5), fabric=Watched(4), noise=dpps.Seeded(0)
    )
    state = protocol.start(torch.zeros(4, 500))
    noises = []
    for _ in range(3):
        before = state.s.clone()
        protocol.step(state)
        noises.append(seen[-1] - before)
    noise = torch.stack(noises)
    assert bool((noise != 0).all())
    assert len(torch.unique(noise)) == pytest.approx(noise.numel(), rel=0.01)


def test_when_only_the_start_is_private_later_rounds_are_free():
    scribe = Scribe()
    bound = dpps.Bounded(distance=0, clip=0, start_distance=10.0)
    protocol = dpps.DPPS(
        dpps.Exponential(8), dpps.Laplace(budget=2.0), bound, noise=dpps.Seeded(0), ledger=scribe
    )
    state = protocol.start(torch.rand(8, 3, dtype=torch.float64))
    records = [
        protocol.step(state, torch.ones(8, 3)) for _ in range(4)
    ]  # perturbations are clipped to nothing
    assert [r.epsilon for r in records] == [2.0, 0, 0, 0]
    assert [line["round"] for line in scribe.lines] == [0]
    assert float((state.y - state.y[0]).abs().max()) < 1e-12
    with pytest.raises(UsageError, match="clip must be 0"):
        dpps.Bounded(distance=0, clip=1.0)


# Bad input


def test_bad_arguments_name_the_value_and_the_remedy():
    ring = dpps.Ring(4)
    cases = [
        (lambda: dpps.Laplace(0), "budget is 0"),
        (lambda: dpps.Laplace(-1), "budget is -1"),
        (lambda: dpps.Laplace(1, -0.1), "noise rate is -0.1"),
        (lambda: dpps.Gaussian(0), "noise multiplier is 0"),
        (lambda: dpps.Paper(0, 0.5), "c_prime is 0"),
        (lambda: dpps.Paper(1, 1.0), "decay is 1.0"),
        (lambda: dpps.Paper(1, 0.0), "decay is 0.0"),
        (lambda: dpps.Paper(1, 0.5, "net"), "recursion is 'net'"),
        (lambda: dpps.Bounded(-1), "distance is -1"),
        (lambda: dpps.Ring(1), "1"),
        (lambda: dpps.DOut(4, 5), "5"),
        (lambda: dpps.DOut(4, 0), "0"),
        (lambda: dpps.DPPS(ring, dpps.Laplace(1)), "needs a sensitivity"),
        (lambda: dpps.DPPS(ring, sync_every=-1), "sync_every is -1"),
        (lambda: dpps.DPPS(ring, fabric=dpps.Stacked(5)), "5 nodes"),
        (lambda: dpps.DPPS(ring, dpps.Gaussian(1), dpps.Paper(1, 0.5)), "L2 norm"),
        (lambda: dpps.DPPS(column_stochastic(4), dpps.Laplace(1), dpps.Paper(1, 0.5)), "doubly stochastic"),
        (lambda: dpps.DPPS(ring).start(torch.zeros(3, 2)), r"\(3, 2\)"),
        (lambda: dpps.DPPS(ring).start(torch.zeros(4, 2, dtype=torch.int64)), "int64"),
        (lambda: dpps.DPPS(ring).start(torch.full((4, 2), math.nan)), "node 0, 1, 2, 3"),
        (lambda: dpps.DPPS(ring, dpps.Laplace(1), dpps.Bounded(1.0)).start(torch.eye(4)), "start_distance"),
    ]
    for call, message in cases:
        with pytest.raises(UsageError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_perturbation_is_refused_and_costs_nothing(value):
    protocol = dpps.DPPS(dpps.Ring(4), dpps.Laplace(1), dpps.Bounded(1.0))
    state = protocol.start(torch.zeros(4, 3))
    protocol.step(state)
    before = state.s.clone()
    eps = torch.zeros(4, 3)
    eps[2, 1] = value
    with pytest.raises(UsageError, match="node 2 in round 1"):
        protocol.step(state, eps)
    with pytest.raises(UsageError, match=r"\(4, 2\)"):
        protocol.step(state, torch.zeros(4, 2))
    assert torch.equal(state.s, before)
    assert state.round == 1


def test_a_diverging_sensitivity_says_why_and_what_to_do():
    protocol = dpps.DPPS(dpps.Ring(4), dpps.Laplace(1.0, 1.0), dpps.Paper(2.0, 0.9), noise=dpps.Seeded(0))
    state = protocol.start(torch.zeros(4, 1000, dtype=torch.float64))
    growth = 0.9 * (1 + 2 * 2.0 * 1000)

    def many_rounds():
        for _ in range(200):
            protocol.step(state, torch.ones(4, 1000))

    message = f"= {growth:.4g} a round.*synchronise more often.*share fewer.*larger budget"
    with pytest.raises(RunError, match=message):
        many_rounds()
    assert torch.isfinite(state.s).all()


def test_distributed_like_fabric_refuses_what_needs_everybodys_rows():
    class Elsewhere(dpps.Stacked):
        simulation = False

    ring = dpps.Ring(4)
    with pytest.raises(UsageError, match="simulation only"):
        dpps.DPPS(ring, dpps.Laplace(1), dpps.Oracle(), fabric=Elsewhere(4))
    with pytest.raises(UsageError, match="simulation only"):
        dpps.DPPS(ring, track_real=True, fabric=Elsewhere(4))
    with pytest.raises(UsageError, match="common_start"):
        dpps.DPPS(ring, fabric=Elsewhere(4)).start(torch.zeros(4, 2))


# What a user plugs in


def test_a_users_own_sensitivity_and_mechanism():
    class Constant(dpps.Sensitivity):
        def estimate(self, memory, look):
            return 3.0

    class Triangular(dpps.Mechanism):
        name, norm = "triangular", 1

        def scale(self, sensitivity):
            return 2.0 * sensitivity

        def draw(self, stream, out):
            out[...] = stream.random(out.shape) - stream.random(out.shape)

    protocol = dpps.DPPS(dpps.Ring(4), Triangular(), Constant(), noise=dpps.Seeded(0))
    state = protocol.start(torch.zeros(4, 1000))
    record = protocol.step(state)
    assert (record.used, record.scale, record.epsilon) == (3.0, 6.0, math.inf)
    assert 0 < float(state.s.abs().max()) <= 6.0


def test_watched_sensitivities_do_not_change_the_run():
    runs = []
    for watch in ({}, {"certified": dpps.Certified(), "real": dpps.Oracle()}):
        protocol = dpps.DPPS(
            dpps.Exponential(8),
            dpps.Laplace(5, 1e-3),
            dpps.Paper(0.8, 0.5),
            sync_every=5,
            noise=dpps.Seeded(3),
            watch=watch,
        )
        state = protocol.start(torch.zeros(8, 200))
        records = [protocol.step(state, torch.full((8, 200), 0.01)) for _ in range(7)]
        runs.append(state.s)
    assert torch.equal(*runs)
    assert all(r.watched["certified"] >= r.watched["real"] for r in records)


def test_bytes_are_rows_to_peers_plus_scalars():
    protocol = dpps.DPPS(dpps.DOut(10, 4), dpps.Laplace(1), dpps.Bounded(1.0), sync_every=2)
    state = protocol.start(torch.zeros(10, 100))
    assert protocol.step(state).bytes == 3 * (400 + 8)
    assert protocol.step(state).bytes == 2 * 9 * (400 + 8) // 10  # an all-reduce mean
