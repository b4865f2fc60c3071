"""What the unit record refuses: models that mix the examples of a batch, or draw random numbers for it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._pytree import tree_map

from dpps.errors import UsageError
from dpps.learning.engines.calling import call_model, pick, tensors_in, unwritten
from dpps.learning.engines.per_example.madeup import made_up, moved
from dpps.learning.partition import Partition

_EXAMPLES = 3
# some models mix only when a value is large: x / x.max().clamp(min=1)
_SCALES = (
    1,
    10,
    -10,
    255,
    -255,
    1e4,
    -1e4,
)
_DROPOUT = (
    "dropout masks are drawn for the whole batch, so one example more would change the others'; set dropout to 0 in the record "
    "unit (its noise regularises)"
)


def refuse_mixing(model: nn.Module) -> None:
    """BatchNorm mixes the examples of a batch, so no gradient belongs to one example; dropout masks would have to be secret."""
    norms = [
        n for n, m in model.named_modules() if isinstance(m, _BatchNorm) and not isinstance(m, _InstanceNorm)
    ]
    if norms:
        raise UsageError(
            f"layer {_some(norms)}: BatchNorm mixes examples, so the record unit cannot bound one example's share; "
            "use GroupNorm instead (--norm group, ResNet18(norm='group')), or the unit contribution"
        )
    tracking = [n for n, m in model.named_modules() if isinstance(m, _InstanceNorm) and m.track_running_stats]
    if tracking:
        raise UsageError(
            f"layer {_some(tracking)}: running statistics mix examples, so the record unit cannot bound one example's share; "
            "set track_running_stats=False"
        )
    dropouts = [name for name, m in model.named_modules() if isinstance(m, _DropoutNd) and m.p > 0]
    dropouts += [
        name
        for name, m in model.named_modules()
        if isinstance(m, (nn.MultiheadAttention, nn.RNNBase)) and m.dropout > 0
    ]
    if dropouts:
        raise UsageError(f"layer {_some(dropouts)}: {_DROPOUT}")


@contextmanager
def refusing_randomness() -> Iterator[None]:
    """Refuse random numbers inside the model or the loss by the same words as dropout layers."""
    state = torch.get_rng_state()
    try:
        yield
    except BaseException:
        torch.set_rng_state(state)
        raise
    if not torch.equal(state, torch.get_rng_state()):
        torch.set_rng_state(state)
        raise UsageError(f"the model or its loss draws random numbers: {_DROPOUT}")


@contextmanager
def refusing_state(model: nn.Module) -> Iterator[None]:
    """Refuse a model that keeps something of its examples in buffers, by the same words as on made-up ones; they are put back."""
    before = {n: b.clone() for n, b in model.named_buffers()}
    try:
        yield
        _refuse_changed(dict(model.named_buffers()), before)
    except BaseException:
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
        raise


def _refuse_changed(now: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> None:
    changed = [n for n, b in now.items() if not torch.equal(b, before[n])]
    if changed:
        raise UsageError(
            f"{_some(changed)}: the model keeps something of a batch in buffers, so examples mix (or changes them with every "
            "call, as spectral normalisation does); the record unit needs a model without such state"
        )


@contextmanager
def _refusing_written(batch: Any) -> Iterator[None]:
    """Refuse a model that writes over its inputs, which are the training data themselves."""
    before = [part._version for part in tensors_in(batch)]
    yield
    if [part._version for part in tensors_in(batch)] != before:
        raise UsageError(
            "the model writes over its inputs (an operation in place, such as x.sub_(...) or x -= ...), and the next round "
            "would find other data; write x = x - ... instead"
        )


@torch.no_grad()
def refuse_by_trial(partition: Partition, example: Any, *, whole: bool = False) -> None:
    """Run made-up examples: changing one must not change what the model says of another, nor its buffers, nor draw anything.

    Args:
        example: one example's inputs; only shapes and types are looked at.
        whole: see `made_up`.
    """
    model = partition.model
    model.train()
    parameters = {n: moved(p.detach()) for n, p in model.named_parameters() if p.requires_grad}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    device = tensors_in(example)[0].device
    parameters = {n: p.to(device) for n, p in parameters.items()}

    def outputs(x: Any) -> list[Tensor]:
        own = {n: b.clone().to(device) for n, b in buffers.items()}
        with unwritten((*parameters.values(), *model.parameters())):
            found = call_model(model, parameters | own, x)
        _refuse_changed(own, {n: b.to(device) for n, b in buffers.items()})
        return [part.double() for part in tensors_in(found)]

    batch = made_up(example, _EXAMPLES, whole=whole)
    with refusing_randomness(), _refusing_written(batch):
        base = outputs(batch)
    other = made_up(example, _EXAMPLES, whole=whole, seed=1)
    for k, scale in product(range(_EXAMPLES), _SCALES):
        changed = [own.clone() for own in tensors_in(batch)]
        for tensor, new in zip(changed, tensors_in(other), strict=True):
            tensor[k] = new[k] * scale if tensor.is_floating_point() else new[k]
        try:
            found = outputs(_with(batch, changed))
        except (RuntimeError, IndexError, AssertionError):
            if scale == 1:
                raise
            continue  # inputs that large are none of the model's: no answer
        _compare(model, base, found, k)


def _with(batch: Any, tensors: Sequence[Tensor]) -> Any:
    remaining = iter(tensors)
    return tree_map(lambda part: next(remaining) if isinstance(part, Tensor) else part, batch)


def _compare(model: nn.Module, base: Sequence[Tensor], found: Sequence[Tensor], changed: int) -> None:
    others = [k for k in range(_EXAMPLES) if k != changed]
    for before, after in zip(base, found, strict=True):
        if before.shape != after.shape or before.ndim == 0 or before.shape[0] % _EXAMPLES:
            raise UsageError(
                f"{type(model).__name__}: an output of shape {tuple(before.shape)} for {_EXAMPLES} examples "
                "does not tell whose it "
                "is; the record unit needs the examples along the first axis of every output"
            )
        rows = torch.unflatten(before, 0, (_EXAMPLES, -1)), torch.unflatten(after, 0, (_EXAMPLES, -1))
        old, new = (pick(part, others) for part in rows)
        tolerance = 1e-5 * (1 + float(torch.nan_to_num(before).abs().max()))
        if not torch.allclose(old, new, rtol=0, atol=tolerance, equal_nan=True):
            raise UsageError(
                f"{type(model).__name__} mixes examples: changing one example changes what it says of another "
                "(normalisation over the batch?), so the record unit cannot bound one example's share; normalise within an "
                "example (GroupNorm, LayerNorm), or use the unit contribution"
            )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
