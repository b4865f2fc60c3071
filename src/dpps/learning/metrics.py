"""Metrics by name: how good outputs are for targets. Each is a function of (outputs, targets) that gives one number.

Outputs of classifiers are logits (n, classes), and targets class numbers (n,); those of `rmse` are numbers of the same shape as
the targets. Nothing here is noised: a metric of private examples is for the node's own eyes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor

from dpps.errors import UsageError, unknown
from dpps.registry import Registry

Metric = Callable[[Tensor, Tensor], float]

METRICS: Registry[Metric] = Registry("metric", "dpps.learning")
"""Metrics by name."""

FOR_NUMBERS = ("rmse",)
"""Those that compare numbers; all others need class numbers as targets."""

BINS = 15
"""Of equal width, for the calibration error."""


def of_classes(names: Iterable[str]) -> None:
    """Refuse metrics that mean nothing where the targets are classes."""
    for name in names:
        if name not in METRICS or name in FOR_NUMBERS:
            allowed = [known for known in METRICS.names() if known not in FOR_NUMBERS]
            raise unknown("metric of classes", name, allowed)


def by_name(metrics: str | Metric | Iterable[str | Metric]) -> dict[str, Metric]:
    """Metrics under the names that a summary gives them: their own, or those of the functions, numbered where these are alike.

    Args:
        metrics: names or functions of (outputs, targets); or one alone.
    """
    found: dict[str, Metric] = {}
    several = isinstance(metrics, Iterable) and not isinstance(metrics, str) and not callable(metrics)
    given: list[Any] = list(metrics) if several else [metrics]  # type: ignore[arg-type]
    for metric in given:
        if isinstance(metric, str):
            found[metric] = METRICS[metric]
        elif callable(metric):
            own = getattr(metric, "__name__", type(metric).__name__)
            names = chain([own], (f"{own}-{k}" for k in count(2)))
            found[next(name for name in names if name not in found)] = metric
        else:
            raise UsageError(
                f"a metric is {metric!r}: give a name ({', '.join(METRICS.names())}) or a function of (outputs, targets)"
            )
    return found


def rehearse(metrics: Mapping[str, Metric], outputs: Tensor, targets: Tensor) -> None:
    """Refuse a metric that does not suit outputs and targets of these shapes and types, or that returns no number.

    Args:
        metrics: by their names.
        outputs: made up, so that the answer says nothing about anybody's data.
        targets: made up as well.
    """
    for name, metric in metrics.items():
        try:
            value = metric(outputs, targets)
        except (UsageError, TypeError) as error:
            raise UsageError(
                f"metric {name}: {error}; a metric is a function of (outputs, targets) that returns a number"
            ) from error
        except Exception:  # noqa: BLE001 - made for other values than these, perhaps
            continue
        try:
            float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"metric {name} returns a {type(value).__name__}: it must return one number"
            ) from error


@METRICS.register("accuracy")
def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Share of examples whose class gets the largest output."""
    _check_classes(outputs, targets)
    return float((outputs.argmax(1) == targets).double().mean())


@METRICS.register("balanced-accuracy")
def balanced_accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Mean over the classes that occur of the share of their examples that are found."""
    table = per_class(outputs, targets)
    found = [row.recall for row in table if row.examples]
    return sum(found) / len(found)


@METRICS.register("f1")
def f1(outputs: Tensor, targets: Tensor) -> float:
    """F1 of class 1 where there are two classes, otherwise the mean over the classes that occur or are predicted."""
    table = per_class(outputs, targets)
    if len(table) == 2:
        return table[1].f1
    seen = [row.f1 for row in table if row.examples or row.predicted]
    return sum(seen) / len(seen)


@METRICS.register("auroc")
def auroc(outputs: Tensor, targets: Tensor) -> float:
    """Chance that an example of a class gets a higher score than one of another class, ties counted half.

    With two classes the score is the difference of the logits; with more, the mean of one class against the rest, by softmax,
    over the classes that occur.
    """
    _check_classes(outputs, targets)
    occurring = targets.unique().tolist()  # type: ignore[no-untyped-call]
    if len(occurring) < 2:
        raise UsageError(
            f"auroc needs examples of two classes or more and all {len(targets)} are of class "
            f"{occurring[0]}: choose another metric"
        )
    if outputs.shape[1] == 2:
        return _pairs_in_order(outputs[:, 1].double() - outputs[:, 0].double(), targets == 1)
    scores = outputs.double().softmax(1)
    return sum(_pairs_in_order(scores[:, c], targets == c) for c in occurring) / len(occurring)


@METRICS.register("calibration")
def calibration(outputs: Tensor, targets: Tensor) -> float:
    """Expected calibration error: how far confidence and accuracy are apart, over 15 bins of equal width (0 is best)."""
    _check_classes(outputs, targets)
    confidence, predicted = outputs.double().softmax(1).max(1)
    bins = (confidence * BINS).ceil().long().sub(1).clamp(0, BINS - 1)  # bins are open below and closed above
    gaps = torch.zeros(BINS, dtype=torch.float64, device=outputs.device)
    gaps.index_add_(0, bins, (predicted == targets).double() - confidence)
    return float(gaps.abs().sum() / len(targets))


@METRICS.register("rmse")
def rmse(outputs: Tensor, targets: Tensor) -> float:
    """Root of the mean squared difference; a last dimension of one output is left out."""
    if outputs.ndim == targets.ndim + 1 and outputs.shape[-1] == 1:
        outputs = outputs[..., 0]
    if outputs.shape != targets.shape or not len(targets):
        raise UsageError(
            f"rmse compares outputs of shape {tuple(outputs.shape)} with targets of shape {tuple(targets.shape)}: they must be "
            "equal, with one example or more"
        )
    return float((outputs.double() - targets.double()).square().mean().sqrt())


@dataclass(frozen=True)
class ClassRow:
    """One class of a classifier's table.

    Attributes:
        label: the number of the class.
        examples: how many examples it has.
        predicted: how many examples were predicted to be of it.
        right: how many of its examples were found.
    """

    label: int
    examples: int
    predicted: int
    right: int

    @property
    def recall(self) -> float:
        """Share of its examples that were found (0 where it has none)."""
        return self.right / self.examples if self.examples else 0.0

    @property
    def precision(self) -> float:
        """Share of the predictions of it that are right (0 where there are none)."""
        return self.right / self.predicted if self.predicted else 0.0

    @property
    def f1(self) -> float:
        """Harmonic mean of recall and precision."""
        either = self.examples + self.predicted
        return 2 * self.right / either if either else 0.0

    @classmethod
    def together(cls, rows: Sequence["ClassRow"]) -> "ClassRow":
        """Rows of one class, counted together."""
        counts = (sum(getattr(row, name) for row in rows) for name in ("examples", "predicted", "right"))
        return cls(rows[0].label, *counts)

    def to_json(self) -> dict[str, int | float]:
        """All but the number of the class."""
        shares = {"recall": self.recall, "precision": self.precision, "f1": self.f1}
        return {"examples": self.examples, "predicted": self.predicted, **shares}


def per_class(outputs: Tensor, targets: Tensor) -> list[ClassRow]:
    """A row for every output of the model, whether the class occurs or not."""
    _check_classes(outputs, targets)
    classes, predicted = outputs.shape[1], outputs.argmax(1)
    counts = [
        torch.bincount(found, minlength=classes).tolist()
        for found in (targets, predicted, targets[predicted == targets])
    ]
    return [ClassRow(c, *numbers) for c, numbers in enumerate(zip(*counts, strict=True))]


def _pairs_in_order(scores: Tensor, positive: Tensor) -> float:
    """The rank statistic of Mann and Whitney over the number of pairs."""
    _, group, sizes = scores.unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
    # ties share their mean rank, counted from 1
    ranks = (sizes.cumsum(0).double() - (sizes.double() - 1) / 2)[group]
    high, low = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - high * (high + 1) / 2) / (high * low))


def _check_classes(outputs: Tensor, targets: Tensor) -> None:
    if outputs.ndim != 2 or targets.ndim != 1 or len(outputs) != len(targets) or not len(targets):
        raise UsageError(
            f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}: this metric needs logits "
            "(examples, classes) and class numbers (examples,), one example or more"
        )
    if targets.is_floating_point() or int(targets.min()) < 0 or int(targets.max()) >= outputs.shape[1]:
        raise UsageError(
            f"targets run from {targets.min().item():g} to {targets.max().item():g} and there are "
            f"{outputs.shape[1]} outputs: this "
            "metric needs class numbers 0, 1, ...; for regression use rmse"
        )
