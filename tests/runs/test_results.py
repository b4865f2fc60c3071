"""What comes out of a run: metrics of every epoch, a row for every class, targets that are no classes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpps
from dpps.errors import UsageError


def examples(count, seed, classes=3):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=random)
    return x, x[:, :classes].argmax(1)


def make(folder=None, **more):
    torch.manual_seed(0)
    algorithm = dpps.PartPSP(nn.Linear(4, 3), shared="all", lr_shared=0.5, batch_size=20)
    options = {
        "topology": "ring",
        "test": examples(90, 9),
        "metrics": ["auroc", "f1"],
        "seed": 0,
        "folder": folder,
    }
    return algorithm, [examples(60, k) for k in range(3)], options | more


def start(folder=None, **more):
    algorithm, data, options = make(folder, **more)
    return dpps.Run(algorithm, data, **options)


def test_metrics_are_taken_after_every_epoch():
    run = start(held_out=[examples(20, 20 + k) for k in range(3)]).fit(epochs=3)
    assert len(run.metrics_by_epoch) == 3
    assert run.metrics_by_epoch[-1] == run.metrics_by_node == run.summary.metrics_by_node
    assert set(run.metrics_by_node) == {"test", "own"}
    first, last = (run.metrics_by_epoch[k]["test"]["auroc"] for k in (0, -1))
    assert sum(last) > sum(first)


def test_a_row_for_every_class_counts_all_nodes():
    run = start().fit(epochs=2)
    rows = run.by_class["test"]
    assert [row["class"] for row in rows] == ["0", "1", "2"]
    assert sum(row["examples"] for row in rows) == 3 * 90
    right = sum(row["recall"] * row["examples"] for row in rows)
    assert 100 * right / (3 * 90) == pytest.approx(run.accuracy)
    assert start(metrics=()).fit(epochs=1).by_class == {}


def test_metrics_survive_a_stop(tmp_path):
    whole = start(tmp_path / "whole").fit(epochs=3)
    stopped = start(tmp_path / "stopped", callbacks=[lambda run, log: run.stop() if log.round == 3 else None])
    stopped.fit(epochs=3)
    assert stopped.stopped
    algorithm, data, options = make()
    options.pop("folder")
    again = dpps.Run.open(tmp_path / "stopped", algorithm, data, **options).fit(epochs=3)
    assert again.metrics_by_epoch == whole.metrics_by_epoch


def test_targets_that_are_numbers_have_metrics_and_no_accuracy():
    torch.manual_seed(0)

    def numbers(count, seed):
        x, _ = examples(count, seed)
        return x, x.sum(1, keepdim=True)

    algorithm = dpps.PartPSP(nn.Linear(4, 1), shared="all", loss=F.mse_loss, lr_shared=0.1, batch_size=20)
    options = {"topology": "ring", "privacy": dpps.Record(epsilon=8, delta=1e-3), "seed": 0}
    options |= {
        "test": numbers(50, 9),
        "held_out": [numbers(10, 20 + k) for k in range(3)],
        "metrics": ["rmse"],
    }
    run = dpps.Run(algorithm, [numbers(60, k) for k in range(3)], **options).fit(epochs=4)
    assert run.accuracy is run.own_accuracy is None
    assert run.accuracy_by_epoch == []
    assert run.by_class == {}
    found = [epoch["test"]["rmse"][0] for epoch in run.metrics_by_epoch]
    assert found[-1] < found[0]
    with pytest.raises(UsageError, match="metrics="):
        run.evaluate()


def test_the_report_shows_metrics_and_classes(tmp_path):
    page = start().fit(epochs=3).report(tmp_path / "page.html").read_text()
    assert "auroc" in page
    assert "precision" in page
    plain = start(metrics=()).fit(epochs=3).report(tmp_path / "plain.html").read_text()
    assert "Metric" not in plain


def test_a_loss_that_calls_the_model_itself():
    def loss(model, batch):
        x, target = batch
        return F.cross_entropy(model(x), target)

    torch.manual_seed(0)
    found = []
    for chosen in (F.cross_entropy, dpps.ModelLoss(loss)):
        torch.manual_seed(0)
        algorithm = dpps.PartPSP(nn.Linear(4, 3), shared="all", loss=chosen, batch_size=20)
        data = [examples(60, k) for k in range(3)]
        found.append(dpps.Run(algorithm, data, topology="ring", seed=0).fit(epochs=2).shared)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    "unit", [None, dpps.Record(epsilon=8), dpps.Contribution(epsilon=8), dpps.NodeSwap()]
)
def test_a_loss_that_calls_the_model_may_give_a_number_per_example(unit):
    loss = dpps.ModelLoss(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"))
    x = torch.linspace(-1, 1, 60).reshape(20, 3)
    nodes = [(x, (x[:, 0] > 0).long())] * 2
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    algorithm = dpps.PartPSP(model, shared=["0"], loss=loss, batch_size=10)
    run = dpps.Run(algorithm, nodes, topology=dpps.Ring(2), privacy=unit, test=nodes[0], seed=0).fit(epochs=1)
    assert run.accuracy is not None
