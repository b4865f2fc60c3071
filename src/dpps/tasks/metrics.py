"""Metrics by name, of one node or of several together, with what their standard errors need.

A metric is a function of (outputs, targets) that gives one number. `Metric.measured` takes the examples of several nodes and also
says how the number depends on each of them.

| about | outputs | targets |
|---|---|---|
| classes | logits (n, classes) | class numbers (n,) |
| numbers | as the targets | any shape |
| times | logits of hazards (n, intervals) | (n, 2): the time, and 1 if the event was observed, 0 if the patient left before |

Nothing here is noised: a metric of private examples is for the node's own eyes.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.special import logsumexp, softmax
from torch import Tensor

from dpps.errors import UsageError
from dpps.registry import Registry
from dpps.tasks.estimates import Estimate, Measured, Values, from_mean, mean, share

Set = tuple[Tensor, Tensor]
"""Outputs and targets of one node."""

BINS = 15
"""Of equal width, for the calibration error."""
_STEPS = 50  # of Newton's method
_PAIRS = 1 << 24  # that are compared at once


@dataclass(frozen=True, eq=False)
class Metric:
    """A number that measures how good a model is.

    Attributes:
        name: as users write it.
        of_sets: function that measures the examples of several nodes together.
        about: what outputs and targets are: "classes", "numbers" or "times"; None: only the metric itself knows.
        higher: whether higher is better. None: neither.
        percent: whether it is shown in percent, and a change of it in points.
    """

    name: str
    of_sets: Callable[[Sequence[Set]], Measured]
    about: str | None = None
    higher: bool | None = True
    percent: bool = False

    def __call__(self, outputs: Tensor, targets: Tensor) -> float:
        """Of one set of examples."""
        return self.measured([(outputs, targets)]).value

    def measured(self, sets: Sequence[Set]) -> Measured:
        """Of the examples of several nodes together.

        Raises:
            UsageError: it is not defined for them.
        """
        for outputs, targets in sets:
            _check(self.about, outputs, targets)
        return self.of_sets(sets)

    @property
    def title(self) -> str:
        """Its name as a heading: RMSE, C-index, Accuracy."""
        short = len(self.name) <= 5 and self.name != "brier"
        return self.name.upper() if short else self.name.capitalize()

    def text(self, value: float) -> str:
        """A value for people."""
        if math.isnan(value):
            return "not defined"
        return f"{100 * value:.2f} %" if self.percent else _written(value, 4)

    def interval(self, found: Estimate) -> str:
        """A value with its 95 % interval for people."""
        if found.margin is None:
            return self.text(found.value)
        margin = f"{100 * found.margin:.2f} %" if self.percent else _written(found.margin, 2)
        return f"{self.text(found.value).removesuffix(' %')} ± {margin}"

    def change(self, value: float, margin: float | None) -> str:
        """A change with its 95 % interval for people."""
        if self.percent:
            return f"{100 * value:+.1f}{'' if margin is None else f' ± {100 * margin:.1f}'} points"
        return _written(value, 3, "+") + ("" if margin is None else f" ± {_written(margin, 2)}")


def _written(value: float, digits: int, sign: str = "") -> str:
    """A number with so many digits, and all of those before the point: 120, not 1.2e+02."""
    text = f"{value:{sign}.{digits}g}"
    return f"{value:{sign}.0f}" if "e+" in text else text


Function = Callable[[Tensor, Tensor], float]
METRICS: Registry[Metric] = Registry("metric", "dpps.tasks")
"""Metrics by name."""


def register(
    name: str, about: str, *, higher: bool | None = True, percent: bool = False
) -> Callable[[Callable[[Sequence[Set]], Measured]], Metric]:
    """A decorator that registers a function of several nodes' examples as a metric."""
    return lambda function: METRICS.register(name)(Metric(name, function, about, higher, percent))


def by_name(
    metrics: str | Function | Iterable[str | Function], find: Callable[[str], Metric] | None = None
) -> dict[str, Metric]:
    """Metrics by the names that a summary gives them: their own, or those of the functions, numbered where two are the same.

    Args:
        metrics: names, metrics, or functions of (outputs, targets), whose standard errors are not known; or one alone.
        find: finds a metric by its name, such as `Task.metric`; by default among all metrics.
    """
    found: dict[str, Metric] = {}
    given: Any = [metrics] if isinstance(metrics, str) or callable(metrics) else metrics
    for metric in given if isinstance(given, Iterable) else [given]:
        if isinstance(metric, str):
            found[metric] = (find or METRICS.__getitem__)(metric)
        elif isinstance(metric, Metric):
            found[metric.name] = metric
        elif callable(metric):
            own = getattr(metric, "__name__", type(metric).__name__)
            name = next(n for n in chain([own], (f"{own}-{k}" for k in count(2))) if n not in found)
            found[name] = Metric(name, partial(_by_function, metric), higher=None)
        else:
            raise UsageError(
                f"a metric is {metric!r}: give a name ({', '.join(METRICS.names())}) or a function of (outputs, targets)"
            )
    return found


def _by_function(function: Function, sets: Sequence[Set]) -> Measured:
    value = function(*(torch.cat(part) for part in zip(*sets, strict=True)))
    try:
        return Measured(float(value), _unknown(sets))
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"it returns a {type(value).__name__}: it must return one number") from error


def rehearse(metrics: Mapping[str, Metric], outputs: Tensor, targets: Tensor) -> None:
    """Refuse metrics that do not suit outputs and targets of these shapes and types, or that return no number. Both are made up, so
    that the answer says nothing about anybody's data."""
    for name, metric in metrics.items():
        try:
            metric(outputs, targets)
        except (UsageError, TypeError) as error:
            raise UsageError(
                f"metric {name}: {error}; a metric is a function of (outputs, targets) that returns a number"
            ) from error
        except Exception:  # noqa: BLE001 - made for other values than these, perhaps
            continue


_NEEDS = {
    "classes": "needs logits (examples, classes) and class numbers (examples,), one example or more",
    "numbers": "compares numbers of equal shapes, of one example or more",
    "times": "needs logits of hazards (examples, intervals), and of every example its time and whether the event was observed, "
    "one or more",
}


def _check(about: str | None, outputs: Tensor, targets: Tensor) -> None:
    """Refuse outputs and targets that a metric about this cannot compare."""
    if about is None:
        return
    suits = {
        "classes": outputs.ndim == 2 and targets.shape == outputs.shape[:1],
        "numbers": targets.shape
        in (outputs.shape, outputs.shape[:-1] if outputs.shape[-1:] == (1,) else None),
        "times": outputs.ndim == 2 and targets.shape == (len(outputs), 2),
    }
    if not suits[about] or not len(targets):
        raise UsageError(
            f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}: this metric {_NEEDS[about]}"
        )
    if about == "classes" and (
        targets.is_floating_point() or int(targets.min()) < 0 or int(targets.max()) >= outputs.shape[1]
    ):
        raise UsageError(
            f"targets run from {targets.min().item():g} to {targets.max().item():g} and there are "
            f"{outputs.shape[1]} outputs: this metric needs class numbers 0, 1, ...; for regression use rmse"
        )


def _unknown(sets: Sequence[Set]) -> tuple[Values, ...]:
    """The parts of a number whose standard error is not known."""
    return tuple(np.full(len(targets), np.nan) for _, targets in sets)


def _array(values: Tensor) -> Values:
    return values.detach().double().cpu().numpy()


# Classes


@register("accuracy", "classes", percent=True)
def accuracy(sets: Sequence[Set]) -> Measured:
    """Share of examples whose class gets the largest output."""
    return share([_array(outputs.argmax(1) == targets) for outputs, targets in sets])


@register("balanced-accuracy", "classes", percent=True)
def balanced_accuracy(sets: Sequence[Set]) -> Measured:
    """Mean over the classes that occur of the share of their examples that are found."""
    return _of_confusion(sets, lambda table: _mean_where(np.diag(table), table.sum(1)))


@register("f1", "classes")
def f1(sets: Sequence[Set]) -> Measured:
    """F1 of class 1 where there are two classes, otherwise the mean over the classes that occur or are predicted."""

    def of_table(table: Values) -> float:
        right, either = 2 * np.diag(table), table.sum(1) + table.sum(0)
        if len(table) == 2:
            return float(right[1] / either[1]) if either[1] else 0.0
        return _mean_where(right, either)

    return _of_confusion(sets, of_table)


def _mean_where(above: Values, below: Values) -> float:
    """The mean ratio, over the places where there is something below."""
    return float((above[below > 0] / below[below > 0]).mean()) if (below > 0).any() else float("nan")


def _of_confusion(sets: Sequence[Set], function: Callable[[Values], float]) -> Measured:
    """A function of the confusion matrix. Without one example, its cell is one less."""
    classes = sets[0][0].shape[1]
    cells = [(t * classes + o.argmax(1)).cpu().numpy() for o, t in sets]
    table = np.bincount(np.concatenate(cells), minlength=classes**2).astype(np.float64)
    without = np.full(classes**2, np.nan)
    if table.sum() > 1:
        for cell in np.flatnonzero(table):
            less = table.copy()
            less[cell] -= 1
            without[cell] = function(less.reshape(classes, classes))
    return Measured(function(table.reshape(classes, classes)), tuple(without[cell] for cell in cells))


@register("log-loss", "classes", higher=False)
def log_loss(sets: Sequence[Set]) -> Measured:
    """Mean of minus the logarithm of the probability that the right class was given."""
    return mean([_array(F.cross_entropy(o.double(), t, reduction="none")) for o, t in sets])


@register("brier", "classes", higher=False)
def brier(sets: Sequence[Set]) -> Measured:
    """Mean squared difference of the probabilities and what happened, summed over the classes and halved: with two classes it is
    that of the probability of one of them."""
    differences = [o.double().softmax(1) - F.one_hot(t, o.shape[1]) for o, t in sets]
    return mean([_array(d.square().sum(1) / 2) for d in differences])


@register("auroc", "classes")
def auroc(sets: Sequence[Set]) -> Measured:
    """Chance that an example of a class gets a higher score than one of another class of the same node, ties counted half.

    With two classes the score is the difference of the logits; with more, the mean of one class against the rest, by softmax,
    over the classes that occur.
    """
    occurring = sorted({int(c) for _, targets in sets for c in targets.unique()})  # type: ignore[no-untyped-call]
    two = sets[0][0].shape[1] == 2
    found = []
    for c in [1] if two else occurring:
        scores = [_array(o[:, 1] - o[:, 0] if two else o.double().softmax(1)[:, c]) for o, _ in sets]
        wins = [_wins(score, (t == c).cpu().numpy()) for score, (_, t) in zip(scores, sets, strict=True)]
        if (of_class := _of_pairs(wins)) is not None:
            found.append(of_class)
    if not found:
        examples = sum(len(targets) for _, targets in sets)
        only = f" and all {examples} are of class {occurring[0]}" if len(occurring) == 1 else ""
        raise UsageError(
            f"auroc needs examples of two classes or more at one node{only}: choose another metric"
        )
    parts = tuple(np.mean(each, axis=0) for each in zip(*(m.parts for m in found), strict=True))
    return Measured(float(np.mean([m.value for m in found])), parts)


def _wins(scores: Values, high: NDArray[np.bool_]) -> tuple[Values, Values]:
    """Of every example: in how many pairs with the other kind it has the right order, and in how many pairs it is."""

    def below(others: Values) -> Values:
        """How many of the others are below each score, ties counted half."""
        ordered = np.sort(others)
        return (np.searchsorted(ordered, scores, "left") + np.searchsorted(ordered, scores, "right")) / 2

    lows, highs = len(scores) - high.sum(), high.sum()
    return np.where(high, below(scores[~high]), highs - below(scores[high])), np.where(
        high, lows, highs
    ) * 1.0


def _of_pairs(nodes: Sequence[tuple[Values, Values]]) -> Measured | None:
    """The share of pairs in the right order, from what `_wins` gives for each node: every pair counts at both of its examples. None: there is no pair."""
    won, pairs = (sum(float(node[k].sum()) for node in nodes) / 2 for k in (0, 1))
    if not pairs:
        return None
    return Measured(won / pairs, tuple(_ratio(won - own_won, pairs - own) for own_won, own in nodes))


def _ratio(above: Values, below: Values) -> Values:
    """NaN where nothing is left below."""
    found: Values = np.divide(above, below, out=np.full_like(below, np.nan), where=below > 0)
    return found


@register("calibration", "classes", higher=False)
def calibration(sets: Sequence[Set]) -> Measured:
    """Expected calibration error: how far confidence and accuracy are apart, over 15 bins of equal width (0 is best).

    It has no standard error here: chance alone keeps it above zero, so no interval around it covers the truth as often as it says.
    `calibration-slope` has one.
    """
    gaps, examples = torch.zeros(BINS, dtype=torch.float64), 0
    for outputs, targets in sets:
        confidence, predicted = outputs.double().softmax(1).max(1)
        # bins are open below and closed above
        bins = (confidence * BINS).ceil().long().sub(1).clamp(0, BINS - 1)
        gaps.index_add_(0, bins.cpu(), ((predicted == targets).double() - confidence).cpu())
        examples += len(targets)
    return Measured(float(gaps.abs().sum() / examples), _unknown(sets))


@register("calibration-slope", "classes", higher=None)
def calibration_slope(sets: Sequence[Set]) -> Measured:
    """By what all logits should be multiplied to predict these examples best: 1 is best, less than 1 means too sure.

    With two classes the logistic regression of the class on the difference of the logits, with an intercept; with more, without.
    """
    logits = np.concatenate([_array(outputs) for outputs, _ in sets])
    happened = np.eye(logits.shape[1])[np.concatenate([targets.cpu().numpy() for _, targets in sets])]
    x = logits[:, :, None]  # what the slope (and the intercept) multiplies, for every example and class
    if logits.shape[1] == 2:
        x = np.stack([logits, np.broadcast_to([0.0, 1.0], logits.shape)], axis=2)

    def likelihood(beta: Values) -> tuple[float, Values, Values]:
        """Minus the log-likelihood of all examples, and of each one its gradient and its Hessian."""
        z = x @ beta
        p = softmax(z, 1)
        centre = np.einsum("ec,ecp->ep", p, x)
        hessians = np.einsum("ec,ecp,ecq->epq", p, x, x) - centre[:, :, None] * centre[:, None, :]
        loss = float((logsumexp(z, 1) - (z * happened).sum(1)).sum())
        return loss, centre - np.einsum("ec,ecp->ep", happened, x), hessians

    beta = np.array([1.0, 0.0][: x.shape[2]])
    loss, gradients, hessians = likelihood(beta)
    for _ in range(_STEPS):
        hessian = hessians.sum(0)
        if np.linalg.cond(hessian) > 1e12:
            raise UsageError("calibration-slope is not defined: the examples do not determine it")
        step = np.linalg.solve(hessian, gradients.sum(0))
        if np.abs(step).max() < 1e-8 * (1 + np.abs(beta).max()):
            break
        while (tried := likelihood(beta - step))[0] > loss and np.abs(step).max() > 1e-12:
            step = step / 2
        beta, (loss, gradients, hessians) = beta - step, tried
    else:
        raise UsageError("calibration-slope is not defined: the model separates the classes without error")
    # without an example: one step of Newton's method, with the example's leverage
    inverse = np.linalg.inv(hessian)
    leverage = np.einsum("pq,eqp->e", inverse, hessians)
    without = beta[0] + (gradients @ inverse)[:, 0] / np.clip(1 - leverage, 0.1, None)
    ends = np.cumsum([len(targets) for _, targets in sets])[:-1]
    return Measured(float(beta[0]), tuple(np.split(without, ends)))


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
    _check("classes", outputs, targets)
    classes, predicted = outputs.shape[1], outputs.argmax(1)
    counts = [
        torch.bincount(found, minlength=classes).tolist()
        for found in (targets, predicted, targets[predicted == targets])
    ]
    return [ClassRow(c, *numbers) for c, numbers in enumerate(zip(*counts, strict=True))]


# Numbers


def _errors(outputs: Tensor, targets: Tensor) -> Values:
    """One difference per example; of several outputs the root of their mean square."""
    if outputs.ndim == targets.ndim + 1:
        outputs = outputs[..., 0]
    difference = outputs.double() - targets.double()
    flat = difference.reshape(len(targets), -1)
    return _array(flat[:, 0] if flat.shape[1] == 1 else flat.square().mean(1).sqrt())


@register("rmse", "numbers", higher=False)
def rmse(sets: Sequence[Set]) -> Measured:
    """Root of the mean squared difference."""
    return from_mean([np.square(_errors(*one)) for one in sets], np.sqrt)


@register("mae", "numbers", higher=False)
def mae(sets: Sequence[Set]) -> Measured:
    """Mean absolute difference."""
    return mean([np.abs(_errors(*one)) for one in sets])


@register("r2", "numbers")
def r2(sets: Sequence[Set]) -> Measured:
    """How much of the variance of the targets is predicted: 1 is all of it, 0 is what their mean predicts."""
    targets = [_array(t.reshape(len(t), -1)) for _, t in sets]
    squares = [np.square(_errors(*one)) * t.shape[1] for one, t in zip(sets, targets, strict=True)]
    whole = np.concatenate(targets)
    spread = [np.square(t - whole.mean(0)).sum(1) for t in targets]
    missed, total, n = (float(sum(s.sum() for s in squares)), float(sum(s.sum() for s in spread)), len(whole))
    if n < 2 or not total:
        raise UsageError("r2 needs examples with different targets: choose another metric")
    nodes = zip(squares, spread, strict=True)
    parts = [1 - _ratio(missed - own, total - s * n / (n - 1)) for own, s in nodes]
    return Measured(1 - missed / total, tuple(parts))


# Times


@register("c-index", "times")
def c_index(sets: Sequence[Set]) -> Measured:
    """Chance that of two patients of one node the one with the earlier event has the higher risk, ties of the risk counted half.

    Two patients are comparable if the event of the earlier one was observed.
    """
    # the cumulative hazard at the last edge; with proportional hazards it is in the order of the proportional part
    risks = [_array(F.softplus(o.double()).sum(1)) for o, _ in sets]
    found = _of_pairs([_comparable(risk, _array(t)) for risk, (_, t) in zip(risks, sets, strict=True)])
    if found is None:
        raise UsageError(
            "c-index needs two patients of one node of whom the earlier had the event: choose another metric"
        )
    return found


def _comparable(risk: Values, targets: Values) -> tuple[Values, Values]:
    """Of every patient: in how many pairs it is in the right order, and in how many it can be compared."""
    time, event = targets[:, 0], targets[:, 1] > 0
    won, pairs = np.zeros(len(time)), np.zeros(len(time))
    early = np.flatnonzero(event)
    at_once = max(1, _PAIRS // max(1, len(time)))
    for first in range(0, len(early), at_once):
        rows = early[first : first + at_once]
        later = (time[rows, None] < time) | ((time[rows, None] == time) & ~event)
        right = later * ((risk[rows, None] > risk) + 0.5 * (risk[rows, None] == risk))
        won[rows] += right.sum(1)
        pairs[rows] += later.sum(1)
        won += right.sum(0)
        pairs += later.sum(0)
    return won, pairs
