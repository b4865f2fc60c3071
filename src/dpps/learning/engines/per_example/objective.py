"""From a model and a batch to one loss per example."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpps.learning.engines.calling import Loss, ModelLoss, call_model, pick
from dpps.learning.engines.per_example.calls import IrregularModel
from dpps.learning.engines.per_example.losses import ExampleLosses


class Objective(ABC):
    """What is minimised."""

    @staticmethod
    def of(loss: Loss) -> "Objective":
        """For a loss of outputs and targets, or one that calls the model itself (`ModelLoss`)."""
        return _CallsModel(loss) if isinstance(loss, ModelLoss) else _OfOutputs(loss)

    @abstractmethod
    def whole(self, model: nn.Module, parameters: Mapping[str, Tensor], x: Any, target: Any) -> Tensor:
        """The loss of the batch as it is."""

    @abstractmethod
    def each(
        self,
        model: nn.Module,
        parameters: Mapping[str, Tensor],
        x: Any,
        target: Any,
        examples: int,
        recorder: AbstractContextManager[Any] | None = None,
    ) -> Tensor:
        """Every example's loss; the model runs once, inside the recorder."""


class _OfOutputs(Objective):
    def __init__(self, loss: Loss) -> None:
        self._loss, self._each = loss, ExampleLosses(loss)

    def whole(self, model: nn.Module, parameters: Mapping[str, Tensor], x: Any, target: Any) -> Tensor:
        return self._loss(call_model(model, parameters, x), target)

    def each(
        self,
        model: nn.Module,
        parameters: Mapping[str, Tensor],
        x: Any,
        target: Any,
        examples: int,
        recorder: AbstractContextManager[Any] | None = None,
    ) -> Tensor:
        with recorder or nullcontext():
            outputs = call_model(model, parameters, x)
        return self._each(outputs, target, examples)


class _CallsModel(Objective):
    """The function is called once to see what it asks the model, then for every example with that example's outputs."""

    def __init__(self, loss: ModelLoss) -> None:
        self._loss = loss

    def whole(self, model: nn.Module, parameters: Mapping[str, Tensor], x: Any, target: Any) -> Tensor:
        return self._loss.of(model, parameters, (x, target))

    def each(
        self,
        model: nn.Module,
        parameters: Mapping[str, Tensor],
        x: Any,
        target: Any,
        examples: int,
        recorder: AbstractContextManager[Any] | None = None,
    ) -> Tensor:
        record = _Record(model)
        with recorder or nullcontext():
            self._loss.of(
                record, {f"model.{name}": tensor for name, tensor in parameters.items()}, (x, target)
            )
        losses = []
        for k in range(examples):
            replay = _Replay(model, record.outputs, k, examples)
            losses.append(self._loss.function(replay, pick((x, target), slice(k, k + 1))))
            if replay.left:
                raise IrregularModel("the loss asks the model less often for one example than for a batch")
        return torch.stack(losses)


class _Record(nn.Module):
    """The model, keeping what it answers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.outputs: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model says."""
        self.outputs.append(self.model(*args, **kwargs))
        return self.outputs[-1]


class _Replay(nn.Module):
    """Answers with one example's part of what the model said of the batch."""

    def __init__(self, model: nn.Module, outputs: list[Any], example: int, examples: int) -> None:
        super().__init__()
        self._outputs, self._example, self._examples = iter(outputs), example, examples
        self.left = len(outputs)
        self.config = getattr(model, "config", None)

    def forward(self, *_: Any, **__: Any) -> Any:
        """The next answer, for this example."""
        if not self.left:
            raise IrregularModel("the loss asks the model more often for one example than for a batch")
        self.left -= 1
        leaves, kind = tree_flatten(next(self._outputs))
        return tree_unflatten([self._own(leaf) for leaf in leaves], kind)

    def _own(self, part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        if part.ndim == 0 or part.shape[0] != self._examples:
            raise IrregularModel(
                "the model answers with a number for the whole batch: take the loss from its logits"
            )
        return part[self._example : self._example + 1]
