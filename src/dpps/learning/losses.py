"""Losses: one number per batch, and in the unit record one number per example that keeps its weight.

A loss is a function of (outputs, targets). It may return one number, or one per example (`reduction="none"`), which is then
averaged. Class weights work in every unit with the latter: a *weighted mean* divides by the sum of the weights, so the loss of
one example alone has lost its weight, and it is refused where examples are differentiated one by one.
"""

import logging
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dpps.errors import UsageError
from dpps.learning.engines.calling import Loss, ModelLoss, call_model

log = logging.getLogger(__name__)

_ROWS = 1024

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


def one_number(loss: Loss) -> Loss:
    """The same loss, averaged where it gives a number for every example."""
    if isinstance(loss, ModelLoss):
        return loss
    known = getattr(loss, "__module__", "") == "torch.nn.functional"  # one number; engines know some of them
    return loss if known else partial(_averaged, loss)


def _averaged(loss: Loss, outputs: Any, targets: Any) -> Tensor:
    value = loss(outputs, targets)
    return value if value.ndim == 0 else value.mean()


def refuse_inseparable(loss: Loss, model: nn.Module, example: Any, target: Any) -> None:
    """Refuse a loss of a batch that is neither the mean nor the sum of its examples' own losses.

    Tried on made-up outputs and targets, so that the answer says nothing about anybody's data; of the example only shape and
    type are used.
    """
    if as_function(loss) is F.cross_entropy or isinstance(loss, ModelLoss) or not isinstance(target, Tensor):
        return
    try:
        outputs, targets = made_up(model, example, target)
        alone = [loss(outputs[k : k + 1], targets[k : k + 1]) for k in range(len(targets))]
        pairs = [loss(outputs[[0, k]], targets[[0, k]]) for k in range(1, len(targets))]
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        log.warning("whether the loss treats examples one by one could not be tried (%s)", error)
        return
    if not all(_separable(pair, alone[0], other) for pair, other in zip(pairs, alone[1:], strict=True)):
        raise UsageError(
            "the loss of a batch is neither the mean nor the sum of its examples' own losses (a weighted mean, or examples that "
            "are mixed), so in the unit record one example alone would count differently: return one loss per example, for "
            'example F.cross_entropy(outputs, targets, weight=w, reduction="none")'
        )


def _separable(pair: Tensor, first: Tensor, second: Tensor) -> bool:
    """Whether the loss of a pair is made of the losses of the two, each as it is alone."""
    if pair.ndim:
        return pair.shape[0] == 2 and _close(pair, torch.cat([first, second]))
    return _close(pair, (first + second) / 2) or _close(pair, first + second)


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.allclose(a, b, rtol=1e-4, atol=1e-6))


def made_up(model: nn.Module, example: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and targets of the right shapes and types; whole numbers run through all classes."""
    mode = model.training
    model.eval()
    with torch.no_grad():
        one = call_model(model, {}, tree_map(lambda part: torch.zeros_like(part)[None], example))
    model.train(mode)
    if not isinstance(one, Tensor):
        raise TypeError(f"the model's output is a {type(one).__name__}, not a tensor")
    generator = torch.Generator().manual_seed(0)
    classes = min(one.shape[1:], default=1)
    rows = 4 if target.is_floating_point() else min(_ROWS, max(4, classes))
    outputs = torch.rand((rows, *one.shape[1:]), generator=generator).to(one) * 0.9 + 0.05
    shape = (rows, *target.shape)
    if target.is_floating_point():
        return outputs, torch.rand(shape, generator=generator).to(target)
    whole = torch.arange(rows * target.numel()).view(shape)
    return outputs, (whole % (classes if classes > 1 else 2)).to(target)
