"""Metrics against scikit-learn, at their limits, and what they refuse."""

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from dpps.errors import UsageError
from dpps.learning import METRICS, by_name, metrics, per_class


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
    assert by_name([low, high, "f1"]) == {"<lambda>": low, "<lambda>-2": high, "f1": metrics.f1}
    assert by_name("f1") == {"f1": metrics.f1}
    assert by_name(low) == {"<lambda>": low}


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
