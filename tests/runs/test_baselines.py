"""The baselines are what they say: the same run without noise, and without messages."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpps
from dpps.errors import UsageError
from dpps.runs import ALONE, NO_PRIVACY, Baseline, Summary, compare, gained

NODES, EPOCHS = 4, 3


def make(privacy, shared=("0",), topology="exp", model=None, **options) -> dpps.Run:
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(6, generator=generator)
    x = torch.randn(NODES, 60, 6, generator=generator)
    labels = (x @ direction > 0).long()
    nodes = [TensorDataset(*part) for part in zip(x[:, :40], labels[:, :40], strict=True)]
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    rates = {"lr_shared": 0.5, "lr_local": 0.5, "batch_size": 10}
    algorithm = dpps.PartPSP(
        model,
        list(shared),
        **rates,
        optimizer=options.pop("optimizer", None),
        averaging=options.pop("averaging", 0),
    )
    held_out = list(zip(x[:, 40:], labels[:, 40:], strict=True))
    tests = (x[:, 40:].reshape(-1, 6), labels[:, 40:].flatten())
    return dpps.Run(
        algorithm, nodes, topology=topology, privacy=privacy, test=tests, held_out=held_out, seed=0, **options
    )


def baseline(run: dpps.Run, alone: bool) -> Baseline:
    return Baseline(run, alone=alone).fit(EPOCHS)


def test_without_privacy_it_is_the_run_itself():
    run = make(None, sync_every=3).fit(EPOCHS)
    found = baseline(run, alone=False)
    assert torch.equal(found.shared, run.shared)
    assert torch.equal(found.local, run.local)
    assert found.accuracies() == {
        "test_accuracy": run.accuracy,
        "accuracy_by_epoch": run.accuracy_by_epoch,
        "accuracy_by_node": run.accuracy_by_node,
        "own_accuracy": run.own_accuracy,
        "own_accuracy_by_node": run.own_accuracy_by_node,
    }


@pytest.mark.parametrize(
    ("quiet", "loud"),
    [
        (dpps.Record(noise_multiplier=1e-6), dpps.Record(noise_multiplier=5.0)),
        (
            dpps.Record(noise_multiplier=1e-6, trust=dpps.Pairs(1)),
            dpps.Record(noise_multiplier=5.0, trust=dpps.Pairs(1)),
        ),
        (dpps.Contribution(round_epsilon=1e7, clip=0.5), dpps.Contribution(round_epsilon=1.0, clip=0.5)),
        (
            dpps.NodeSwap(budget=5, noise_rate=0.0, clip=0.5),
            dpps.NodeSwap(budget=5, noise_rate=1.0, clip=0.5),
        ),
    ],
)
def test_it_is_the_private_run_but_for_its_noise(quiet, loud):
    """Clipping, sampling and rates stay: the limit of ever less noise."""
    limit = make(quiet, optimizer=dpps.learning.released.Momentum(0.5)).fit(EPOCHS)
    run = make(loud, optimizer=dpps.learning.released.Momentum(0.5)).fit(EPOCHS)
    found = baseline(run, alone=False)
    torch.testing.assert_close(found.shared, limit.shared, rtol=0, atol=1e-3)
    torch.testing.assert_close(found.local, limit.local, rtol=0, atol=1e-3)
    assert not torch.allclose(found.shared, run.shared, atol=1e-2)
    assert (found.privacy.unit, found.privacy.epsilon) == ("none", None)


@pytest.mark.parametrize("averaging", [0, 0.5])
def test_alone_is_training_with_nothing_shared(averaging):
    run = make(None, ("0", "2"), averaging=averaging).fit(EPOCHS)
    found = baseline(run, alone=True)
    rows = found.nodes.shared_rows(found.state)
    assert not torch.allclose(rows[0], rows[1])
    if not averaging:
        nothing = make(None, shared=()).fit(EPOCHS)
        assert found.accuracies()["own_accuracy_by_node"] == pytest.approx(nothing.own_accuracy_by_node)
        assert found.accuracies()["accuracy_by_node"] == pytest.approx(nothing.accuracy_by_node)
    assert "accuracy_by_epoch" not in found.accuracies()


@pytest.mark.parametrize(
    "unit",
    [
        dpps.Record(epsilon=3),
        dpps.Contribution(epsilon=8),
        dpps.NodeSwap(),
        dpps.NodeSwap(sensitivity=dpps.WorstCase()),
    ],
)
def test_alone_in_every_unit_does_not_depend_on_the_others(unit):
    run = make(unit).fit(EPOCHS)
    first = baseline(run, alone=True)
    for dataset in run._data[1:]:
        dataset.tensors[1].fill_(0)
    again = baseline(run, alone=True)
    rows = [b.nodes.shared_rows(b.state) for b in (first, again)]
    assert torch.equal(rows[0][0], rows[1][0])
    assert torch.equal(first.local[0], again.local[0])
    assert not torch.equal(rows[0][1], rows[1][1])


def test_absent_nodes_stay_absent_and_buffers_are_their_own():
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    network = dpps.Exponential(NODES).with_dropouts({k: [2] for k in range(100)})
    run = make(None, model=model, topology=network).fit(EPOCHS)
    found = baseline(run, alone=True)
    rows = found.nodes.shared_rows(found.state)
    start = run.algorithm.partition.initial()[0]
    assert torch.equal(rows[2], start)
    assert not torch.equal(rows[0], start)


def test_a_request_to_stop_is_heard():
    run = make(None).fit(EPOCHS)
    found = Baseline(run, alone=True, callbacks=((lambda run, log: run.stop()),))
    assert found.fit(EPOCHS).stopped
    assert found.state.round == 1


def summary_of(run: dpps.Run) -> Summary:
    together, alone = (baseline(run, alone=each) for each in (False, True))
    accuracies = {NO_PRIVACY: together.accuracies(), ALONE: alone.accuracies()}
    return replace(run.summary, baselines=accuracies, comparisons=compare(run, together, alone))


def test_changes_are_those_of_the_accuracies_beside_them():
    found = summary_of(make(dpps.Record(noise_multiplier=5.0)).fit(EPOCHS))
    for which, mean, by_node in (
        ("test", "test_accuracy", "accuracy_by_node"),
        ("own", "own_accuracy", "own_accuracy_by_node"),
    ):
        together, alone, compared = *found.baselines.values(), found.comparisons[which]
        own = getattr(found, mean)
        assert 100 * compared["joining"].mean.value == pytest.approx(together[mean] - alone[mean])
        assert 100 * compared["privacy"].mean.value == pytest.approx(own - together[mean])
        assert 100 * compared["both"].mean.value == pytest.approx(own - alone[mean])
        nodes = [100 * change.value for change in compared["both"].by_node]
        expected = [a - b for a, b in zip(getattr(found, by_node), alone[by_node], strict=True)]
        assert nodes == (pytest.approx(expected) if which == "own" else [])


def test_lines_name_every_node_and_its_number_of_examples():
    found = summary_of(make(dpps.Record(noise_multiplier=5.0)).fit(EPOCHS))
    lines = [words for _, words in gained(found)]
    for k in range(NODES):
        assert any(f"node {k}, 20 examples" in line for line in lines)
    assert gained(replace(found, comparisons={})) == []
    small = replace(found, comparisons={"test": found.comparisons["test"]})
    assert not any("node 0" in words for _, words in gained(small))


def test_refused_where_messages_leave():
    run = make(None).fit(EPOCHS)
    run.deployment = object()  # any deployment other than `Simulation`
    with pytest.raises(UsageError, match=r"deployment=Simulation\(\)"):
        Baseline(run, alone=False)


def test_rates_that_the_run_chose_itself_are_the_baselines_too():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 60, 6, generator=generator)
    nodes = [(part, (part[:, 0] > 0).long()) for part in x]
    algorithm = dpps.PartPSP(nn.Linear(6, 2), "all")
    run = dpps.Run(algorithm, nodes, topology="exp", privacy=dpps.Record(epsilon=3), seed=0).fit()
    found = Baseline(run, alone=False).fit()
    assert run.epochs == found.epochs
    assert run.plan == found.plan
    assert run.plan.count == 120
    assert run.plan.lr_shared != 0.1
