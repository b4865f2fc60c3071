"""Tasks for tests: made-up tables in which the first input tells of the target, and a task that is one file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dpps.tasks import Draft, TargetColumn, Task
from dpps.tasks.task import Values, column, only, roles

INPUTS = 5


@dataclass(frozen=True)
class Count(Task):
    """How often: Poisson regression, by the logarithm of the rate. All that a task needs."""

    label: str = "count"

    name = "count"
    kind = "count"
    about = "numbers"
    metrics = ("mae", "rmse", "r2")
    example: ClassVar[Mapping[str, Any]] = {"column": "visits"}

    @classmethod
    def parse(cls, entry: Mapping[str, Any], where: str) -> Self:
        only(entry, ("column",), where)
        return cls(column(entry, "column", where))

    @classmethod
    def draft(cls, columns: Mapping[str, Draft], where: str) -> Self:
        (label,) = roles(columns, ("label",), cls.name)
        label.amounts(where)
        return cls(label.name)

    def declaration(self) -> dict[str, Any]:
        return {"column": self.label}

    @property
    def columns(self) -> tuple[TargetColumn, ...]:
        return (TargetColumn(self.label, "number"),)

    def targets(self, columns: Sequence[Values]) -> Tensor:
        return torch.from_numpy(np.asarray(columns[0])).float()[:, None]

    @property
    def outputs(self) -> int:
        return 1

    @property
    def loss(self) -> Any:
        return F.poisson_nll_loss

    def constant(self, targets: Tensor) -> Tensor:
        return targets.double().mean(0).log().float()

    def predictions(self, outputs: Tensor) -> dict[str, list[Any]]:
        return {"prediction": outputs.double().exp()[:, 0].tolist()}

    def in_units(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return outputs.double().exp(), targets.double()


def made_up(task: Task, sizes: Sequence[int], seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of nodes of these sizes. Numbers are around 20, and lower where the first input is high; the last value of a
    category is the more likely the higher it is."""
    rng, nodes = np.random.default_rng(seed), []
    for size in sizes:
        x = rng.normal(size=(size, INPUTS))
        found = []
        for target in task.columns:
            if target.kind == "number":
                found.append(20 * np.exp(-0.7 * x[:, 0] + 0.2 * rng.normal(size=size)).round(3))
            else:
                found.append(
                    np.clip(x[:, 0] + 0.5 * rng.normal(size=size) + 0.5, 0, len(target.values) - 1).round()
                )
        nodes.append((torch.from_numpy(x).float(), task.targets(found)))
    return nodes
