"""Rounds against the NumPy oracle, the invariants of push-sum, gossip steps, and a round as a transaction."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dpps
from dpps.errors import RunError, UsageError
from dpps.noise import Seeded
from dpps.peers import Peers
from dpps.privacy import Ledger
from tests.support import oracle
from tests.support.protocol import Scripted, Wire, column_stochastic

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
        watch={"real": dpps.Oracle()},
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
    # push-sum corrects what W distorts
    np.testing.assert_allclose(state.y.numpy(), np.tile(s0.mean(0), (n, 1)), rtol=1e-6)


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


@pytest.mark.parametrize(
    "topology",
    [dpps.Exponential(16), dpps.Base(12, 1), dpps.Base(7, 2), dpps.Complete(7), dpps.DOut(7, 7)],
    ids=repr,
)
def test_finite_time_exact_average(topology):
    values = torch.randn(topology.nodes, 3, dtype=torch.float64)
    protocol = dpps.DPPS(topology, dpps.NoNoise())
    state = protocol.start(values)
    for _ in range(topology.period):
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
            dpps.Ring(5), dpps.Laplace(1), dpps.Bounded(clip=0.5, start_distance=100.0), noise=dpps.Seeded(0)
        )
        state = protocol.start(v)
        protocol.step(state, e)
        results.append(state.s)
    assert torch.equal(*results)


def test_seeded_noise_is_keyed_by_node_and_round_and_repeats():
    def run(seed):
        protocol = dpps.DPPS(
            dpps.Complete(4), dpps.Laplace(1), dpps.Bounded(clip=0.5), noise=dpps.Seeded(seed)
        )
        state = protocol.start(torch.zeros(4, 40))
        protocol.step(state)
        return state.s

    assert torch.equal(run(7), run(7))
    assert not torch.equal(run(7), run(8))
    assert not torch.equal(run(None), run(None))


# A round is a transaction


class Fails(dpps.Stacked):
    def mix(self, weights, *xs):
        raise RuntimeError("the network is down")


def test_a_message_belongs_to_its_round():
    protocol = dpps.DPPS(dpps.Ring(4), dpps.Laplace(1), dpps.Bounded(clip=0.5))
    state = protocol.start(torch.zeros(4, 3))
    message = protocol.release(state)
    assert state.round == 0
    assert protocol.exchange(state, message).round == 0
    with pytest.raises(UsageError, match="round 0 in round 1"):
        protocol.exchange(state, message)


def test_a_failing_round_was_charged_before_anything_left_and_leaves_the_state_as_it_was():
    protocol = dpps.DPPS(dpps.Ring(4), dpps.Laplace(1, 1e-3), dpps.Paper(0.8, 0.5), fabric=Fails(4))
    state = protocol.start(torch.zeros(4, 3))
    with pytest.raises(RuntimeError, match="network is down"):
        protocol.step(state, torch.ones(4, 3))
    assert [round_ for round_, _ in protocol.ledger.history] == [0]
    assert (state.round, state.clock) == (0, 0)
    assert torch.equal(state.s, torch.zeros(4, 3))
    assert torch.equal(state.memory["carried"], torch.zeros(4, dtype=torch.float64))


def test_a_refusing_ledger_keeps_the_message_from_leaving():
    class Refuses(Ledger):
        def charge(self, release):
            raise RunError("over budget")

    wire = Wire(4)
    protocol = dpps.DPPS(
        dpps.Ring(4), dpps.Laplace(1), dpps.Bounded(clip=0.5), fabric=wire, ledger=Refuses(range(4))
    )
    state = protocol.start(torch.zeros(4, 3))
    with pytest.raises(RunError, match="over budget"):
        protocol.step(state)
    assert wire.sent == []
    assert state.round == 0


def test_noise_that_follows_the_data_has_no_total_beyond_the_plain_sum():
    def spent(sensitivity, mechanism):
        protocol = dpps.DPPS(dpps.Complete(3), mechanism, sensitivity, noise=dpps.Seeded(0), sync_every=1)
        state = protocol.start(torch.zeros(3, 2))
        for _ in range(300):
            protocol.step(state, 0.01 * torch.eye(3, 2))
        return protocol.privacy(1e-5)

    swap = spent(dpps.Certified(1e-6), dpps.Laplace(0.1))
    bounded = spent(dpps.Bounded(distance=0.04, clip=0.02), dpps.Laplace(0.1))
    assert (swap.accountant, swap.delta) == ("sum", 1e-6)
    assert swap.epsilon == pytest.approx(30.0)
    assert bounded.epsilon < 10.0  # composed: its noise is the same whatever the data
    assert spent(dpps.Oracle(), dpps.Gaussian(10.0)).epsilon == math.inf


def test_where_nodes_come_and_go_an_update_moves_y_by_what_was_released_whatever_a_is():
    """A node that has lost mass is not moved more by its noise than the others."""

    class Scaling(Wire):
        scaled = Peers.scaled

    wire = Scaling(4)
    protocol = dpps.DPPS(column_stochastic(4), dpps.Laplace(1), dpps.Bounded(clip=0.5), fabric=wire)
    state = protocol.start(torch.zeros(4, 3, dtype=torch.float64))
    for _ in range(3):
        protocol.step(state, torch.rand(4, 3))
    message = protocol.release(state, torch.rand(4, 3))
    update, before, a = message.rows - state.s, state.y.clone(), state.a.clone()
    assert float((a - 1).abs().max()) > 0.1
    protocol.exchange(state, message)
    torch.testing.assert_close(wire.sent[-1] / a[:, None], before + update)


# Several gossip steps per released message


def test_each_step_is_a_step_of_the_topology():
    values = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    many, one = (dpps.DPPS(dpps.Exponential(8), dpps.NoNoise(), mixes=m) for m in (3, 1))
    fast, slow = many.start(values), one.start(values)
    many.step(fast)
    for _ in range(3):
        one.step(slow)
    torch.testing.assert_close(fast.s, slow.s)
    torch.testing.assert_close(fast.s, values.mean(0).expand(8, 3))  # three steps reach everybody
    assert (fast.round, fast.clock) == (1, 1)


def test_noise_is_added_and_charged_once():
    noisy = [
        dpps.DPPS(dpps.Ring(4), dpps.Gaussian(1.0), dpps.Bounded(clip=0.5), noise=Seeded(3), mixes=m)
        for m in (1, 5)
    ]
    states = [p.start(torch.zeros(4, 2)) for p in noisy]
    for protocol, state in zip(noisy, states, strict=True):
        protocol.step(state)
    assert noisy[0].privacy(1e-5).epsilon == noisy[1].privacy(1e-5).epsilon
    torch.testing.assert_close(states[0].s.sum(0), states[1].s.sum(0))
    assert float(states[1].s.std(0).max()) < float(states[0].s.std(0).max())


def test_push_sum_stays_right_with_one_way_weights():
    weights = torch.tensor([[0.5, 0.0, 0.3], [0.5, 0.4, 0.0], [0.0, 0.6, 0.7]], dtype=torch.float64).numpy()
    protocol = dpps.DPPS(dpps.Static(weights), dpps.NoNoise(), mixes=4)
    state = protocol.start(torch.tensor([[1.0], [2.0], [6.0]]))
    for _ in range(30):
        protocol.step(state)
    torch.testing.assert_close(state.y, torch.full((3, 1), 3.0))


def test_a_rounds_weights_are_those_of_all_its_steps():
    """A request to stop travels on the rows: who hears of it within a round follows from all of the round's steps."""
    topology = dpps.Exponential(8)
    protocol = dpps.DPPS(topology, dpps.NoNoise(), mixes=3, sync_every=4)
    assert protocol.weights(3) is None
    expected = topology.weights(5).dense() @ topology.weights(4).dense() @ topology.weights(3).dense()
    torch.testing.assert_close(torch.from_numpy(protocol.weights(1).dense()), torch.from_numpy(expected))


# The state of a protocol: y is s over a


def test_y_is_s_itself_where_a_is_one_and_the_quotient_otherwise() -> None:
    state = dpps.DPPS(dpps.Ring(3)).start(torch.randn(3, 2))
    assert state.y is state.s
    state.a[:] = torch.tensor([0.5, 1.0, 2.0])
    torch.testing.assert_close(state.y, state.s / torch.tensor([[0.5], [1.0], [2.0]]))
