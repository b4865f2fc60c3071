"""The nodes held here: their updates, absences, failed rounds, rates, and what is refused before anything is sent."""

from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpps
from dpps.errors import RunError, UsageError
from dpps.learning import Algorithm, Partition, Step, clip_rows, into_ball
from tests.support.learning import make_run, tiny, toy_data, train
from tests.support.protocol import Wire

# The nodes held here: absences, failed rounds, rates, and what is refused before anything is sent


def test_an_absent_node_keeps_statistics_and_momentum():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    learner = make_run(
        shared=["0"],
        model=model,
        data=toy_data(4),
        local_optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        topology=dpps.Exponential(4).with_dropouts(0.5, seed=1),
    ).start(epochs=5)

    def kept(k):
        momentum = learner.nodes.updates.state().get(f"{k}.momentum_buffer")
        buffers = {n: b.clone() for n, b in learner.nodes.engine.state().items() if n.startswith(f"{k}.")}
        return buffers | {"momentum": torch.zeros(1) if momentum is None else momentum.clone()}

    seen = set()
    for _ in range(8):
        present = learner.protocol.topology.present(learner.state.shared.clock)
        before = [kept(k) for k in range(4)]
        learner.step()
        for k in range(4):
            same = all(torch.equal(v, before[k][n]) for n, v in kept(k).items())
            assert same == (not present[k])
            seen.add(bool(present[k]))
    assert seen == {True, False}


def _own_gradients(nodes, state):
    return nodes.exchange(state, -nodes.gradients(state.shared.y, state)[1])


def _of_its_own(nodes, state):
    return nodes.exchange(state, 100 * nodes.update(state).perturbation)


def _written_over(nodes, state):
    return nodes.exchange(state, nodes.update(state).perturbation.mul_(100))


def _twice(nodes, state):
    update = nodes.update(state)
    nodes.exchange(state, update.perturbation)
    return nodes.exchange(state, update.perturbation)


def _after_another(nodes, state):
    """The local step of an update is paid for with its message: a second one would be free."""
    state.local = nodes.update(state).local
    update = nodes.update(state)
    state.local = update.local
    return nodes.exchange(state, update.perturbation)


@pytest.mark.parametrize("send", [_own_gradients, _of_its_own, _written_over, _twice, _after_another])
def test_in_the_unit_record_an_algorithm_sends_what_was_clipped_and_nothing_else(send):
    """The protocol sees sums, so it could not bound what one example adds to them."""

    class Own(Algorithm):
        def step(self, nodes, state):
            return Step(send(nodes, state), torch.zeros(3))

    def run(unit):
        algorithm = Own(tiny(), "all", lr_shared=1.0, batch_size=10)
        return dpps.Run(algorithm, toy_data(3), topology=dpps.Ring(3), privacy=unit, seed=0)

    with pytest.raises(UsageError, match=r"unit record.*Nodes\.update.*unit contribution"):
        run(dpps.Record(epsilon=3.0, delta=1e-3)).fit(epochs=1)
    clipped = run(dpps.Contribution(clip=1.0, epsilon=3.0)).start(epochs=4)
    clipped.step()
    assert clipped.ledger.messages > 0


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_failed_round_leaves_local_parameters_as_they_were(steps):
    learner = make_run(data=toy_data(4), local_steps=steps, topology=dpps.Exponential(4)).start(epochs=20)
    for _ in range(3):
        learner.step()
        before = learner.state.local.clone()
        with (
            mock.patch.object(learner.protocol, "step", side_effect=RunError("lost")),
            pytest.raises(RunError),
        ):
            learner.step()
        assert torch.equal(learner.state.local, before)


def test_a_model_that_is_all_local_never_sends_a_byte():
    wire = Wire(3)
    run = make_run(
        dpps.Contribution(clip=1.0, epsilon=1.0),
        shared=[],
        lr_local=0.5,
        deployment=dpps.Simulation(wire),
        sync_every=2,
        test=toy_data(1, seed=9)[0],
    ).fit(epochs=10)
    assert wire.sent == []
    assert sum(log.bytes for log in run.log) == 0
    assert run.ledger.messages == 0
    assert run.accuracy > 50


def test_rates_decay_at_the_start_of_the_kth_epoch_and_restart_the_counters():
    run = make_run(
        dpps.NodeSwap(budget=5, sensitivity=dpps.Paper(0.8, 0.5)),
        data=toy_data(4),
        lr_step=2,
        topology=dpps.Exponential(4),
    )
    rates, clocks = [], []
    for log in run.rounds(epochs=4):
        clocks.append(run.state.shared.clock - 1)
        rates.append(log.epsilon)
    assert clocks == [0, 1, 2, 3, *range(8), 0, 1, 2, 3]
    np.testing.assert_allclose(rates, [5e3] * 4 + [5e4] * 8 + [5e5] * 4)


def test_a_nan_loss_names_node_and_round_and_sends_nothing():
    data = toy_data(3)
    data[1].tensors[0][15] = float("nan")
    with pytest.raises(RunError, match=r"loss of node 1 .*nan.*round 1"):
        train(tiny(), ["layer1"], nodes=3, data=data)


# Updates of a round: clipping, local steps, and the noise on local parameters


def test_an_infinite_clip_is_no_clip():
    runs = [
        train(tiny(), ["layer1"], dpps.NodeSwap(budget=5, sensitivity=dpps.Paper(0.8, 0.5), clip=c))
        for c in (1e30, None)
    ]
    assert torch.equal(runs[0].shared, runs[1].shared)


def test_a_small_clip_bounds_every_perturbation():
    g = torch.randn(5, 30)
    clipped = clip_rows(g, 2.0)
    assert bool((clipped.abs().sum(1) <= 2.0 + 1e-5).all())
    inside = clip_rows(g, 1e6)
    assert torch.equal(inside, g)


def test_local_steps_move_the_total_and_clip_it():
    unit = dpps.NodeSwap(budget=5, noise_rate=0.0, sensitivity=dpps.Paper(0.8, 0.5), clip=0.05)
    one, four = (train(tiny(), ["layer1"], unit, local_steps=k, epochs=1) for k in (1, 4))
    assert (len(one.log), len(four.log)) == (4, 1)
    before = Partition(tiny(), ["layer1"]).initial()[0]
    assert float((four.state.shared.s - before).abs().sum(1).max()) <= 0.3 * 0.05 + 1e-6


def test_record_noise_hits_both_parts_with_the_right_deviation():
    """Gradients clipped to next to nothing leave only noise: deviation rate x clip x multiplier / expected batch."""
    model = nn.Sequential(nn.Linear(2000, 3, bias=False), nn.Linear(3, 2000, bias=False))
    # zero inputs: zero gradients
    data = [TensorDataset(torch.zeros(50, 2000), torch.zeros(50, dtype=torch.long)) for _ in range(3)]
    learner = make_run(
        dpps.Record(noise_multiplier=2.0),
        shared=["0"],
        model=model,
        data=data,
        lr_shared=0.5,
        lr_local=0.25,
        topology=dpps.Complete(3),
    ).start(epochs=1)
    s0, l0 = learner.state.shared.s.clone(), learner.state.local.clone()
    learner.step()
    shared, local = learner.state.shared.s - s0, learner.state.local - l0
    # averaged over three nodes
    assert float(shared.std()) == pytest.approx(0.5 * 2.0 / 10 / 3**0.5, rel=0.03)
    assert float(local.std()) == pytest.approx(0.25 * 2.0 / 10, rel=0.03)
    assert abs(float(torch.corrcoef(torch.stack([shared[0], local[0]]))[0, 1])) < 0.06  # no noise used twice


def test_a_node_that_declared_too_little_sends_no_row_that_others_would_refuse():
    """Stopping because a node holds many examples would tell so."""
    data = toy_data(3)
    many = TensorDataset(data[0].tensors[0][:1].repeat(4000, 1), data[0].tensors[1][:1].repeat(4000))
    run = make_run(
        dpps.Record(noise_multiplier=1.0, clip=0.01),
        shared="all",
        data=[many, *data[1:]],
        batch_size=5,
        lr_shared=1.0,
        declared_sizes=40,
    ).start(epochs=1)
    norms = run.nodes.update(run.state).perturbation.double().norm(dim=1)
    limit = run.protocol.sensitivity.largest_perturbation(1.0)
    assert 0.99 * limit < float(norms[0]) <= limit
    assert float(norms[1:].max()) < limit / 2


def test_a_projection_moves_no_two_rows_apart():
    rows = 3 * torch.randn(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    inside = into_ball(rows, 2.0)
    apart, before = ((part[:, None] - part).norm(dim=2) for part in (inside, rows))
    assert bool((apart <= before + 1e-12).all())
    assert float(inside.norm(dim=1).max()) <= 2.0
    assert torch.equal(into_ball(rows, 1e3), rows)


def test_parameters_keep_their_type_when_sums_of_large_batches_are_double():
    learner = make_run(
        dpps.Record(noise_multiplier=2.0), data=toy_data(3, n=600), batch_size=300, seed=1
    ).start(epochs=2)
    for _ in range(3):
        learner.step()
        assert (learner.state.shared.s.dtype, learner.state.local.dtype) == (torch.float32, torch.float32)


def test_reduced_precision_around_a_run_does_not_reach_clipped_sums():
    """In bfloat16 a sum of 100 clips is rounded by a quarter of one, so one example more could move it by more than its clip."""

    def perturbation():
        torch.manual_seed(0)
        run = make_run(
            dpps.Record(noise_multiplier=1.0, delta=1e-3, clip=1e-2),
            shared="all",
            data=toy_data(2),
            lr_shared=1.0,
            batch_size=20,
            topology=dpps.Ring(2),
        ).start(epochs=1)
        return run.nodes.update(run.state).perturbation.clone()

    exact = perturbation()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            found = perturbation()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(found, exact)
