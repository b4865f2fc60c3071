"""Metrics of every node's model."""

import pytest
import torch
from torch.utils.data import TensorDataset

import dpps
from dpps.errors import UsageError
from dpps.learning import evaluation


def error_rate(outputs, targets):
    return float((outputs.argmax(1) != targets).double().mean())


def run(metrics, **options):
    random = torch.Generator().manual_seed(3)
    x = torch.randn(3, 60, 4, generator=random)
    y = (x.sum(2) > 0).long()
    nodes = [TensorDataset(a, b) for a, b in zip(x, y, strict=True)]
    torch.manual_seed(0)
    algorithm = dpps.PartPSP(dpps.models.linear(4, 2), shared="all", batch_size=20, lr_shared=0.5)
    own = [(a, b) for a, b in zip(x, y, strict=True)]
    own[2] = own[2][0], torch.zeros_like(own[2][1])
    return dpps.Run(
        algorithm, nodes, topology="exp", test=(x[0], y[0]), held_out=own, metrics=metrics, seed=0, **options
    ).fit(epochs=5)


def test_by_name_and_by_function_on_the_test_set_and_on_own_data(caplog):
    done = run(["accuracy", "auroc", error_rate])
    found = done.metrics_by_node
    assert set(found) == {"test", "own"}
    assert [100 * share for share in found["test"]["accuracy"]] == pytest.approx(done.accuracy_by_node)
    assert [100 * share for share in found["own"]["accuracy"]] == pytest.approx(done.own_accuracy_by_node)
    assert found["own"]["error_rate"] == pytest.approx([1 - share for share in found["own"]["accuracy"]])
    assert min(found["test"]["auroc"]) > 0.9
    assert found["own"]["auroc"][2] is None  # one class only: told, and the run is not lost
    assert caplog.text.count("auroc of node 2 ") == 1


def test_a_metric_that_fails_does_not_end_the_run(caplog):
    def picky(outputs, targets):
        raise ZeroDivisionError("no example of class 7")

    done = run([picky])
    assert done.metrics_by_node == {"test": {"picky": [None] * 3}, "own": {"picky": [None] * 3}}
    assert "picky of node 0 " in caplog.text
    assert "no example of class 7" in caplog.text
    assert len(done.log) == 15


def test_nothing_is_measured_unless_asked_and_names_are_checked_first():
    assert run([]).metrics_by_node == {}
    with pytest.raises(UsageError, match=r"'aurok'.*'auroc'"):
        run(["aurok"])


def test_of_many_nodes_some_are_evaluated_on_the_way_and_all_at_the_end(monkeypatch):
    """Local parts differ, so the numbers tell whose they are."""
    random = torch.Generator().manual_seed(3)
    x = torch.randn(70, 8, 4, generator=random)
    y = torch.randint(0, 3, (70, 8), generator=random)
    test = x.flatten(0, 1), y.flatten()
    torch.manual_seed(0)
    algorithm = dpps.PartPSP(dpps.models.MLP((4, 5, 3)), shared=["layer1"], batch_size=4, lr_shared=0.5)
    nodes = [TensorDataset(a, b) for a, b in zip(x, y, strict=True)]
    run = dpps.Run(algorithm, nodes, topology="exp", test=test, seed=0).start(2)
    monkeypatch.setattr(
        evaluation, "accuracy_of", lambda *a: pytest.fail("one by one is for models with buffers")
    )
    asked = [(log.accuracy, run.evaluate()) for log in run.rounds(epochs=2) if log.accuracy is not None]
    assert len(asked) == 2
    (first, of_all), (last, of_all_at_last) = asked
    chosen = evaluation.spread_evenly(70)
    assert len(set(chosen)) == len(chosen) == 64
    assert max(chosen) < 70
    assert first == pytest.approx(sum(of_all[k] for k in chosen) / 64)
    assert last == pytest.approx(sum(of_all_at_last) / 70)
    models = run.models()
    for k in (0, 65, 69):
        right = (models[k](test[0]).argmax(1) == test[1]).double().mean()
        assert run.accuracy_by_node[k] == pytest.approx(100 * float(right))


def test_one_model_for_all_is_evaluated_once():
    done = run([])
    calls = []
    outputs_of = done.nodes.engine.outputs_of
    done.nodes.engine.outputs_of = lambda *a: calls.append(1) or outputs_of(*a)
    assert len(done.evaluate()) == 3
    assert len(calls) == 1
