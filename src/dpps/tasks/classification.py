"""Classification: softmax over the classes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dpps.errors import UsageError
from dpps.tasks.task import TASKS, Column, Draft, Task, column, only, roles, texts


@TASKS.register("classification")
@dataclass(frozen=True)
class Classification(Task):
    """Predict one of several classes.

    Attributes:
        classes: names of the classes, in the order of the model's outputs.
        label: the column they stand in.
        weights: weight of an example of each class, scaled so that the largest is 1. None: all classes
            count the same. Public.
    """

    classes: tuple[str, ...]
    label: str = "label"
    weights: tuple[float, ...] | None = None

    name = "classification"
    kind = "class"
    about = "classes"
    metrics = ("accuracy", "log-loss", "brier", "auroc", "calibration-slope", "calibration")
    example: ClassVar[Mapping[str, Any]] = {"column": "diagnosis", "classes": ["benign", "malignant"]}

    @classmethod
    def parse(cls, entry: Mapping[str, Any], where: str) -> Self:
        only(entry, ("column", "classes", "weights"), where)
        weights = entry.get("weights")
        if weights is not None:
            if not isinstance(weights, list | tuple) or any(type(w) not in (int, float) for w in weights):
                raise UsageError(
                    f"{where}: weights is {weights!r}: give one number for each class, such as [1, 6]"
                )
            weights = tuple(map(float, weights))
        return cls(texts(entry, "classes", where, 2), column(entry, "column", where), weights)

    @classmethod
    def draft(cls, columns: Mapping[str, Draft], where: str) -> Self:
        (label,) = roles(columns, ("label",), cls.name)
        if len(label.texts) < 2 or len(label.texts) > max(20, label.rows // 2):
            raise UsageError(
                f"{where}: the label {label.name!r} has {len(label.texts)} different values in {label.rows} examples: choose a label "
                "with 2 or more classes that occur again and again, or --task regression for a number"
            )
        return cls(label.texts, label.name)

    def __post_init__(self) -> None:
        if self.weights is not None and (
            len(self.weights) != len(self.classes) or not all(np.isfinite(w) and w > 0 for w in self.weights)
        ):
            raise UsageError(
                f"the weights of the classes are {list(self.weights)}: give {len(self.classes)} numbers above 0, one for each class"
            )

    @property
    def weigh(self) -> Callable[[Tensor], Tensor] | None:
        return None if self.weights is None else self._weights_of

    def _weights_of(self, targets: Tensor) -> Tensor:
        assert self.weights is not None
        scaled = torch.tensor(self.weights, device=targets.device) / max(self.weights)
        known = (targets >= 0) & (targets < len(self.weights))
        return torch.where(known, scaled[targets.clamp(0, len(self.weights) - 1)], 0.0)

    def declaration(self) -> dict[str, Any]:
        written = {} if self.weights is None else {"weights": self.weights}
        return {"column": self.label, "classes": self.classes, **written}

    @property
    def columns(self) -> tuple[Column, ...]:
        return (Column(self.label, "category", values=self.classes),)

    def targets(self, columns: Sequence[np.ndarray]) -> Tensor:
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
