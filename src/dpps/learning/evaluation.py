"""How good the models are: each node's model on test data and on its own.

`dpps.tasks` has the metrics. Nothing here is noised: a metric of private examples is for the node's own eyes.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from dpps.errors import UsageError
from dpps.learning.gradients.calling import FAILURES, pick
from dpps.tasks import ClassRow, Estimates, Metric, Task, measure, per_class
from dpps.tasks.metrics import Set

if TYPE_CHECKING:
    from dpps.learning.gradients.batch import Engine

log = logging.getLogger(__name__)

Inputs = Any
"""Of a batch: a tensor, or tensors in a tuple or a dictionary, the examples first."""

_Found = TypeVar("_Found")

EVALUATED = 64
"""Nodes whose models are evaluated at once, and of a larger network those after every epoch that is not the last."""


def unless_it_fails(measure: Callable[[], _Found], otherwise: _Found, *, hidden: bool) -> _Found:
    """What `measure` gives on a node's own examples; `otherwise` if the model fails on one of them and that is hidden (a run must
    not stop because of anybody's data)."""
    try:
        return measure()
    except FAILURES as error:
        if not hidden or isinstance(error, UsageError):
            raise
        log.warning("not measured: the model failed on an example (%s: %s)", type(error).__name__, error)
        return otherwise


def outputs_of(engine: "Engine", k: int, s: Tensor, l: Tensor, x: Inputs, count: int) -> Tensor:
    """What the k-th node held here answers to all `count` examples, with this s and this l."""
    starts = range(0, count, engine.at_once)
    return torch.cat([engine.outputs_of(k, s, l, pick(x, slice(a, a + engine.at_once))) for a in starts])


def accuracy_of(engine: "Engine", k: int, s: Tensor, l: Tensor, x: Inputs, labels: Tensor) -> float:
    """Accuracy in percent of the k-th node held here, with this s and this l."""
    right = outputs_of(engine, k, s, l, x, len(labels)).argmax(-1) == labels
    return 100 * int(right.sum()) / len(labels)


def accuracies(engine: "Engine", s: Tensor, l: Tensor, x: Inputs, labels: Tensor) -> list[float]:
    """The paper's evaluation: the averaged s with each node's own l on the whole test set; percent, one per node."""
    if not engine.state():
        if not l.shape[1]:  # all nodes have the same model
            return [accuracy_of(engine, 0, s, l[0], x, labels)] * len(l)
        if len(l) > EVALUATED:  # many nodes at once would leave room for few examples
            parts = torch.split(l, EVALUATED)
            return [found for part in parts for found in accuracies(engine, s, part, x, labels)]
    right = torch.zeros(len(l), device=labels.device)
    for first in range(0, len(labels), engine.at_once):
        part = slice(first, first + engine.at_once)
        right += (engine.outputs(s, l, pick(x, part)).argmax(-1) == labels[part]).sum(1)
    return (100 * right / len(labels)).tolist()


def accuracies_of_some(engine: "Engine", s: Tensor, l: Tensor, x: Inputs, labels: Tensor) -> list[float]:
    """The same for `EVALUATED` nodes of a larger network, evenly spaced: a thousand local parts on a whole test set take longer
    than an epoch."""
    chosen = [k * len(l) // EVALUATED for k in range(EVALUATED)]
    if not engine.state():
        return accuracies(engine, s, l[chosen], x, labels)
    return [accuracy_of(engine, k, s, l[k], x, labels) for k in chosen]


def own_accuracies(
    engine: "Engine", s: Tensor, l: Tensor, held_out: Sequence[tuple[Inputs, Tensor]]
) -> list[float]:
    """Every node on examples held out of its own data (`held_out[k]` belongs to the k-th row): what local heads are for."""
    return [accuracy_of(engine, k, s, l[k], *examples) for k, examples in enumerate(held_out)]


def are_classes(targets: Any) -> bool:
    """Whether targets are class numbers, one for each example, so that there is an accuracy."""
    return isinstance(targets, Tensor) and targets.ndim == 1 and not targets.is_floating_point()


def are_classes_only(sets: Mapping[str, Sequence[tuple[Inputs, Tensor]]]) -> bool:
    """Whether all targets are class numbers."""
    return all(are_classes(targets) for data in sets.values() for _, targets in data)


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


def scores_of(
    task: Task, metrics: Mapping[str, Metric], sets: Sequence[Set], *, common: bool
) -> dict[str, Estimates]:
    """Every metric that is defined for the outputs and targets of the nodes, with its standard errors; `common` says that all
    nodes are measured on the same examples."""
    found = {}
    for name, metric in metrics.items():
        try:
            found[name] = measure(task, metric, sets, common=common)
        except Exception as error:  # noqa: BLE001 - no run is lost for a metric, nor may it end by what a node holds
            log.warning("metric %s: %s", name, error)
    return found


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
    `reported` are the metrics and nodes for which a failure was logged; more are added."""
    found: dict[str, list[float | None]] = {name: [] for name in metrics}
    for k, (x, targets) in enumerate(sets):
        one = outputs_of(engine, k, s, l[k], x, len(targets)), targets
        for name, metric in metrics.items():
            try:
                found[name].append(metric(*one) if task is None else task.measured(metric, [one]).value)
            except Exception as error:  # noqa: BLE001 - as above
                if (name, k) not in reported:
                    log.warning("metric %s of node %d of those held here: %s", name, k, error)
                reported.add((name, k))
                found[name].append(None)
    return found
