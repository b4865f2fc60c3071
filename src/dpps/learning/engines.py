"""Which engine computes the gradients of a model."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from dpps.learning.chain import Chained, is_chain
from dpps.learning.gradients import Engine, EngineName, Loop, Loss, Vectorised
from dpps.learning.partition import Partition

_log = logging.getLogger(__name__)


def choose_engine(
    partition: Partition,
    loss: Loss,
    rows: Sequence[int],
    example: tuple[Tensor, Tensor],
    seed: int = 0,
    name: EngineName = "auto",
) -> Engine:
    """The engine for this model: rules, then one trial of the vectorised engine on one batch entry.

    Args:
        example: one node's (inputs, targets), a batch of at least two.
        name: "auto", or force one.
    """
    if name == "auto" and is_chain(partition, example[0].ndim):
        return Chained(partition, loss, rows, seed)
    reason = (
        None
        if name == "vectorised"
        else "asked for"
        if name == "loop"
        else _loop_reason(partition.model, example[0].device)
    )
    if reason is None and name == "auto":
        reason = _trial(Vectorised(partition, loss, rows[:1], seed), example)
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


def _trial(engine: Vectorised, example: tuple[Tensor, Tensor]) -> str | None:
    s, l = engine.partition.initial()
    x, target = (part[None].to(part.device) for part in example)
    try:
        engine.step(s[None].to(x.device), l[None].to(x.device), x, target, lambda g, _: l[None].to(g), 0)
    except RuntimeError as error:  # what torch.vmap raises for operations it cannot batch
        return f"torch.vmap cannot run this model ({str(error).splitlines()[0]})"
    return None
