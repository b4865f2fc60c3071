"""The nodes held here: absences, failed rounds, rates, and what is refused before anything is sent."""

from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import dpps
from dpps.errors import RunError, UsageError
from dpps.learning import Algorithm, Step
from tests.support.learning import tiny, toy_data, train


def test_an_absent_node_keeps_statistics_and_momentum():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    learner = dpps.Run(
        dpps.PartPSP(
            model, ["0"], batch_size=10, local_optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)
        ),
        toy_data(4),
        topology=dpps.Exponential(4).with_dropouts(0.5, seed=1),
        seed=0,
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
    learner = dpps.Run(
        dpps.PartPSP(tiny(), ["layer1"], batch_size=10, local_steps=steps),
        toy_data(4),
        topology=dpps.Exponential(4),
        seed=0,
    ).start(epochs=20)
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
    sent = []

    class Watched(dpps.Stacked):
        def mix(self, weights, *xs):
            sent.append(xs)
            return super().mix(weights, *xs)

    run = dpps.Run(
        dpps.PartPSP(tiny(), [], batch_size=10, lr_local=0.5),
        toy_data(3),
        topology=dpps.Ring(3),
        privacy=dpps.Contribution(clip=1.0, epsilon=1.0),
        deployment=dpps.Simulation(Watched(3)),
        sync_every=2,
        test=toy_data(1, seed=9)[0],
    ).fit(epochs=10)
    assert sent == []
    assert sum(log.bytes for log in run.log) == 0
    assert run.ledger.messages == 0
    assert run.accuracy > 50


def test_rates_decay_at_the_start_of_the_kth_epoch_and_restart_the_counters():
    run = dpps.Run(
        dpps.PartPSP(tiny(), ["layer1"], lr_step=2, batch_size=10),
        toy_data(4),
        topology=dpps.Exponential(4),
        privacy=dpps.NodeSwap(budget=5, sensitivity=dpps.Paper(0.8, 0.5)),
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
