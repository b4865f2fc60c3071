"""The base class of tasks: what is predicted, how a model learns it, and how its predictions are measured and written.

Everything that turns a cell of the target's columns into a number is public, as all of a schema: nothing is computed over anybody's
data. Command line, runs, predictions and reports ask the task, so a new task is one file here::

    @TASKS.register("count")
    @dataclass(frozen=True)
    class Count(Task): ...
"""

import math
import sys
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
class Column:
    """What is public about one column of a table.

    Attributes:
        name: as in the header.
        kind: "number", "category", "date" or "ignore".
        range: of a number: what is mapped to -1 and to 1. What lies outside counts as the nearer end. Of a date: in days.
        values: of a category. The first is the one that all inputs are 0 for; each other one has an input of its own.
        undeclared: "missing" if any other value of a category counts as missing; "refuse" if it is a mistake.
        missing: whether there is an input that is 1 where the value is not known. Without one, a missing value counts as the
            middle of the range, or lies between all values of a category.
        aliases: other ways to write a value of a category.
        since: of a date: the public day from which days are counted, as 2000-01-31.
        format: of a date: how it is written, as in Python's `strptime`.
    """

    name: str
    kind: str
    range: tuple[float, float] = (-1.0, 1.0)
    values: tuple[str, ...] = ()
    undeclared: str = "refuse"
    missing: bool = False
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    since: str = ""
    format: str = "%Y-%m-%d"

    @property
    def width(self) -> int:
        """How many inputs of the model it becomes."""
        if self.kind == "ignore":
            return 0
        return (len(self.values) - 1 if self.kind == "category" else 1) + self.missing

    @property
    def square(self) -> float:
        """The mean square of its inputs, if all values are equally likely."""
        if self.kind == "ignore":
            return 0.0
        return (len(self.values) - 1) / len(self.values) if self.kind == "category" else 1 / 3

    @property
    def places(self) -> dict[str, int]:
        """Of a category: the place of each value and of its aliases."""
        found = {value: k for k, value in enumerate(self.values)}
        return found | {canonical(a): found[value] for value, others in self.aliases.items() for a in others}


def canonical(text: str) -> str:
    """A class or category as it is compared: whole numbers lose the `.0` that other programs add, and true and false are lower case."""
    if text.lower() in ("true", "false"):
        return text.lower()
    whole = text.removesuffix(".0")
    return whole if whole.removeprefix("-").isdecimal() else text


@dataclass(frozen=True)
class Draft:
    """What one table has in a column of the target, to draft a task from.

    Attributes:
        name: of the column.
        texts: its different values, in order.
        numbers: the number in each cell that is not missing; None where the cell holds a text.
        rows: how many rows the table has.
    """

    name: str
    texts: tuple[str, ...]
    numbers: tuple[float | None, ...]
    rows: int

    def amounts(self, where: str) -> list[float]:
        """The numbers; texts are refused."""
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
    """The standard deviation that the noise of a whole run may cause in an output, for the rule for linear models."""
    steepest: ClassVar[float] = 4.0
    """The largest rate of the rule for linear models, times the squared length of an example's inputs: 2 over the curvature of the
    loss in the outputs. Beyond it a run without noise would oscillate. A cross-entropy has the curvature 1/2."""
    example: ClassVar[Mapping[str, Any]]
    """An example of what `parse` reads, for people and for tests, whose numbers are around 20."""

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
    def columns(self) -> tuple[Column, ...]:
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
        """A function from targets to one weight between 0 and 1 for every example; None: all count the same. Where gradients are
        clipped one by one, it is applied after the clip."""
        return None

    # Predictions

    @abstractmethod
    def constant(self, targets: Tensor) -> Tensor:
        """The baseline: the outputs of the best prediction that is the same for everybody, (outputs of the model,). It is computed
        from private targets, so it is for the node's own eyes."""

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
        """A metric of the examples of several nodes together. A user's own metric gets outputs and targets as they are."""
        return metric.measured(sets if metric.about is None else [self.in_units(*one) for one in sets])


def measure(task: Task, metric: Metric, sets: Sequence[Set], *, common: bool = False) -> Estimates:
    """A metric of the models of several nodes.

    Args:
        task: what is predicted.
        metric: what is measured.
        sets: outputs and targets of each node.
        common: whether all nodes are measured on the same examples.
    """
    return _estimates(lambda nodes: task.measured(metric, sets[nodes]), len(sets), common)


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

    def change(nodes: slice) -> Measured:
        return task.measured(metric, after[nodes]) - task.measured(metric, before[nodes])

    return _estimates(change, len(before), common)


def _estimates(measured: Callable[[slice], Measured], nodes: int, common: bool) -> Estimates:
    """From a number of the examples of some nodes; it may not be defined for one of them, such as the AUROC of one class."""
    each = [slice(k, k + 1) for k in range(nodes)]
    if common:
        return of_one_set([measured(one) for one in each])
    found: list[Measured | None] = []
    for one in each:
        try:
            found.append(measured(one))
        except UsageError:
            found.append(None)
    return of_nodes(measured(slice(None)), found)


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
    if not isinstance(kind, str) or kind not in kinds:
        raise unknown(f"kind of [target] in {where}", kind, tuple(kinds))
    return kinds[kind].parse({k: v for k, v in entry.items() if k != "kind"}, f"{where}, [target]")


def roles(columns: Mapping[str, Draft], needed: Sequence[str], task: str) -> list[Draft]:
    """The columns that a task needs, in this order. Others are refused, and so is a missing one."""
    wanted = " and ".join(f"--{name} COLUMN" for name in needed)
    for name in needed:
        if name not in columns:
            raise UsageError(f"--{name} is missing: {task} needs {wanted}")
    for name in columns:
        if name not in needed:
            raise UsageError(f"--{name} {columns[name].name}: {task} needs only {wanted}; leave it out")
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


def numbers(
    entry: Mapping[str, Any], key: str, where: str, example: str, count: int | None = None
) -> tuple[float, ...]:
    """Finite numbers, each larger than the one before; `count` of them, if given."""
    found = entry.get(key)
    if (
        not isinstance(found, list | tuple)
        or not all(type(x) in (int, float) and abs(x) <= sys.float_info.max for x in found)
        or any(a >= b for a, b in pairwise(found))
        or len(found) != (count or len(found))
    ):
        raise UsageError(
            f"{where}: {key} is {found!r}: give {'numbers' if count is None else f'{count} numbers'} in rising order, "
            f"such as {key} = {example}"
        )
    return tuple(map(float, found))


def texts(entry: Mapping[str, Any], key: str, where: str, least: int) -> tuple[str, ...]:
    """Texts, or whole numbers as texts; each once."""
    given: Any = entry.get(key)
    listed = isinstance(given, list | tuple) and all(type(value) in (str, int) for value in given)
    found = tuple(canonical(str(value)) for value in given) if listed else ()
    if not listed or len(set(found)) < max(least, len(found)):
        raise UsageError(
            f"{where}: {key} is {given!r}: give {least} or more texts or whole numbers, each once, such as "
            f'{key} = ["no", "yes"]'
        )
    return found


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
