r"""How good the models are: each node's model on test data and on its own, and whether a difference is chance.

`dpps.tasks` has the metrics. Nothing here is noised: a metric of private examples is for the node's own eyes.

**Comparing two models** on the same examples: an example's difference $d_e$ is 1 where only the second model is right, -1 where
only the first is, and 0 where both are right or both wrong. Two models are right on mostly the same examples, so the mean of
these paired differences is far more certain than the difference of two accuracies measured apart.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from dpps.errors import UsageError
from dpps.learning.gradients.calling import FAILURES, pick
from dpps.tasks import ClassRow, Metric, Task, per_class

if TYPE_CHECKING:
    from dpps.learning.gradients.batch import Engine

log = logging.getLogger(__name__)

Inputs = Any
"""Of a batch: a tensor, or tensors in a tuple or a dictionary, the examples first."""

_Found = TypeVar("_Found")

EVALUATED = 64
"""Nodes whose models are evaluated at once, and of a larger network those after every epoch that is not the last."""

CONFIDENCE = 1.96
"""Standard errors to either side of an estimate that cover the truth in 95 % of cases."""


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
    task: Task | None,
    sets: Sequence[tuple[Inputs, Tensor]],
) -> dict[str, list[float | None]]:
    """Every metric of each node's model (the averaged s with its own l) on `sets[k]`; None where it is not defined or fails.

    Args:
        engine: computes outputs.
        s: the averaged shared parameters.
        l: a row of local parameters for every node held here.
        metrics: by their names.
        reported: the metrics and nodes for which a failure was logged; more are added.
        task: what is predicted; None: only the metrics know.
        sets: (inputs, targets) of every node held here.
    """
    found: dict[str, list[float | None]] = {name: [] for name in metrics}
    for k, (x, targets) in enumerate(sets):
        outputs = outputs_of(engine, k, s, l[k], x, len(targets))
        for name, metric in metrics.items():
            try:
                one = (outputs, targets)
                found[name].append(metric(*one) if task is None else task.measured(metric, [one]).value)
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
