"""How good models are: metrics against scikit-learn, and every node's model."""

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch.utils.data import TensorDataset

import dpps
from dpps.errors import UsageError
from dpps.learning import evaluation
from dpps.tasks import METRICS, by_name, metrics, per_class

# Metrics


def sample(classes, seed, n=200, ties=False):
    rng = np.random.default_rng(seed)
    outputs, targets = rng.normal(size=(n, classes)), rng.integers(0, classes, n)
    outputs[np.arange(n), targets] += 0.7
    return torch.from_numpy(outputs.round(1) if ties else outputs), torch.from_numpy(targets)


@pytest.mark.parametrize("classes", [2, 3, 7])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_classifiers_metrics_equal_scikit_learns(classes, ties, seed):
    outputs, targets = sample(classes, seed, ties=ties)
    predicted, truth = outputs.argmax(1).numpy(), targets.numpy()
    average = "binary" if classes == 2 else "macro"
    assert metrics.accuracy(outputs, targets) == pytest.approx(sk.accuracy_score(truth, predicted))
    balanced = sk.balanced_accuracy_score(truth, predicted)
    assert metrics.balanced_accuracy(outputs, targets) == pytest.approx(balanced)
    assert metrics.f1(outputs, targets) == pytest.approx(sk.f1_score(truth, predicted, average=average))
    scores = (outputs[:, 1] - outputs[:, 0]).numpy() if classes == 2 else outputs.softmax(1).numpy()
    area = sk.roc_auc_score(truth, scores, multi_class="ovr")
    assert metrics.auroc(outputs, targets) == pytest.approx(area)


def test_the_table_of_classes_is_that_of_scikit_learn():
    outputs, targets = sample(4, 2)
    expected = sk.precision_recall_fscore_support(targets.numpy(), outputs.argmax(1).numpy())
    for row, precision, recall, f1, support in zip(per_class(outputs, targets), *expected, strict=True):
        assert (row.precision, row.recall, row.f1) == pytest.approx((precision, recall, f1))
        assert row.examples == support


def test_classes_that_do_not_occur_count_for_nothing():
    outputs, targets = sample(3, 3)
    few = targets < 2
    assert metrics.balanced_accuracy(outputs[few], targets[few]) == pytest.approx(
        sum(row.recall for row in per_class(outputs[few], targets[few])) / 2
    )
    assert per_class(outputs[few], targets[few])[2].recall == 0.0


def test_rmse_equals_scikit_learns_and_leaves_out_a_single_output():
    rng = np.random.default_rng(0)
    found, truth = rng.normal(size=50), rng.normal(size=50)
    expected = sk.mean_squared_error(truth, found) ** 0.5
    tensors = torch.from_numpy(found), torch.from_numpy(truth)
    assert metrics.rmse(*tensors) == pytest.approx(expected)
    assert metrics.rmse(tensors[0][:, None], tensors[1]) == pytest.approx(expected)


def test_calibration_at_its_limits():
    sure = torch.tensor([[50.0, 0.0]] * 10)
    assert metrics.calibration(sure, torch.zeros(10, dtype=torch.long)) == pytest.approx(0.0, abs=1e-9)
    assert metrics.calibration(sure, torch.ones(10, dtype=torch.long)) == pytest.approx(1.0)
    # confidence one half: right for half of them is calibrated, right for all is not
    half = torch.zeros(10, 2)
    assert metrics.calibration(half, torch.tensor([0, 1] * 5)) == pytest.approx(0.0)
    assert metrics.calibration(half, torch.zeros(10, dtype=torch.long)) == pytest.approx(0.5)


def test_by_name_or_by_function():
    assert set(METRICS.names()) >= {"accuracy", "auroc", "balanced-accuracy", "calibration", "f1", "rmse"}
    assert by_name(["f1", metrics.rmse]) == {"f1": metrics.f1, "rmse": metrics.rmse}
    with pytest.raises(UsageError, match=r"metric 'acuracy'.*'accuracy'"):
        by_name("acuracy")


def test_functions_of_the_same_name_are_all_measured_and_one_metric_needs_no_list():
    low, high = (lambda outputs, targets: 0.0), (lambda outputs, targets: 1.0)
    found = by_name([low, high, "f1"])
    assert list(found) == ["<lambda>", "<lambda>-2", "f1"]
    outputs, targets = sample(2, 0)
    assert [metric(outputs, targets) for metric in found.values()][:2] == [0.0, 1.0]
    assert by_name("f1") == {"f1": metrics.f1}
    assert list(by_name(low)) == ["<lambda>"]


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "message"),
    [
        ("accuracy", torch.zeros(3, 2), torch.zeros(2, dtype=torch.long), r"shape \(3, 2\)"),
        ("accuracy", torch.zeros(0, 2), torch.zeros(0, dtype=torch.long), r"shape \(0, 2\)"),
        ("f1", torch.zeros(2, 2), torch.tensor([0, 2]), "0 to 2 .* 2 outputs"),
        ("f1", torch.zeros(2, 2), torch.tensor([0.5, 1.0]), "rmse"),
        ("auroc", torch.zeros(2, 2), torch.tensor([1, 1]), "2 .*class 1"),
        ("rmse", torch.zeros(2, 2), torch.zeros(2), r"shape \(2, 2\)"),
    ],
)
def test_what_a_metric_cannot_say_is_refused(name, outputs, targets, message):
    with pytest.raises(UsageError, match=message):
        METRICS[name](outputs, targets)


# Every node's model


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
    chosen = [k * 70 // 64 for k in range(64)]  # evenly spaced
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
