"""Before round 0: one trial of the model, on made-up examples, so that no answer says anything about anybody's data.

`check_model` refuses what would break a promise: a model that writes over its parameters, and in the unit record also one that mixes
the examples of a batch, draws random numbers for it, keeps something of it, or has a loss that does not treat examples one by one.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._pytree import tree_map

from dpps.errors import UsageError
from dpps.learning.gradients.calling import (
    FAILURES,
    WRITES,
    Loss,
    ModelLoss,
    as_function,
    call_model,
    in_short,
    loss_of,
    pick,
    tensors_in,
    unwritten,
)
from dpps.learning.partition import Partition

_SEED = 20240623
_EXAMPLES = 3
_ROWS = 1024
# some models mix only when a value is large: x / x.max().clamp(min=1)
_SCALES = (1, 10, -10, 255, -255, 1e4, -1e4)
_DROPOUT = (
    "dropout masks are drawn for the whole batch, so one example more would change the others'; set dropout to 0 in the record "
    "unit (its noise regularises)"
)
_WRITES_INPUTS = (
    "the model writes over its inputs (an operation in place, such as x.sub_(...) or x -= ...), and the next round would find "
    "other data; write x = x - ... instead"
)

_log = logging.getLogger(__name__)


def check_model(partition: Partition, loss: Loss, example: tuple[Any, Any], *, per_example: bool) -> bool:
    """Run the model once on made-up examples and refuse what cannot be private.

    Args:
        partition: of the model.
        loss: of (outputs, targets), or a `ModelLoss`.
        example: one example's inputs and target; only shapes and types are looked at.
        per_example: whether examples are clipped one by one (unit record).

    Returns:
        Whether the model runs on made-up examples; if not, only real ones can show what it does.

    Raises:
        UsageError: the model is not fit for a run with noise.
    """
    model = partition.model
    if per_example:
        refuse_mixing(model)
    trial = _Trial(partition, loss, per_example)
    ran = trial.run(trial.once, example)
    if not per_example:
        return ran
    refuse_inseparable(loss, model, *example)
    # a loss that calls the model itself may do so in other ways than by its inputs
    return trial.run(trial.mixing, example) or (ran and isinstance(loss, ModelLoss))


class _Trial:
    """Made-up examples through the model, at parameters a little way off its own."""

    def __init__(self, partition: Partition, loss: Loss, per_example: bool) -> None:
        self._model, self._loss, self._per_example = partition.model, loss, per_example

    def run(self, what: Any, example: tuple[Any, Any]) -> bool:
        """Try `what` on floats, then on whole numbers; False where the model runs on neither."""
        reason, state = None, torch.get_rng_state()
        self._model.train()
        for whole in (False, True):
            try:
                with torch.no_grad():
                    what(example, whole)
            except UsageError:
                raise
            except FAILURES as error:
                reason = reason or error
            else:
                return True
            finally:
                torch.set_rng_state(state)
        name = type(self._model).__name__
        _log.info("%s does not run on made-up examples (%s)", name, in_short(reason))
        return False

    def once(self, example: tuple[Any, Any], whole: bool) -> None:
        """The loss of a batch."""
        x, target = batch = made_up(example, _EXAMPLES, whole=whole)
        own = self._tensors(batch)
        with refusing_randomness() if self._per_example else nullcontext(), self._checked(own, batch):
            loss_of(self._model, own, x, target, self._loss)

    def mixing(self, example: tuple[Any, Any], whole: bool) -> None:
        """Changing one example must not change what the model says of another."""
        batch = made_up(example[0], _EXAMPLES, whole=whole)
        other = made_up(example[0], _EXAMPLES, whole=whole, seed=1)
        base = self._outputs(batch)
        for k, scale in product(range(_EXAMPLES), _SCALES):
            changed = [own.clone() for own in tensors_in(batch)]
            for tensor, new in zip(changed, tensors_in(other), strict=True):
                tensor[k] = new[k] * scale if tensor.is_floating_point() else new[k]
            try:
                found = self._outputs(_with(batch, changed))
            except (RuntimeError, IndexError, AssertionError):
                if scale == 1:
                    raise
                continue  # inputs that large are none of the model's: no answer
            _compare(self._model, base, found, k)

    def _outputs(self, x: Any) -> list[Tensor]:
        own = self._tensors(x)
        with refusing_randomness(), self._checked(own, x):
            found = call_model(self._model, own, x)
        return [part.double() for part in tensors_in(found)]

    def _tensors(self, batch: Any) -> dict[str, Tensor]:
        """Copies of all parameters and buffers, the trained ones moved."""
        device = tensors_in(batch)[0].device
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        return {n: (moved(t) if t.requires_grad else t.clone()).detach().to(device) for n, t in named}

    @contextmanager
    def _checked(self, own: Mapping[str, Tensor], batch: Any) -> Iterator[None]:
        """Refuse writing to parameters, and for clipping per example to buffers and inputs."""
        parameters = {name: own[name] for name, _ in self._model.named_parameters()}
        buffers = {name: own[name] for name, _ in self._model.named_buffers()}
        before = {name: tensor.clone() for name, tensor in own.items()}
        inputs = unwritten(tensors_in(batch), _WRITES_INPUTS) if self._per_example else nullcontext()
        with inputs, unwritten((*parameters.values(), *self._model.parameters())):
            yield
            for name, tensor in parameters.items():  # writing by way of `.data` leaves no other trace
                if not torch.equal(tensor, before[name]):
                    raise UsageError(f"{name}: {WRITES}")
        if self._per_example:
            _refuse_changed(buffers, before)


def refuse_mixing(model: nn.Module) -> None:
    """BatchNorm mixes the examples of a batch, so no gradient belongs to one example; dropout masks would have to be secret."""
    modules = list(model.named_modules())
    norms = [n for n, m in modules if isinstance(m, _BatchNorm) and not isinstance(m, _InstanceNorm)]
    if norms:
        raise UsageError(
            f"layer {_some(norms)}: BatchNorm mixes examples, so the record unit cannot bound one example's share; "
            "use GroupNorm instead (--norm group, ResNet18(norm='group')), or the unit contribution"
        )
    tracking = [n for n, m in modules if isinstance(m, _InstanceNorm) and m.track_running_stats]
    if tracking:
        raise UsageError(
            f"layer {_some(tracking)}: running statistics mix examples, so the record unit cannot bound one example's share; "
            "set track_running_stats=False"
        )
    dropouts = [n for n, m in modules if isinstance(m, _DropoutNd) and m.p > 0]
    inside = nn.MultiheadAttention, nn.RNNBase
    dropouts += [n for n, m in modules if isinstance(m, inside) and m.dropout > 0]
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


# Losses


def refuse_inseparable(loss: Loss, model: nn.Module, example: Any, target: Any) -> None:
    """Refuse a loss of a batch that is neither the mean nor the sum of its examples' own losses.

    Tried on made-up outputs and targets, so that the answer says nothing about anybody's data; of the example only shape and
    type are used.
    """
    if as_function(loss) is F.cross_entropy or isinstance(loss, ModelLoss) or not isinstance(target, Tensor):
        return
    try:
        outputs, targets = made_up_outputs(model, example, target)
        alone = [loss(outputs[k : k + 1], targets[k : k + 1]) for k in range(len(targets))]
        pairs = [loss(outputs[[0, k]], targets[[0, k]]) for k in range(1, len(targets))]
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        _log.warning("whether the loss treats examples one by one could not be tried (%s)", error)
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


def made_up_outputs(model: nn.Module, example: Any, target: Tensor) -> tuple[Tensor, Tensor]:
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


# Made-up examples


def made_up(like: Any, examples: int, *, whole: bool = False, seed: int = _SEED) -> Any:
    """A batch of random examples.

    Whole numbers are 0 and 1, which every vocabulary, mask and list of classes has.

    Args:
        like: one example (tensors may be nested); only shapes and types are looked at.
        examples: how many.
        whole: whether floats are 0 and 1, too, for models that use them as positions.
        seed: another one gives other examples.
    """
    generator = torch.Generator().manual_seed(seed)

    def of(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        shape = (examples, *part.shape)
        bits = torch.randint(0, 2, shape, generator=generator)
        if part.ndim:
            bits[..., 0] = 1  # a mask of nothing but zeros would leave nothing to attend to
        if part.is_floating_point() and not whole:
            return torch.rand(shape, generator=generator, dtype=torch.float64).to(part)
        return bits.to(part)

    return tree_map(of, like)


def moved(tensor: Tensor) -> Tensor:
    """Parameters a little way off: where they start at zero (as heads often do) nothing would be seen."""
    generator = torch.Generator().manual_seed(_SEED)
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return tensor + 0.05 * noise.to(tensor)
