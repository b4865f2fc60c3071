"""Which engine computes the gradients of a model."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from dpps.errors import UsageError
from dpps.learning.engines.calling import (
    FAILURES,
    WRITES,
    Loss,
    ModelLoss,
    in_short,
    loss_of,
    pick,
    tensors_in,
    unwritten,
)
from dpps.learning.engines.chain import Chained, is_chain
from dpps.learning.engines.gradients import Engine, EngineName, Loop, Vectorised
from dpps.learning.engines.per_example.fallback import quiet
from dpps.learning.engines.per_example.madeup import made_up
from dpps.learning.partition import Partition

_LARGE = 1 << 18  # numbers that a node's batch leaves behind on its way forward; measured on a CPU

_log = logging.getLogger(__name__)


def choose_engine(
    partition: Partition,
    loss: Loss,
    rows: Sequence[int],
    example: tuple[Any, Any],
    seed: int = 0,
    name: EngineName = "auto",
    batch: int = 1,
) -> Engine:
    """The engine for this model: rules, one trial of the vectorised engine on one batch entry, and the size of a node's batch.

    Args:
        example: one node's (inputs, targets); only shapes and types are looked at: no choice may depend on anybody's data.
        name: "auto", or force one.
        batch: how many examples a node's batch has.
    """
    example = made_up(pick(example, 0), 2)
    whole = isinstance(example[0], Tensor) and not isinstance(loss, ModelLoss)
    if name == "auto" and whole and is_chain(partition, example[0].ndim):
        return Chained(partition, loss, rows, seed)
    reason = (
        None
        if name == "vectorised"
        else "asked for"
        if name == "loop"
        else _loop_reason(partition.model, tensors_in(example)[0].device)
    )
    if reason is None and name == "auto":
        reason = _trial(Vectorised(partition, loss, rows[:1], seed), example)
        reason = reason or _large(partition.model, loss, example, batch)
    if reason is not None:
        _log.info("gradients node by node: %s", reason)
        return Loop(partition, loss, rows, seed)
    return Vectorised(partition, loss, rows, seed)


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
def refuse_writing(partition: Partition, loss: Loss, example: tuple[Any, Any]) -> None:
    """Refuse a model that writes over its own parameters, found out on made-up examples.

    Raises:
        UsageError: it does.
    """
    model = partition.model
    own = {name: p.detach().clone() for name, p in (*model.named_parameters(), *model.named_buffers())}
    x, target = made_up(pick(example, 0), 2)
    state = torch.get_rng_state()
    try:
        with unwritten(own[name] for name, _ in model.named_parameters()):
            loss_of(model, own, x, target, loss)
            _refuse_changed(model, own)
    except UsageError:
        raise
    except FAILURES as error:
        _log.info("%s does not run on made-up examples (%s)", type(model).__name__, in_short(error))
    finally:
        torch.set_rng_state(state)


def _refuse_changed(model: nn.Module, own: Mapping[str, Tensor]) -> None:
    """Writing by way of `.data` leaves no other trace than the new numbers."""
    for name, before in model.named_parameters():
        if not torch.equal(own[name], before):
            raise UsageError(f"{name}: {WRITES}")


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
