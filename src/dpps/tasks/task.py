"""What a task is: what is predicted, how a model learns it, and how its predictions are judged and written.

A task is one object. The target's columns and everything that turns a cell into a number are public, as all of a schema: nothing is
computed over anybody's data. Command line, runs, predictions and reports ask the task, so adding one is one file here::

    @TASKS.register("count")
    @dataclass(frozen=True)
    class Count(Task): ...
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Self

import numpy as np
from torch import Tensor, nn

from dpps.errors import UsageError, unknown
from dpps.registry import Registry
from dpps.tasks.estimates import Estimates, Measured, of_nodes, of_one_set
from dpps.tasks.metrics import METRICS, Metric, Set

Values = np.ndarray


@dataclass(frozen=True)
class TargetColumn:
    """A column of the target.

    Attributes:
        name: as in the header of a table.
        kind: "number", or "category" of which `values` are allowed, which become 0, 1, ...
        values: of a category.
        aliases: other ways to write a value of a category, in small letters.
    """

    name: str
    kind: str
    values: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)


class Task(ABC):
    """What is predicted. Attributes of an instance are public: they stand in the schema."""

    name: ClassVar[str]
    """As in `--task`."""
    kind: ClassVar[str]
    """As in `[target]` of a schema."""
    about: ClassVar[str]
    """What outputs and targets are, for metrics: "classes", "numbers" or "times"."""
    metrics: ClassVar[tuple[str, ...]]
    """What is measured; the first is the headline."""
    example: ClassVar[Mapping[str, Any]]
    """What `parse` reads, as an example for people, and for tests, whose numbers are around 20."""

    # The target

    @classmethod
    @abstractmethod
    def parse(cls, entry: Mapping[str, Any], where: str) -> Self:
        """The task that `[target]` of a schema declares.

        Args:
            entry: as TOML has it, without `kind`.
            where: the file, for messages.
        """

    @abstractmethod
    def declaration(self) -> dict[str, Any]:
        """What `parse` reads."""

    @property
    @abstractmethod
    def columns(self) -> tuple[TargetColumn, ...]:
        """Where the target stands in a table. They are never inputs."""

    @abstractmethod
    def targets(self, columns: Sequence[Values]) -> Tensor:
        """What the loss compares outputs with, from the numbers in the target's columns."""

    # The model

    @property
    @abstractmethod
    def outputs(self) -> int:
        """How many outputs a network needs, before `head`."""

    def head(self, network: nn.Module) -> nn.Module:
        """The model: the network itself, or with what the task adds behind it, at its public start."""
        return network

    @property
    @abstractmethod
    def loss(self) -> Any:
        """A function of (outputs, targets): a mean over the batch, or one number per example."""

    @property
    def weigh(self) -> Callable[[Tensor], Tensor] | None:
        """From targets to one weight for every example, between 0 and 1; None: all count the same. Where gradients are clipped one by
        one, it is applied after the clip."""
        return None

    # Predictions

    @abstractmethod
    def constant(self, targets: Tensor) -> Tensor:
        """The outputs of the best prediction that is the same for everybody, (outputs of the model,): the baseline. Computed of
        private targets, it is for the node's own eyes."""

    @abstractmethod
    def predictions(self, outputs: Tensor) -> dict[str, list[Any]]:
        """Columns of a file of predictions."""

    def in_units(self, outputs: Tensor, targets: Tensor) -> Set:
        """Outputs and targets as metrics compare them."""
        return outputs, targets

    # How good it is

    def metric(self, name: str) -> Metric:
        """One of the metrics that suit the task."""
        found = METRICS[name]
        if found.about != self.about:
            allowed = (known for known in METRICS.names() if METRICS[known].about == self.about)
            raise unknown(f"metric of {self.name}", name, tuple(dict.fromkeys((*self.metrics, *allowed))))
        return found

    @property
    def headline(self) -> Metric:
        """What a model is judged by."""
        return self.metric(self.metrics[0])

    def measured(self, metric: Metric, sets: Sequence[Set]) -> Measured:
        """A metric of the examples of several nodes together."""
        return metric.measured([self.in_units(*one) for one in sets])


def measure(task: Task, metric: Metric, sets: Sequence[Set], *, common: bool = False) -> Estimates:
    """A metric of the models of several nodes.

    Args:
        task: what is predicted.
        metric: what is measured.
        sets: outputs and targets of each node.
        common: whether all nodes are measured on the same examples.
    """
    if common:
        return of_one_set([task.measured(metric, [one]) for one in sets])
    return of_nodes(task.measured(metric, sets), [_or_none(task, metric, [one]) for one in sets])


def compare(
    task: Task, metric: Metric, before: Sequence[Set], after: Sequence[Set], *, common: bool = False
) -> Estimates:
    """How a metric changes from one model of every node to another, on the same examples.

    Args:
        task: what is predicted.
        metric: what is measured.
        before: outputs of the first model and targets, of each node.
        after: the same of the second model.
        common: whether all nodes are measured on the same examples.
    """
    pairs = list(zip(before, after, strict=True))
    if common:
        return of_one_set([task.measured(metric, [b]) - task.measured(metric, [a]) for a, b in pairs])
    nodes: list[Measured | None] = []
    for one, other in pairs:
        first, second = _or_none(task, metric, [one]), _or_none(task, metric, [other])
        nodes.append(None if first is None or second is None else second - first)
    return of_nodes(task.measured(metric, after) - task.measured(metric, before), nodes)


def _or_none(task: Task, metric: Metric, sets: Sequence[Set]) -> Measured | None:
    """None where it is not defined for one node, such as the AUROC of one class."""
    try:
        return task.measured(metric, sets)
    except UsageError:
        return None


TASKS: Registry[type[Task]] = Registry("task", "dpps.tasks")
"""Tasks by name."""


def parse_target(entry: Any, where: str) -> Task:
    """The task that `[target]` of a schema declares."""
    if not isinstance(entry, Mapping):
        raise UsageError(
            f'{where}: target is {entry!r}: write [target] with kind = "class" and column = "..."'
        )
    kinds = {TASKS[name].kind: TASKS[name] for name in TASKS.names()}
    kind = entry.get("kind")
    if kind not in kinds:
        raise unknown(f"kind of [target] in {where}", kind, tuple(kinds))
    return kinds[kind].parse({k: v for k, v in entry.items() if k != "kind"}, f"{where}, [target]")


def only(entry: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    """Refuse entries that mean nothing."""
    for key in entry:
        if key not in keys:
            raise unknown(f"entry in {where}", key, keys)


def column(entry: Mapping[str, Any], key: str, where: str) -> str:
    """The name of a column."""
    found = entry.get(key)
    if not isinstance(found, str) or not found:
        raise UsageError(f'{where}: {key} is {found!r}: name a column, such as {key} = "outcome"')
    return found


def numbers(entry: Mapping[str, Any], key: str, where: str, example: str) -> tuple[float, ...]:
    """Finite numbers, each larger than the one before."""
    found = entry.get(key)
    rising = isinstance(found, list | tuple) and all(
        type(x) in (int, float) and np.isfinite(x) for x in found
    )
    if not rising or any(a >= b for a, b in pairwise(found)):  # type: ignore[index,arg-type]
        raise UsageError(
            f"{where}: {key} is {found!r}: give numbers in rising order, such as {key} = {example}"
        )
    return tuple(float(x) for x in found)  # type: ignore[union-attr]
