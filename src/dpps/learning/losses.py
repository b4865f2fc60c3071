"""Losses: one number per batch, and in the unit record one number per example that keeps its weight.

A loss is a function of (outputs, targets). It may return one number, or one per example (`reduction="none"`), which is then
averaged. Class weights work in every unit with the latter: a *weighted mean* divides by the sum of the weights, so the loss of
one example alone has lost its weight, and it is refused where examples are differentiated one by one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from dpps.learning.gradients.calling import ExampleLosses, Loss, ModelLoss

_FUNCTIONS: dict[type[nn.Module], Loss] = {
    nn.CrossEntropyLoss: F.cross_entropy,
    nn.MSELoss: F.mse_loss,
    nn.L1Loss: F.l1_loss,
    nn.SmoothL1Loss: F.smooth_l1_loss,
    nn.HuberLoss: F.huber_loss,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
    nn.BCELoss: F.binary_cross_entropy,
}
"""What torch's loss modules compute with their default settings. Engines know some of the functions."""


def as_function(loss: Loss) -> Loss:
    """torch's function for a loss module of torch with default settings, such as `F.cross_entropy` for `nn.CrossEntropyLoss()`;
    any other loss as it is."""
    kind = type(loss)
    if kind in _FUNCTIONS and _settings(loss) == _settings(kind()):
        return _FUNCTIONS[kind]
    return loss


def _settings(module: Any) -> dict[str, Any]:
    """Numbers, and whether there are weights and hooks."""
    found = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    tensors = len(list(module.buffers()))
    return found | {"tensors": tensors, "hooks": len(module._forward_hooks) + len(module._forward_pre_hooks)}


def takes_classes(loss: Loss) -> bool:
    """Whether targets are class numbers: the loss is torch's cross-entropy, with whatever weights or label smoothing."""
    return loss is F.cross_entropy or isinstance(loss, nn.CrossEntropyLoss)


def ignored_label(loss: Loss) -> int | None:
    """The label that somebody chose for examples without a class."""
    return loss.ignore_index if isinstance(loss, nn.CrossEntropyLoss) else None


def weighted(loss: Loss, weigh: Callable[[Any], Tensor] | None) -> Loss:
    """The same loss, of a batch, with every example's loss multiplied by its weight."""
    return (
        loss
        if weigh is None or isinstance(loss, ModelLoss)
        else partial(_weighted, ExampleLosses(loss), weigh)
    )


def _weighted(each: ExampleLosses, weigh: Callable[[Any], Tensor], outputs: Any, targets: Any) -> Tensor:
    return (each(outputs, targets, len(outputs)) * weigh(targets).to(outputs)).mean()


def one_number(loss: Loss) -> Loss:
    """The same loss, averaged where it gives a number for every example."""
    if isinstance(loss, ModelLoss):
        return loss
    known = getattr(loss, "__module__", "") == "torch.nn.functional"  # one number; engines know some of them
    return loss if known else partial(_averaged, loss)


def _averaged(loss: Loss, outputs: Any, targets: Any) -> Tensor:
    value = loss(outputs, targets)
    return value if value.ndim == 0 else value.mean()
