"""Regression: a number within a public range."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dpps.errors import UsageError
from dpps.tasks.metrics import Set
from dpps.tasks.task import TASKS, Column, Draft, Task, column, numbers, only, roles, rounded_range


@TASKS.register("regression")
@dataclass(frozen=True)
class Regression(Task):
    """Predict a number. Models learn it by squared error, scaled from its public range to -1..1, and start
    in the middle of the range.

    Attributes:
        low: the lowest possible value; lower values count as this one.
        high: the highest.
        label: the column it stands in.
    """

    low: float
    high: float
    label: str = "target"

    name = "regression"
    kind = "number"
    about = "numbers"
    metrics = ("rmse", "mae", "r2")
    output_noise = 0.2
    steepest = 1.0  # a squared error has the curvature 2
    example: ClassVar[Mapping[str, Any]] = {"column": "stay_days", "range": [0, 60]}

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise UsageError(
                f"the range of {self.label} is {self.low:g} to {self.high:g}: give a lowest and a higher highest value"
            )

    @classmethod
    def parse(cls, entry: Mapping[str, Any], where: str) -> Self:
        only(entry, ("column", "range"), where)
        low, high = numbers(entry, "range", where, "[0, 60]", count=2)
        return cls(low, high, column(entry, "column", where))

    @classmethod
    def draft(cls, columns: Mapping[str, Draft], where: str) -> Self:
        (label,) = roles(columns, ("label",), cls.name)
        return cls(*rounded_range(label.amounts(where)), label.name)

    def declaration(self) -> dict[str, Any]:
        return {"column": self.label, "range": (self.low, self.high)}

    @property
    def columns(self) -> tuple[Column, ...]:
        return (Column(self.label, "number", (self.low, self.high)),)

    def targets(self, columns: Sequence[np.ndarray]) -> Tensor:
        within = np.clip(np.asarray(columns[0], dtype=np.float64), self.low, self.high)
        middle, half = self.low / 2 + self.high / 2, self.high / 2 - self.low / 2
        return torch.from_numpy((within - middle) / half).float()[:, None]

    def _unscaled(self, values: Tensor) -> Tensor:
        return values.double() * (self.high / 2 - self.low / 2) + (self.low / 2 + self.high / 2)

    @property
    def outputs(self) -> int:
        return 1

    @property
    def loss(self) -> Any:
        return F.mse_loss

    def constant(self, targets: Tensor) -> Tensor:
        return targets.double().mean(0).float()

    def predictions(self, outputs: Tensor) -> dict[str, list[Any]]:
        return {"prediction": self._unscaled(outputs)[:, 0].tolist()}

    def in_units(self, outputs: Tensor, targets: Tensor) -> Set:
        rows = len(targets)
        return self._unscaled(outputs).reshape(rows, -1), self._unscaled(targets).reshape(rows, -1)
