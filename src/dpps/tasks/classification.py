"""Which class: softmax over the classes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dpps.errors import UsageError
from dpps.tasks.task import TASKS, TargetColumn, Task, Values, column, only


@TASKS.register("classification")
@dataclass(frozen=True)
class Classification(Task):
    """Which of several classes.

    Attributes:
        classes: their names, in the order of the model's outputs.
        label: the column they stand in.
    """

    classes: tuple[str, ...]
    label: str = "label"

    name = "classification"
    kind = "class"
    about = "classes"
    metrics = ("accuracy", "log-loss", "brier", "auroc", "calibration-slope", "calibration")
    example: ClassVar[Mapping[str, Any]] = {"column": "diagnosis", "classes": ["benign", "malignant"]}

    @classmethod
    def parse(cls, entry: Mapping[str, Any], where: str) -> Self:
        only(entry, ("column", "classes"), where)
        classes = entry.get("classes")
        if (
            not isinstance(classes, list | tuple)
            or not all(type(c) in (str, int) for c in classes)
            or len({*map(str, classes)}) < max(2, len(classes))
        ):
            raise UsageError(
                f'{where}: classes is {classes!r}: give two or more texts or whole numbers, each once, such as ["no", "yes"]'
            )
        return cls(tuple(map(str, classes)), column(entry, "column", where))

    def declaration(self) -> dict[str, Any]:
        return {"column": self.label, "classes": self.classes}

    @property
    def columns(self) -> tuple[TargetColumn, ...]:
        return (TargetColumn(self.label, "category", self.classes),)

    def targets(self, columns: Sequence[Values]) -> Tensor:
        return torch.from_numpy(np.asarray(columns[0]).astype(np.int64))

    @property
    def outputs(self) -> int:
        return len(self.classes)

    @property
    def loss(self) -> Any:
        return F.cross_entropy

    def constant(self, targets: Tensor) -> Tensor:
        counts = torch.bincount(targets, minlength=self.outputs).double()
        return ((counts + 0.5) / (counts.sum() + 0.5 * self.outputs)).log().float()

    def predictions(self, outputs: Tensor) -> dict[str, list[Any]]:
        probabilities = outputs.double().softmax(1)
        shown = {f"probability of {c}": probabilities[:, k].tolist() for k, c in enumerate(self.classes)}
        return {"prediction": [self.classes[k] for k in probabilities.argmax(1).tolist()], **shown}
