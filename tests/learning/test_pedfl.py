"""PEDFL is D-PSGD with noise: the gradient at the old point is added after mixing, and leaves with the next message."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

import dpps
from dpps.errors import UsageError
from tests.support.learning import tiny, toy_data


def make(unit=None, **options):
    algorithm = dpps.PEDFL(tiny(), "all", batch_size=10, lr_shared=0.2)
    return dpps.Run(algorithm, toy_data(3), topology=dpps.Ring(3), privacy=unit, seed=0, **options)


def test_without_noise_it_is_decentralised_parallel_sgd():
    run = make().start(epochs=1)
    weights = torch.from_numpy(run.topology.weights(0).dense())
    partition = run.algorithm.partition
    x = partition.initial()[0].repeat(3, 1)
    for _ in range(3):
        batch, labels, _ = run.nodes.updates.sampler.batch(run.state.round)
        x.requires_grad_()
        for i in range(3):
            named = partition.views(x[i], x[i, :0])
            F.cross_entropy(functional_call(run.algorithm.model, named, (batch[i],)), labels[i]).backward()
        gradient, x = x.grad, x.detach()
        x = (weights.to(x) @ x) - 0.2 * gradient
        run.step()
        assert torch.allclose(run.state.shared.s + run.state.kept["update"], x, atol=1e-6)


def test_calibrated_to_a_clip_the_noise_is_constant_and_the_epsilon_that_of_the_rounds():
    run = make(dpps.Contribution(clip=5.0, round_epsilon=0.5, delta=0.0)).fit(epochs=1)
    assert [log.scale for log in run.log] == pytest.approx([2 * 0.2 * 5.0 / 0.5] * 4)
    assert run.privacy.epsilon == pytest.approx(4 * 0.5)


def test_an_update_leaves_clipped_whatever_the_gradient():
    run = make(dpps.Contribution(clip=1e-3, round_epsilon=1e9, delta=0.0)).start(epochs=1)
    run.step()
    before = run.state.shared.s
    run.step()
    moved = run.state.shared.s - torch.from_numpy(run.topology.weights(0).dense()).to(before) @ before
    assert float(moved.abs().sum(1).max()) <= 0.2 * 1e-3 * 1.01


def test_the_real_distance_is_used_in_node_swap():
    run = make(dpps.NodeSwap(budget=5.0)).start(epochs=1)
    assert run.step().used == 0.0
    assert run.step().used > 0


def test_the_unit_record_is_refused():
    with pytest.raises(UsageError, match=r"PEDFL.*unit record"):
        make(dpps.Record(epsilon=1.0))


def test_the_update_that_has_not_left_yet_is_in_the_checkpoint(tmp_path):
    whole = make().fit(epochs=2)
    for log in make(folder=tmp_path / "run").rounds(epochs=2):
        if log.round == 4:
            break
    algorithm = dpps.PEDFL(tiny(), "all", batch_size=10, lr_shared=0.2)
    again = dpps.Run.open(tmp_path / "run", algorithm, toy_data(3), topology=dpps.Ring(3), seed=0).fit(
        epochs=2
    )
    assert torch.equal(again.shared, whole.shared)
