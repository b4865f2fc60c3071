"""The base class of tasks: what is predicted, how a model learns it, and how its predictions are measured
and written.

A task is one object. The target's columns and everything that turns a cell into a number are public, as all of a schema: nothing is
computed over anybody's data. Command line, runs, predictions and reports ask the task, so adding one is one file here::

    @TASKS.register("count")
    @dataclass(frozen=True)
    class Count(Task): ...
"""

import math
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


@dataclass(frozen=True)
class TargetColumn:
    """A column of the target.

    Attributes:
        name: as in the header of a table.
        kind: "number", or "category" of which `values` are allowed, which become 0, 1, ...
        values: of a category.
        aliases: other ways to write a value of a category, in small letters.
        range: of a number: the lowest and the highest value that is possible.
    """

    name: str
    kind: str
    values: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    range: tuple[float, float] = (-1.0, 1.0)


@dataclass(frozen=True)
class Draft:
    """What one table has in a column of the target.

    Attributes:
        name: of the column.
        texts: its different values, in order.
        numbers: the number in each cell that is not missing; None where it is none.
        rows: how many rows the table has.
    """

    name: str
    texts: tuple[str, ...]
    numbers: tuple[float | None, ...]
    rows: int

    def amounts(self, where: str) -> list[float]:
        """The numbers, refused if one is none."""
        found = [number for number in self.numbers if number is not None]
        if not found or len(found) < len(self.numbers):
            raise UsageError(
                f"{where}: the column {self.name!r} holds texts: choose one that holds numbers only"
            )
        return found


class Task(ABC):
    """What a model predicts. The attributes of an instance are public: they are part of the schema."""

    name: ClassVar[str]
    """As in `--task`."""
    kind: ClassVar[str]
    """As in `[target]` of a schema."""
    about: ClassVar[str]
    """What outputs and targets are, for metrics: "classes", "numbers" or "times"."""
    metrics: ClassVar[tuple[str, ...]]
    """What is measured; the first is the headline."""
    output_noise: ClassVar[float] = 1.0
    """The standard deviation of an output that the noise of a whole run may cause: the step of the rule for linear models."""
    steepest: ClassVar[float] = 4.0
    """The largest rate of the rule for linear models, times the squared length of an example's inputs: 2 over the curvature of the
    loss in the outputs. Beyond it a run without noise would swing. A cross-entropy has the curvature 1/2."""
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

    @classmethod
    @abstractmethod
    def draft(cls, columns: Mapping[str, Draft], where: str) -> Self:
        """A first declaration, guessed from one table, for somebody to correct.

        Args:
            columns: of the target, by the names that `dpps data describe` has for them (`label`; `time`, `event`).
            where: the file, for messages.
        """

    @property
    @abstractmethod
    def columns(self) -> tuple[TargetColumn, ...]:
        """Where the target stands in a table. They are never inputs."""

    @abstractmethod
    def targets(self, columns: Sequence[np.ndarray]) -> Tensor:
        """What the loss compares outputs with, from the numbers in the target's columns."""

    # The model

    @property
    @abstractmethod
    def outputs(self) -> int:
        """How many outputs a network needs, before `head`."""

    def head(self, network: nn.Module) -> nn.Module:
        """The model: the network itself, or with what the task adds behind it, at its public start."""
        return network

    def shared(self, prefixes: tuple[str, ...]) -> tuple[str, ...]:
        """The shared part of the model, from that of the network."""
        return prefixes

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
        """The columns of a predictions file."""

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
        """A metric of the examples of several nodes together; one of a user's own has outputs and targets as they are."""
        return metric.measured(sets if metric.about is None else [self.in_units(*one) for one in sets])


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


def roles(columns: Mapping[str, Draft], needed: Sequence[str], task: str) -> list[Draft]:
    """The columns that a task needs, in this order, refused if there are others or one is not named."""
    for name in needed:
        if name not in columns:
            raise UsageError(
                f"--{name} is missing: {task} needs {' and '.join(f'--{n} COLUMN' for n in needed)}"
            )
    for name in columns:
        if name not in needed:
            raise UsageError(
                f"--{name} {columns[name].name}: {task} has {' and '.join(f'--{n}' for n in needed)}; leave it out"
            )
    return [columns[name] for name in needed]


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
    if not rising or any(a >= b for a, b in pairwise(found)):  # type: ignore[arg-type]
        raise UsageError(
            f"{where}: {key} is {found!r}: give numbers in rising order, such as {key} = {example}"
        )
    return tuple(float(x) for x in found)  # type: ignore[union-attr]


def rounded_range(numbers: list[float]) -> tuple[float, float]:
    """A range around the numbers whose ends are multiples of 1, 2 or 5 times a power of ten, at least a quarter of
    their spread: 36.2 to 40.9 gives 36 to 42. A range far wider than the values makes a column invisible."""
    low, high = min(numbers), max(numbers)
    spread = high / 4 - low / 4 or abs(low) or 1.0
    spread = min(max(spread, 1e-9 * max(abs(low), abs(high)), 1e-300), 1e300)  # ends have twelve digits
    power = math.floor(math.log10(spread) + 1e-9)
    step = next(s for s in (float(f"{k}e{power}") for k in (1, 2, 5, 10)) if s >= spread * (1 - 1e-9))
    first, last = math.floor(low / step), math.ceil(high / step)
    return float(f"{first * step:.12g}"), float(f"{max(last, first + 1) * step:.12g}")
