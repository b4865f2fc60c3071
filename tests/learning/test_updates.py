"""Updates of a round: clipping, local steps, and the noise on local parameters."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpps
from dpps.learning import Partition, clip_rows, into_ball
from tests.support.learning import tiny, toy_data, train


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
    learner = dpps.Run(
        dpps.PartPSP(model, ["0"], batch_size=10, lr_shared=0.5, lr_local=0.25),
        data,
        topology=dpps.Complete(3),
        privacy=dpps.Record(noise_multiplier=2.0),
        seed=0,
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
    run = dpps.Run(
        dpps.PartPSP(tiny(), "all", batch_size=5, lr_shared=1.0),
        [many, *data[1:]],
        topology=dpps.Ring(3),
        privacy=dpps.Record(noise_multiplier=1.0, clip=0.01),
        declared_sizes=40,
        seed=0,
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
    learner = dpps.Run(
        dpps.PartPSP(tiny(), ["layer1"], batch_size=300),
        toy_data(3, n=600),
        topology=dpps.Ring(3),
        privacy=dpps.Record(noise_multiplier=2.0),
        seed=1,
    ).start(epochs=2)
    for _ in range(3):
        learner.step()
        assert (learner.state.shared.s.dtype, learner.state.local.dtype) == (torch.float32, torch.float32)


def test_reduced_precision_around_a_run_does_not_reach_clipped_sums():
    """In bfloat16 a sum of 100 clips is rounded by a quarter of one, so one example more could move it by more than its clip."""

    def perturbation():
        torch.manual_seed(0)
        run = dpps.Run(
            dpps.PartPSP(tiny(), "all", lr_shared=1.0, batch_size=20),
            toy_data(2),
            topology=dpps.Ring(2),
            privacy=dpps.Record(noise_multiplier=1.0, delta=1e-3, clip=1e-2),
            seed=0,
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
