r"""How good the models are: metrics, each node's model on test data and on its own, and whether a difference is chance.

**Metrics** are functions of (outputs, targets) that give one number. Outputs of classifiers are logits (n, classes), and targets
class numbers (n,); those of `rmse` are numbers of the same shape as the targets. Nothing here is noised: a metric of private
examples is for the node's own eyes.

**Comparing two models** on the same examples: an example's difference $d_e$ is 1 where only the second model is right, -1 where
only the first is, and 0 where both are right or both wrong. Two models are right on mostly the same examples, so the mean of
these paired differences is far more certain than the difference of two accuracies measured apart.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, count
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from dpps.errors import UsageError, unknown
from dpps.learning.gradients.calling import FAILURES, pick
from dpps.registry import Registry

if TYPE_CHECKING:
    from dpps.learning.gradients.batch import Engine

log = logging.getLogger(__name__)

Inputs = Any
"""Of a batch: a tensor, or tensors in a tuple or a dictionary, the examples first."""

_Found = TypeVar("_Found")

Metric = Callable[[Tensor, Tensor], float]

METRICS: Registry[Metric] = Registry("metric", "dpps.learning")
"""Metrics by name."""

FOR_NUMBERS = ("rmse",)
"""Those that compare numbers; all others need class numbers as targets."""

BINS = 15
"""Of equal width, for the calibration error."""

EVALUATED = 64
"""Nodes whose models are evaluated at once, and of a larger network those after every epoch that is not the last."""

CONFIDENCE = 1.96
"""Standard errors to either side of an estimate that cover the truth in 95 % of cases."""


# Metrics


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


# The models of the nodes here


def unless_it_fails(measure: Callable[[], _Found], otherwise: _Found, *, hidden: bool) -> _Found:
    """What is measured on a node's own examples.

    Args:
        measure: measures it.
        otherwise: what is said where the model fails on one of the examples and that is hidden.
        hidden: whether nobody is to hear of a node's data, so that a run must not stop because of it.
    """
    try:
        return measure()
    except FAILURES as error:
        if not hidden or isinstance(error, UsageError):
            raise
        log.warning("not measured: the model failed on an example (%s: %s)", type(error).__name__, error)
        return otherwise


def accuracies(engine: "Engine", s: Tensor, l: Tensor, x: Inputs, labels: Tensor) -> list[float]:
    """The paper's evaluation: the averaged s with each node's own l on the whole test set; percent, one per node."""
    if not l.shape[1] and not engine.state():  # all nodes have the same model
        return [accuracy_of(engine, 0, s, l[0], x, labels)] * len(l)
    if len(l) > EVALUATED and not engine.state():  # many nodes at once would leave room for few examples
        parts = (l[first : first + EVALUATED] for first in range(0, len(l), EVALUATED))
        return [found for part in parts for found in accuracies(engine, s, part, x, labels)]
    right = torch.zeros(len(l), device=labels.device)
    for first in range(0, len(labels), engine.at_once):
        part = slice(first, first + engine.at_once)
        right += (engine.outputs(s, l, pick(x, part)).argmax(-1) == labels[part]).sum(1)
    return (100 * right / len(labels)).tolist()


def spread_evenly(count: int) -> list[int]:
    """Which of so many nodes are evaluated while a run goes on: all of a small network, `EVALUATED` of a large one, by their
    places alone."""
    if count <= EVALUATED:
        return list(range(count))
    return [k * count // EVALUATED for k in range(EVALUATED)]


def accuracies_of_some(engine: "Engine", s: Tensor, l: Tensor, x: Inputs, labels: Tensor) -> list[float]:
    """The same of the nodes that `spread_evenly` chooses: a thousand local parts on a whole test set take
    longer than an epoch."""
    chosen = spread_evenly(len(l))
    if not engine.state():
        return accuracies(engine, s, l[chosen], x, labels)
    return [accuracy_of(engine, k, s, l[k], x, labels) for k in chosen]


def own_accuracies(
    engine: "Engine",
    s: Tensor,
    l: Tensor,
    held_out: Sequence[tuple[Inputs, Tensor]],
) -> list[float]:
    """Every node on examples held out of its own data (`held_out[k]` belongs to the k-th row): what local heads are for."""
    return [accuracy_of(engine, k, s, l[k], *examples) for k, examples in enumerate(held_out)]


def accuracy_of(engine: "Engine", k: int, s: Tensor, l: Tensor, x: Inputs, labels: Tensor) -> float:
    """Percent right of the k-th node held here, with this s and this l."""
    return 100 * int(right_of(engine, k, s, l, x, labels).sum()) / len(labels)


def right_of(engine: "Engine", k: int, s: Tensor, l: Tensor, x: Inputs, labels: Tensor) -> Tensor:
    """For every example whether the k-th node held here is right, with this s and this l."""
    return outputs_of(engine, k, s, l, x, len(labels)).argmax(-1) == labels


def are_classes(targets: Any) -> bool:
    """Whether targets are class numbers, one for each example, so that there is an accuracy."""
    return isinstance(targets, Tensor) and targets.ndim == 1 and not targets.is_floating_point()


def outputs_of(engine: "Engine", k: int, s: Tensor, l: Tensor, x: Inputs, count: int) -> Tensor:
    """What the k-th node held here answers to all `count` examples."""
    starts = range(0, count, engine.at_once)
    parts = [engine.outputs_of(k, s, l, pick(x, slice(a, a + engine.at_once))) for a in starts]
    return torch.cat(parts)


def by_class(
    engine: "Engine", s: Tensor, l: Tensor, sets: Sequence[tuple[Inputs, Tensor]]
) -> list[ClassRow] | None:
    """A row for every class, all nodes' answers to `sets[k]` counted together; None where outputs are no classes."""
    tables = []
    for k, (x, targets) in enumerate(sets):
        outputs = outputs_of(engine, k, s, l[k], x, len(targets))
        if outputs.ndim != 2:
            return None
        tables.append(per_class(outputs, targets))
    return [ClassRow.together(rows) for rows in zip(*tables, strict=True)]


def measured(
    engine: "Engine",
    s: Tensor,
    l: Tensor,
    metrics: Mapping[str, Metric],
    reported: set[tuple[str, int]],
    sets: Sequence[tuple[Inputs, Tensor]],
) -> dict[str, list[float | None]]:
    """Every metric of each node's model (the averaged s with its own l) on `sets[k]`; None where it is not defined or fails.

    Args:
        engine: computes outputs.
        s: the averaged shared parameters.
        l: a row of local parameters for every node held here.
        metrics: by their names.
        reported: the metrics and nodes for which a failure was logged; more are added.
        sets: (inputs, targets) of every node held here.
    """
    found: dict[str, list[float | None]] = {name: [] for name in metrics}
    for k, (x, targets) in enumerate(sets):
        outputs = outputs_of(engine, k, s, l[k], x, len(targets))
        for name, metric in metrics.items():
            try:
                found[name].append(float(metric(outputs, targets)))
            except Exception as error:  # noqa: BLE001 - nor is a run lost for a metric, nor may it end by what a node holds
                if (name, k) not in reported:
                    log.warning("metric %s of node %d of those held here: %s", name, k, error)
                reported.add((name, k))
                found[name].append(None)
    return found


# Comparing two models


@dataclass(frozen=True)
class Change:
    """The change of an accuracy from one model to another, in percentage points."""

    points: float
    standard_error: float
    examples: int
    """How many examples it was measured on."""

    @property
    def margin(self) -> float:
        """Half the width of the 95 % interval."""
        return CONFIDENCE * self.standard_error

    @property
    def shown(self) -> bool:
        """Whether the 95 % interval excludes zero."""
        return abs(self.points) > self.margin

    def __str__(self) -> str:
        return f"{self.points:+.1f} ± {self.margin:.1f} points"


@dataclass(frozen=True)
class Comparison:
    """Of all nodes: their mean, which counts every node the same, and the pool, which counts every example the same."""

    mean: Change
    pooled: Change
    by_node: Sequence[Change]
    """Empty where all nodes are measured on one common test set."""

    def to_json(self) -> dict[str, Any]:
        """For summary.json."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Comparison":
        """What `to_json` wrote."""
        by_node = tuple(Change(**each) for each in found["by_node"])
        return cls(Change(**found["mean"]), Change(**found["pooled"]), by_node)


def change(before: ArrayLike, after: ArrayLike) -> Change:
    r"""The change on one set of examples.

    With $S_1 = \sum_e d_e$ and $S_2 = \sum_e d_e^2$ the variance of the mean difference is
    $\left[\frac{S_2 + 1}{n + 2} - \left(\frac{S_1}{n + 2}\right)^2\right] / n$. The two examples added, of which one is a gain or a
    loss, keep it above zero where two models agree on every one of a few examples.

    Args:
        before: for every example whether the first model is right; or the share of several models that are.
        after: the same for the second model.
    """
    differences = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    n, added = len(differences), len(differences) + 2
    mean_square, mean = (np.square(differences).sum() + 1) / added, differences.sum() / added
    error = math.sqrt((mean_square - mean**2) / n)
    return Change(100 * float(differences.mean()), 100 * error, n)


def compare_by_node(before: Sequence[ArrayLike], after: Sequence[ArrayLike]) -> Comparison:
    """Two models of every node, each on examples of that node's own."""
    nodes = [change(*pair) for pair in zip(before, after, strict=True)]
    sizes = [node.examples for node in nodes]
    return Comparison(
        _weighted(nodes, [1 / len(nodes)] * len(nodes)),
        _weighted(nodes, [size / sum(sizes) for size in sizes]),
        tuple(nodes),
    )


def compare_on_one_set(before: Sequence[ArrayLike], after: Sequence[ArrayLike]) -> Comparison:
    """Two models of every node, all on the same examples. An example is drawn once for all of them, so its differences are averaged first."""
    first, second = (np.mean(np.asarray(right, dtype=np.float64), axis=0) for right in (before, after))
    found = change(first, second)
    return Comparison(found, found, ())


def _weighted(nodes: Sequence[Change], weights: Sequence[float]) -> Change:
    """Nodes hold different people, so their errors are independent."""
    points = math.fsum(w * node.points for w, node in zip(weights, nodes, strict=True))
    variance = math.fsum((w * node.standard_error) ** 2 for w, node in zip(weights, nodes, strict=True))
    return Change(points, math.sqrt(variance), sum(node.examples for node in nodes))
