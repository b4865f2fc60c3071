"""Which engine computes the gradients of a model: the fastest one that is right for it."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from dpps.learning.gradients.batch import Engine, EngineName, Loop, Vectorised
from dpps.learning.gradients.calling import (
    FAILURES,
    Loss,
    ModelLoss,
    in_short,
    loss_of,
    pick,
    quiet,
    tensors_in,
)
from dpps.learning.gradients.chain import Chained, Chains, is_chain
from dpps.learning.gradients.clipped import Batched, OneByOne, PerExample, Weigh
from dpps.learning.partition import Partition
from dpps.learning.preflight import check_model, made_up

_LARGE = 1 << 18  # numbers that a node's batch leaves behind on its way forward; measured on a CPU

_log = logging.getLogger(__name__)


def choose_engine(
    partition: Partition,
    loss: Loss,
    example: tuple[Any, Any],
    rows: Sequence[int] = (0,),
    *,
    batch: int = 1,
    seed: int = 0,
    name: EngineName = "auto",
) -> Engine:
    """What computes the gradients of whole batches.

    Args:
        partition: of the model.
        loss: of (outputs, targets), a mean over the batch; or a `ModelLoss`.
        example: one example's inputs and target; only shapes and types are looked at: no choice may depend on anybody's data.
        rows: the nodes held here.
        batch: how many examples a node's batch has, a public number.
        seed: of dropout.
        name: "auto", or force one.
    """
    if name == "auto" and _is_chain(partition, loss, example):
        return Chained(partition, loss, rows, seed)
    reason = "asked for" if name == "loop" else None
    if name == "auto":
        two = made_up(example, 2)
        reason = (
            _loop_reason(partition.model, tensors_in(two)[0].device)
            or _trial(Vectorised(partition, loss, rows[:1], seed), two)
            or _large(partition.model, loss, two, batch)
        )
    if reason is not None:
        _log.info("gradients node by node: %s", reason)
        return Loop(partition, loss, rows, seed)
    return Vectorised(partition, loss, rows, seed)


def choose_per_example(
    partition: Partition,
    loss: Loss,
    example: tuple[Any, Any],
    clip: float,
    *,
    batch: int = 1,
    weigh: Weigh | None = None,
) -> PerExample:
    """What computes sums of gradients clipped per example (unit record); the arguments as above, and as in `PerExample`.

    Raises:
        UsageError: the model mixes examples, draws random numbers, or is not fit in another way (see `check_model`).
    """
    ran = check_model(partition, loss, example, per_example=True)
    if _is_chain(partition, loss, example):
        return Chains(partition, loss, clip, batch, weigh)
    if ran:
        return Batched(partition, loss, clip, batch, weigh)
    _log.warning(
        "%s does not run on made-up examples: gradients one example after the other, which is slow",
        type(partition.model).__name__,
    )
    return OneByOne(partition, loss, clip, batch, weigh)


def _is_chain(partition: Partition, loss: Loss, example: tuple[Any, Any]) -> bool:
    plain = isinstance(example[0], Tensor) and not isinstance(loss, ModelLoss)
    return plain and is_chain(partition, example[0].ndim + 1)


def _loop_reason(model: nn.Module, device: torch.device) -> str | None:
    """Why this model needs the loop, or None."""
    for name, module in model.named_modules():
        if isinstance(module, (_BatchNorm, _InstanceNorm)) and module.track_running_stats:
            return f"{name} keeps running statistics"
        if isinstance(module, _DropoutNd) and module.p > 0:
            return f"{name} draws random numbers"
        if isinstance(module, nn.modules.conv._ConvNd) and device.type == "cpu":
            return f"{name} is a convolution, which runs faster node by node on a CPU"
    return None


@torch.no_grad()
def _large(model: nn.Module, loss: Loss, example: tuple[Any, Any], batch: int) -> str | None:
    """Whether one node's batch keeps a CPU busy: then all nodes at once gain nothing and leave its cache."""
    device, numbers = tensors_in(example)[0].device, 0
    if device.type != "cpu":
        return None

    def count(_: nn.Module, __: Any, outputs: Any) -> None:
        nonlocal numbers
        numbers += sum(part.numel() for part in tensors_in(outputs))

    inner = [module for module in model.modules() if next(module.children(), None) is None]
    hooks = [module.register_forward_hook(count) for module in inner]
    try:
        loss_of(model, {}, *example, loss)
    except FAILURES as error:
        return f"it does not run on made-up examples ({in_short(error)})"
    finally:
        for hook in hooks:
            hook.remove()
    numbers = numbers * batch // len(tensors_in(example)[0])
    if numbers <= _LARGE:
        return None
    return f"a batch of {batch} leaves {numbers:,} numbers, which runs faster node by node on a CPU"


def _trial(engine: Vectorised, example: tuple[Any, Any]) -> str | None:
    s, l = engine.partition.initial()
    device = tensors_in(example)[0].device
    x, target = (pick(part, None) for part in example)
    try:
        with quiet():
            engine.step(s[None].to(device), l[None].to(device), x, target, lambda g, _: l[None].to(g), 0)
    except FAILURES as error:  # operations it cannot batch, and what models make of tensors that are none
        return f"torch.vmap cannot run this model ({in_short(error)})"
    return None
