"""Metrics by name, of one node or of several together, each with what its standard error needs.

A metric is a function of (outputs, targets) that gives one number; `Metric.measured` takes the examples of several nodes and also
says how the number depends on every one of them. Outputs of classifiers are logits (n, classes), and targets class numbers (n,).
Outputs of numbers have the shape of their targets. Outputs of survival models are logits of hazards (n, intervals), and targets
(n, 2): the time, and 1 where the event was observed, 0 where the patient left before.

Nothing here is noised: a metric of private examples is for the node's own eyes.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dpps.errors import UsageError
from dpps.registry import Registry
from dpps.tasks.estimates import Estimate, Measured, Values, from_mean, mean, ratio, share

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
        if self.about is not None:
            for outputs, targets in sets:
                _CHECKS[self.about](outputs, targets)
        return self.of_sets(sets)

    @property
    def title(self) -> str:
        """Its name at the head of something: RMSE, C-index, Accuracy."""
        short = len(self.name) <= 5 and self.name != "brier"
        return self.name.upper() if short else self.name.capitalize()

    def text(self, value: float) -> str:
        """A value as people read it."""
        if math.isnan(value):
            return "not defined"
        return f"{100 * value:.2f} %" if self.percent else _written(value, 4)

    def interval(self, found: Estimate) -> str:
        """A value with its 95 % interval as people read it."""
        if found.margin is None:
            return self.text(found.value)
        margin = f"{100 * found.margin:.2f}" if self.percent else _written(found.margin, 2)
        return f"{self.text(found.value).removesuffix(' %')} ± {margin}{' %' if self.percent else ''}"

    def change(self, value: float, margin: float | None) -> str:
        """A change with its 95 % interval as people read it."""
        if self.percent:
            return f"{100 * value:+.1f}{'' if margin is None else f' ± {100 * margin:.1f}'} points"
        spread = "" if margin is None else f" ± {_written(margin, 2)}"
        return f"{_written(value, 3, '+')}{spread}"


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
    """A decorator that makes a metric of a function of several nodes' examples and files it under this name."""

    def file(function: Callable[[Sequence[Set]], Measured]) -> Metric:
        return METRICS.register(name)(Metric(name, function, about, higher, percent))

    return file


def by_name(
    metrics: str | Function | Iterable[str | Function], find: Callable[[str], Metric] | None = None
) -> dict[str, Metric]:
    """Metrics under the names that a summary gives them: their own, or those of the functions, numbered where these are alike.

    Args:
        metrics: names, metrics, or functions of (outputs, targets), whose standard errors are not known; or one alone.
        find: finds a metric by its name, such as `Task.metric`; without it all names are known.
    """
    found: dict[str, Metric] = {}
    several = isinstance(metrics, Iterable) and not isinstance(metrics, str) and not callable(metrics)
    given: list[Any] = list(metrics) if several else [metrics]  # type: ignore[arg-type]
    for metric in given:
        if isinstance(metric, str):
            found[metric] = METRICS[metric] if find is None else find(metric)
        elif isinstance(metric, Metric):
            found[metric.name] = metric
        elif callable(metric):
            own = getattr(metric, "__name__", type(metric).__name__)
            names = chain([own], (f"{own}-{k}" for k in count(2)))
            name = next(name for name in names if name not in found)
            found[name] = Metric(name, _by_function(metric), higher=None)
        else:
            raise UsageError(
                f"a metric is {metric!r}: give a name ({', '.join(METRICS.names())}) or a function of (outputs, targets)"
            )
    return found


def _by_function(function: Function) -> Callable[[Sequence[Set]], Measured]:
    def measure(sets: Sequence[Set]) -> Measured:
        outputs, targets = (torch.cat(list(part)) for part in zip(*sets, strict=True))
        value = function(outputs, targets)
        try:
            return Measured(float(value), _unknown(sets))
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"it returns a {type(value).__name__}: it must return one number") from error

    return measure


def rehearse(metrics: Mapping[str, Metric], outputs: Tensor, targets: Tensor) -> None:
    """Refuse a metric that does not suit outputs and targets of these shapes and types, or that returns no number. Both are made up, so that
    the answer says nothing about anybody's data."""
    for name, metric in metrics.items():
        try:
            metric(outputs, targets)
        except (UsageError, TypeError) as error:
            raise UsageError(
                f"metric {name}: {error}; a metric is a function of (outputs, targets) that returns a number"
            ) from error
        except Exception:  # noqa: BLE001 - made for other values than these, perhaps
            continue


# What outputs and targets must be


def _check_classes(outputs: Tensor, targets: Tensor) -> None:
    if outputs.ndim != 2 or targets.ndim != 1 or len(outputs) != len(targets) or not len(targets):
        raise UsageError(
            f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}: this metric needs logits "
            "(examples, classes) and class numbers (examples,), one example or more"
        )
    if targets.is_floating_point() or int(targets.min()) < 0 or int(targets.max()) >= outputs.shape[1]:
        raise UsageError(
            f"targets run from {targets.min().item():g} to {targets.max().item():g} and there are "
            f"{outputs.shape[1]} outputs: this metric needs class numbers 0, 1, ...; for regression use rmse"
        )


def _check_numbers(outputs: Tensor, targets: Tensor) -> None:
    if outputs.ndim == targets.ndim + 1 and outputs.shape[-1] == 1:
        outputs = outputs[..., 0]
    if outputs.shape != targets.shape or not len(targets):
        raise UsageError(
            f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}: this metric compares "
            "numbers of equal shapes, of one example or more"
        )


def _check_times(outputs: Tensor, targets: Tensor) -> None:
    if outputs.ndim != 2 or targets.shape != (len(outputs), 2) or not len(targets):
        raise UsageError(
            f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}: this metric needs logits of "
            "hazards (examples, intervals), and of every example its time and whether the event was observed, one or more"
        )


_CHECKS = {"classes": _check_classes, "numbers": _check_numbers, "times": _check_times}


def _unknown(sets: Sequence[Set]) -> tuple[Values, ...]:
    """Of a number whose standard error is not known."""
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
    """A number that depends on how many examples of each class are taken for each class. Without one example, its cell of that
    table has one less."""
    classes = sets[0][0].shape[1]
    cells = [(t * classes + o.argmax(1)).cpu().numpy() for o, t in sets]
    table = np.bincount(np.concatenate(cells), minlength=classes**2).astype(np.float64)
    value, less = function(table.reshape(classes, classes)), np.full(classes**2, np.nan)
    if table.sum() > 1:
        for cell in np.flatnonzero(table):
            table[cell] -= 1
            less[cell] = function(table.reshape(classes, classes))
            table[cell] += 1
    return Measured(value, tuple(less[cell] for cell in cells))


@register("log-loss", "classes", higher=False)
def log_loss(sets: Sequence[Set]) -> Measured:
    """Mean of minus the logarithm of the probability that the right class was given."""
    return mean([_array(F.cross_entropy(o.double(), t, reduction="none")) for o, t in sets])


@register("brier", "classes", higher=False)
def brier(sets: Sequence[Set]) -> Measured:
    """Mean squared difference of the probabilities and what happened: over all classes, halved, so that with two classes it is
    that of the probability of one of them."""

    def each(outputs: Tensor, targets: Tensor) -> Values:
        happened = F.one_hot(targets, outputs.shape[1]).double()
        return _array((outputs.double().softmax(1) - happened).square().sum(1) / 2)

    return mean([each(*one) for one in sets])


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
        found.append(_in_order(scores, [(t == c).cpu().numpy() for _, t in sets]))
    known = [each for each in found if each is not None]
    if not known:
        examples = sum(len(targets) for _, targets in sets)
        raise UsageError(
            f"auroc needs examples of two classes or more at one node and all {examples} are of class {occurring[0]}: choose "
            "another metric"
            if len(occurring) == 1
            else "auroc needs examples of two classes or more at one node: choose another metric"
        )
    parts = tuple(np.mean(each, axis=0) for each in zip(*(m.parts for m in known), strict=True))
    return Measured(float(np.mean([m.value for m in known])), parts)


def _in_order(scores: Sequence[Values], positive: Sequence[np.ndarray]) -> Measured | None:
    """Pairs of a positive and a negative example of one node in the right order, as a part of all such pairs."""
    above, below = [], []
    for s, high in zip(scores, positive, strict=True):
        order = np.sort(s[~high]), np.sort(s[high])
        won = np.where(high, _below(order[0], s), len(order[1]) - _below(order[1], s))
        above.append(won)
        below.append(np.where(high, len(order[0]), len(order[1])).astype(np.float64))
    pairs = sum(float(b[high].sum()) for b, high in zip(below, positive, strict=True))
    if not pairs:
        return None
    won_pairs = sum(float(a[high].sum()) for a, high in zip(above, positive, strict=True))
    return ratio(above, below, (won_pairs, pairs))


def _below(ordered: Values, values: Values) -> Values:
    """How many of the ordered numbers are smaller than each value, those that are equal counted half."""
    left, right = (np.searchsorted(ordered, values, side) for side in ("left", "right"))
    return (left + right) / 2


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
    design = [_design(outputs, targets) for outputs, targets in sets]
    x, offset = (np.concatenate([part[k] for part in design]) for k in (0, 1))
    beta = np.zeros(x.shape[2])
    beta[0] = 1.0
    for _ in range(_STEPS):
        gradient, hessian = _likelihood(x, offset, beta)
        if np.linalg.cond(hessian) > 1e12:
            raise UsageError("calibration-slope is not defined: the examples do not determine it")
        step = np.linalg.solve(hessian, gradient.sum(0))
        if np.abs(step).max() < 1e-8 * (1 + np.abs(beta).max()):
            break
        now = _minus_log(x, offset, beta)
        while _minus_log(x, offset, beta - step) > now and np.abs(step).max() > 1e-12:
            step = step / 2
        beta = beta - step
    else:
        raise UsageError("calibration-slope is not defined: the model separates the classes without error")
    gradient, hessian = _likelihood(x, offset, beta)
    inverse = np.linalg.inv(hessian)
    p = _softmax(np.einsum("ecp,p->ec", x, beta))
    spread = np.einsum("ec,ecp,ecq->epq", p, x, x) - np.einsum(
        "ep,eq->epq", *2 * [np.einsum("ec,ecp->ep", p, x)]
    )
    leverage = np.einsum("pq,eqp->e", inverse, spread)
    without = beta[0] + (gradient @ inverse)[:, 0] / np.clip(1 - leverage, 0.1, None)
    ends = np.cumsum([len(targets) for _, targets in sets])[:-1]
    return Measured(float(beta[0]), tuple(np.split(without, ends)))


def _design(outputs: Tensor, targets: Tensor) -> tuple[Values, Values]:
    """Of every example and class what the slope (and the intercept) multiplies, and which class happened."""
    logits = _array(outputs)
    happened = np.eye(logits.shape[1])[targets.cpu().numpy()]
    if logits.shape[1] != 2:
        return logits[:, :, None], happened
    intercept = np.broadcast_to(np.array([0.0, 1.0]), logits.shape)
    return np.stack([logits, intercept], axis=2), happened


def _likelihood(x: Values, happened: Values, beta: Values) -> tuple[Values, Values]:
    """Every example's gradient of minus the log-likelihood, and the Hessian of all."""
    p = _softmax(np.einsum("ecp,p->ec", x, beta))
    gradient = np.einsum("ec,ecp->ep", p - happened, x)
    centre = np.einsum("ec,ecp->ep", p, x)
    hessian = np.einsum("ec,ecp,ecq->pq", p, x, x) - centre.T @ centre
    return gradient, hessian


def _minus_log(x: Values, happened: Values, beta: Values) -> float:
    """Minus the log-likelihood of all examples."""
    z = np.einsum("ecp,p->ec", x, beta)
    top = z.max(1, keepdims=True)
    return float((top[:, 0] + np.log(np.exp(z - top).sum(1)) - (z * happened).sum(1)).sum())


def _softmax(z: Values) -> Values:
    e = np.exp(z - z.max(1, keepdims=True))
    found: Values = e / e.sum(1, keepdims=True)
    return found


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
    n, centre = len(whole), whole.mean(0)
    spread = [np.square(t - centre).sum(1) for t in targets]
    total = float(sum(s.sum() for s in spread))
    if n < 2 or not total:
        raise UsageError("r2 needs examples with different targets: choose another metric")
    missed = ratio(squares, [s * n / (n - 1) for s in spread], (float(sum(s.sum() for s in squares)), total))
    return Measured(1 - missed.value, tuple(1 - part for part in missed.parts))


# Times


def risk_of(outputs: Tensor) -> Tensor:
    """One number per example: the cumulative hazard at the last edge. With proportional hazards it is in the order of the
    proportional part."""
    return F.softplus(outputs.double()).sum(1)


@register("c-index", "times")
def c_index(sets: Sequence[Set]) -> Measured:
    """Chance that of two patients of one node the one with the earlier event has the higher risk, ties of the risk counted half.

    Two patients are comparable if the event of the earlier one was observed.
    """
    above, below = zip(*(_comparable(_array(risk_of(o)), _array(t)) for o, t in sets), strict=True)
    pairs = sum(float(b.sum()) for b in below) / 2
    if not pairs:
        raise UsageError(
            "c-index needs two patients of one node of whom the earlier had the event: choose another metric"
        )
    return ratio(above, below, (sum(float(a.sum()) for a in above) / 2, pairs))


def _comparable(risk: Values, targets: Values) -> tuple[Values, Values]:
    """Of every patient: in how many pairs it is in the right order, and in how many it can be compared."""
    time, event = targets[:, 0], targets[:, 1] > 0
    n = len(time)
    won, pairs = np.zeros(n), np.zeros(n)
    early = np.flatnonzero(event)
    for first in range(0, len(early), max(1, _PAIRS // max(1, n))):
        rows = early[first : first + max(1, _PAIRS // max(1, n))]
        later = (time[rows, None] < time) | ((time[rows, None] == time) & ~event)
        right = later * ((risk[rows, None] > risk) + 0.5 * (risk[rows, None] == risk))
        won[rows] += right.sum(1)
        pairs[rows] += later.sum(1)
        won += right.sum(0)
        pairs += later.sum(0)
    return won, pairs
