"""How a model is called: one tensor, a tuple (positions) or a dictionary (names), and what counts as its output."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dpps.errors import UsageError
from dpps.models.swapping import swapped

Loss = Callable[[Any, Any], Tensor]
"""Takes a model's outputs and the targets of a batch; a mean over the batch. Or a `ModelLoss`."""


FAILURES = (Exception,)
"""What a model may raise that does not like an example: anything. Stopping because of some kinds would tell of the example."""


WRITES = (
    "the model writes over its own parameters while it runs (an embedding with max_norm does), so they would follow "
    "the data without noise; use layers that do not (max_norm=None)"
)


def in_short(error: BaseException | None) -> str:
    """The first line of what an error says, or its name where it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)


class ModelLoss:
    """A loss that calls the model itself: `function(model, (inputs, targets))`, a mean over the batch,
    or one number per example, which is averaged.

    It must ask the model the same, whatever the batch; whatever the model answers must have the examples first.
    """

    def __init__(self, function: Callable[[Any, Any], Tensor]) -> None:
        self.function = function

    def __repr__(self) -> str:
        return f"ModelLoss({self.function!r})"

    def of(self, model: nn.Module, tensors: Mapping[str, Tensor], batch: Any) -> Tensor:
        """The loss with these parameters and buffers in place of the model's own."""
        with swapped(model, tensors):
            value = self.function(model, batch)
        return value if value.ndim == 0 else value.mean()

    def __call__(self, outputs: Any, target: Any) -> Tensor:
        """Not known from outputs alone."""
        raise TypeError("a ModelLoss calls the model itself: it has no value for given outputs")


def loss_of(model: nn.Module, tensors: Mapping[str, Tensor], x: Any, target: Any, loss: Loss) -> Tensor:
    """The loss of a batch with these parameters and buffers in place of the model's own."""
    if isinstance(loss, ModelLoss):
        return loss.of(model, tensors, (x, target))
    return loss(call_model(model, tensors, x), target)


def call_model(model: nn.Module, tensors: Mapping[str, Tensor], x: Any) -> Any:
    """The outputs for a batch, with these parameters and buffers in place of the model's own."""
    with swapped(model, tensors):
        if isinstance(x, Mapping):
            return logits_of(model(**x))
        return logits_of(model(*x) if isinstance(x, (tuple, list)) else model(x))


def logits_of(outputs: Any) -> Any:
    """The logits where a model wraps them (as the models of `transformers` do), otherwise the outputs themselves."""
    logits = getattr(outputs, "logits", None)
    return logits if isinstance(logits, Tensor) else outputs


@contextmanager
def unwritten(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Refuse a model that writes over parameters while it runs: they would follow the data, and no noise would hide that."""
    held = list(tensors)
    before = [tensor._version for tensor in held]
    yield
    if [tensor._version for tensor in held] != before:
        raise UsageError(WRITES)


def tensors_in(batch: Any) -> list[Tensor]:
    """All tensors of a batch that may be nested."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def pick(batch: Any, which: Any) -> Any:
    """The same part of every tensor of a batch: an index, a slice or a mask."""
    if isinstance(batch, Tensor):
        return batch[which]
    return tree_map(lambda part: part[which] if isinstance(part, Tensor) else part, batch)


def move(batch: Any, device: torch.device) -> Any:
    """All tensors of a batch on this device."""
    return tree_map(lambda part: part.to(device) if isinstance(part, Tensor) else part, batch)
