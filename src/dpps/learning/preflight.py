"""Before round 0: the data, the model and the loss are tried, and what cannot work or would not be private is refused in one line.

- `check_examples` tries one example of every data set held here: its user gets a sentence with the remedy, not a traceback from
  inside torch.
- `check_model` runs the model on made-up examples, so that no answer says anything about anybody's data. It refuses what would
  break a promise: a model that writes over its parameters, and in the unit record also one that mixes the examples of a batch,
  draws random numbers for it, keeps something of it, or has a loss that does not treat examples one by one.
"""

import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset, TensorDataset, default_collate

from dpps.data import Images
from dpps.errors import UsageError
from dpps.learning.gradients.calling import (
    FAILURES,
    WRITES,
    Loss,
    ModelLoss,
    as_function,
    call_model,
    ignored_label,
    in_short,
    loss_of,
    move,
    pick,
    takes_classes,
    tensors_in,
    unwritten,
)
from dpps.learning.partition import Partition

UNSCALED = 100.0
"""Larger inputs give a warning: models start from weights that expect values of about 1."""

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
_UNFIT = (RuntimeError, TypeError, ValueError, IndexError)
"""What torch raises for an example of the wrong shape or type."""

_Whose = TypeVar("_Whose")
_log = logging.getLogger(__name__)


# One example of every data set


def check_examples(
    datasets: Sequence[Dataset[Any]], whose: Sequence[str], model: nn.Module, loss: Loss
) -> None:
    """Check that the model and the loss accept the examples.

    Args:
        datasets: as `as_datasets` gives them.
        whose: "node 3" or "the test set", for the message.
    """
    for dataset, name in _distinct(datasets, whose):
        outputs, target = _try_model(dataset, name, model, loss)
        if isinstance(loss, ModelLoss):
            continue
        if takes_classes(loss) and isinstance(outputs, Tensor) and outputs.ndim == 2:
            labels = dataset.tensors[1] if isinstance(dataset, TensorDataset) else target
            labels = dataset.labels if isinstance(dataset, Images) else labels
            _check_labels(labels, outputs.shape[1], name, ignored_label(loss))
        _try_loss(outputs, target, name, loss)


def _distinct(
    datasets: Sequence[Dataset[Any]], whose: Sequence[_Whose]
) -> Collection[tuple[Dataset[Any], _Whose]]:
    """Every data set once, with the first who holds it: an audit gives the same one to thousands of nodes."""
    found: dict[int, tuple[Dataset[Any], _Whose]] = {}
    for dataset, name in zip(datasets, whose, strict=True):
        found.setdefault(id(dataset), (dataset, name))
    return found.values()


def _check_labels(labels: Any, outputs: int, whose: str, ignored: int | None) -> None:
    """Labels must be numbers of the model's outputs, but for one that the loss ignores."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim != 1:
        return
    labels = labels if ignored is None else labels[labels != ignored]
    low, high = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
    if low < 0 or high >= outputs:
        remedy = f"use a model with {high + 1} classes"
        if low < 0:
            remedy = "number the classes 0, 1, ..."
        elif low == 1 and high == outputs:
            remedy = "labels start at 0, so give labels - 1"
        raise UsageError(
            f"{whose}: labels run from {low} to {high} and the model has {outputs} outputs: {remedy}"
        )


def _try_model(dataset: Dataset[Any], whose: str, model: nn.Module, loss: Loss) -> tuple[Any, Any]:
    """The model's output for one example, or the value of a loss that calls the model itself; and the target."""
    try:
        x, target = default_collate([dataset[0]])
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{whose}: an example of its {type(dataset).__name__} is no pair (input, target): {in_short(error)}"
        ) from error
    try:
        with _evaluating(model):
            x, target = move((x, target), next(model.parameters()).device)
            if isinstance(loss, ModelLoss):
                return loss.of(model, {}, (x, target)), target
            return call_model(model, {}, x), target
    except _UNFIT as error:
        remedy = "give examples of the shape that the model was made for, or a model for this shape"
        whole = isinstance(x, Tensor) and not x.is_floating_point() and not x.is_complex()
        if whole and not any(isinstance(module, nn.Embedding) for module in model.modules()):
            remedy = "give the inputs as floats, inputs.float()"
        raise UsageError(
            f"{whose}: the model cannot read an example of {_looks(x)}: {in_short(error)}; {remedy}"
        ) from error


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without gradients and in evaluation mode; afterwards modes and random numbers are as they were."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _try_loss(outputs: Any, target: Any, whose: str, loss: Loss) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Using a target size")
            real = isinstance(outputs, Tensor) and outputs.is_floating_point()
            value = loss(outputs.detach().requires_grad_() if real else outputs, target)
    except UserWarning as error:
        raise UsageError(
            f"{whose}: outputs of {_looks(outputs)} and targets of {_looks(target)} would be compared each with all others: give "
            f"targets of the outputs' shape, such as targets.view(-1{''.join(f', {n}' for n in outputs.shape[1:])})"
        ) from error
    except _UNFIT as error:
        remedy = "give targets of the shape and type that the loss expects, or another loss"
        if takes_classes(loss) and isinstance(target, Tensor) and target.shape[1:] == (1,):
            remedy = "give one class number per example, targets.squeeze(1)"
        raise UsageError(
            f"{whose}: the loss cannot compare an output of {_looks(outputs)} with a target of "
            f"{_looks(target)}: {in_short(error)}; {remedy}"
        ) from error
    if not isinstance(value, Tensor) or (isinstance(outputs, Tensor) and not value.requires_grad):
        raise UsageError(
            f"{whose}: the loss returns a {type(value).__name__} without a gradient: compute it from the outputs by torch alone, "
            "without item(), detach() or argmax()"
        )


def _looks(batch: Any) -> str:
    """Shape and type of one example of a batch, which may be a tuple or a dictionary."""
    if not isinstance(batch, Tensor):
        return " and ".join(_looks(part) for part in tensors_in(batch)) or type(batch).__name__
    return f"shape {tuple(batch.shape[1:])} and type {str(batch.dtype).removeprefix('torch.')}"


def tell_unscaled(datasets: Sequence[Dataset[Any]], rows: Sequence[int]) -> None:
    """Warn about an example with NaN or infinity, and about the column of inputs that is farthest from 1."""
    worst, broken = (UNSCALED, 0, 0), None
    for dataset, row in _distinct(datasets, rows):
        x = _floats(dataset)
        if x is None:
            continue
        bad = _not_finite(dataset)
        broken = (bad, row) if broken is None and bad is not None else broken
        columns = x.detach().reshape(len(x), -1).abs().nan_to_num(0.0, posinf=0.0).amax(0)
        column = int(columns.argmax())
        worst = max(worst, (float(columns[column]), row, column))
    if broken is not None:
        _log.warning(
            "example %d of node %d (counted from 0) holds NaN or infinity and teaches nothing: repair or leave it out",
            *broken,
        )
    if worst[0] > UNSCALED:
        _log.warning(
            "inputs run up to %.4g (node %d, column %d counted from 0): scale them to about -1 to 1 by ranges that are no "
            "secret, and leave out numbers that only name a record, or the model learns little",
            *worst,
        )


def why_not_finite(dataset: Dataset[Any], failing: str) -> str:
    """The remedy for a loss that is not a number: the data where it holds such values, otherwise the rates."""
    if (bad := _not_finite(dataset)) is not None:
        return f"example {bad} of {failing} (counted from 0) holds NaN or infinity: repair or leave it out"
    return "lower the learning rates or clip more"


def _floats(dataset: Dataset[Any]) -> Tensor | None:
    """The inputs of a data set of tensors, if they are floats."""
    x = dataset.tensors[0] if isinstance(dataset, TensorDataset) else None
    return x if x is not None and x.is_floating_point() and x.numel() else None


def _not_finite(dataset: Dataset[Any]) -> int | None:
    """The first example whose inputs hold NaN or infinity, where the data set is tensors."""
    x = _floats(dataset)
    if x is None or bool(torch.isfinite(x.sum())):
        return None
    bad = (~torch.isfinite(x.reshape(len(x), -1)).all(1)).nonzero().flatten()
    return int(bad[0]) if len(bad) else None


# The model, on made-up examples


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

    def once(whole: bool) -> None:
        x, target = batch = made_up(example, _EXAMPLES, whole=whole)
        with _checked(model, batch, per_example) as own:
            loss_of(model, own, x, target, loss)

    ran = _runs(model, once)
    if not per_example:
        return ran
    refuse_inseparable(loss, model, *example)
    # a loss that calls the model itself may do so in other ways than by its inputs
    return _runs(model, partial(_refuse_dependence, model, example[0])) or (
        ran and isinstance(loss, ModelLoss)
    )


def _runs(model: nn.Module, trial: Callable[[bool], None]) -> bool:
    """Try made-up floats, then whole numbers; False where the model runs on neither."""
    reason, state = None, torch.get_rng_state()
    model.train()
    for whole in (False, True):
        try:
            with torch.no_grad():
                trial(whole)
        except UsageError:
            raise
        except FAILURES as error:
            reason = reason or error
        else:
            return True
        finally:
            torch.set_rng_state(state)
    _log.info("%s does not run on made-up examples (%s)", type(model).__name__, in_short(reason))
    return False


def _refuse_dependence(model: nn.Module, example: Any, whole: bool) -> None:
    """Changing one example must not change what the model says of another."""
    batch = made_up(example, _EXAMPLES, whole=whole)
    other = made_up(example, _EXAMPLES, whole=whole, seed=1)

    def outputs(x: Any) -> list[Tensor]:
        with _checked(model, x, per_example=True) as own:
            found = call_model(model, own, x)
        return [part.double() for part in tensors_in(found)]

    base = outputs(batch)
    for k, scale in product(range(_EXAMPLES), _SCALES):

        def changed(own: Any, new: Any, k: int = k, scale: float = scale) -> Any:
            if not isinstance(own, Tensor):
                return own
            own = own.clone()
            own[k] = new[k] * scale if own.is_floating_point() else new[k]
            return own

        try:
            found = outputs(tree_map(changed, batch, other))
        except (RuntimeError, IndexError, AssertionError):
            if scale == 1:
                raise
            continue  # inputs that large are none of the model's: no answer
        _compare(model, base, found, k)


@contextmanager
def _checked(model: nn.Module, batch: Any, per_example: bool) -> Iterator[dict[str, Tensor]]:
    """Copies of all parameters and buffers, the trained ones a little way off. Refuse writing to parameters, and for clipping per
    example to buffers and inputs, and drawing random numbers."""
    device = tensors_in(batch)[0].device
    named, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    own = {
        name: (moved(t) if t.requires_grad else t.clone()).detach().to(device)
        for name, t in (named | buffers).items()
    }
    before = {name: tensor.clone() for name, tensor in own.items()}
    random = refusing_randomness() if per_example else nullcontext()
    inputs = unwritten(tensors_in(batch), _WRITES_INPUTS) if per_example else nullcontext()
    with random, inputs, unwritten((*(own[name] for name in named), *named.values())):
        yield own
        for name in named:  # writing by way of `.data` leaves no other trace
            if not torch.equal(own[name], before[name]):
                raise UsageError(f"{name}: {WRITES}")
    if per_example:
        _refuse_changed({name: own[name] for name in buffers}, before)


def refuse_mixing(model: nn.Module) -> None:
    """BatchNorm mixes the examples of a batch, so no gradient belongs to one example; dropout masks would have to be secret."""
    modules = list(model.named_modules())
    _refuse_layers(
        [n for n, m in modules if isinstance(m, _BatchNorm) and not isinstance(m, _InstanceNorm)],
        "BatchNorm mixes examples, so the record unit cannot bound one example's share; "
        "use GroupNorm instead (--norm group, ResNet18(norm='group')), or the unit contribution",
    )
    _refuse_layers(
        [n for n, m in modules if isinstance(m, _InstanceNorm) and m.track_running_stats],
        "running statistics mix examples, so the record unit cannot bound one example's share; "
        "set track_running_stats=False",
    )
    inside = nn.MultiheadAttention, nn.RNNBase
    dropouts = [n for n, m in modules if isinstance(m, _DropoutNd) and m.p > 0]
    _refuse_layers(dropouts + [n for n, m in modules if isinstance(m, inside) and m.dropout > 0], _DROPOUT)


def _refuse_layers(names: Sequence[str], words: str) -> None:
    if names:
        raise UsageError(f"layer {_some(names)}: {words}")


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


# The loss


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
    ways = (
        [torch.cat([first, second])] if pair.ndim and first.ndim else [(first + second) / 2, first + second]
    )
    return any(pair.shape == way.shape and torch.allclose(pair, way, rtol=1e-4, atol=1e-6) for way in ways)


def made_up_outputs(model: nn.Module, example: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and targets of the right shapes and types; whole numbers run through all classes."""
    with _evaluating(model):
        one = call_model(model, {}, tree_map(lambda part: torch.zeros_like(part)[None], example))
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
