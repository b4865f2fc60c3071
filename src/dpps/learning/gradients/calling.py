"""How a model and its loss are called: with one tensor, a tuple (positions) or a dictionary (names), on a batch or on one example.

A loss is a function of (outputs, targets). It may return one number, or one per example (`reduction="none"`), which is then
averaged. Class weights work in every unit with the latter: a *weighted mean* divides by the sum of the weights, so the loss of
one example alone has lost its weight, and it is refused where examples are differentiated one by one.
"""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dpps.errors import UsageError

Loss = Callable[[Any, Any], Tensor]
"""Takes a model's outputs and the targets of a batch; a mean over the batch. Or a `ModelLoss`."""

FAILURES = (Exception,)
"""What a model may raise that does not like an example: anything. Stopping because of some kinds would tell of the example."""

WRITES = (
    "the model writes over its own parameters while it runs (an embedding with max_norm does), so they would follow "
    "the data without noise; use layers that do not (max_norm=None)"
)

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

_MEANS = tuple(each for each in _FUNCTIONS.values() if each is not F.cross_entropy)
"""Losses that are plain means over all numbers."""

_log = logging.getLogger(__name__)


def in_short(error: BaseException | None) -> str:
    """The first line of an error's message, or its type where it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


class ModelLoss:
    """A loss that calls the model itself: `function(model, (inputs, targets))`, a mean over the batch,
    or one number per example, which is averaged.
    """

    def __init__(self, function: Callable[[Any, Any], Tensor]) -> None:
        self.function = function

    def __repr__(self) -> str:
        return f"ModelLoss({self.function!r})"

    def of(self, model: nn.Module, tensors: Mapping[str, Tensor], batch: Any) -> Tensor:
        """The loss with these parameters and buffers in place of the model's own."""
        with swapped(model, tensors):
            return self.function(model, batch).mean()

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
def swapped(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """These parameters and buffers in place of the model's own, wherever they are used (tied ones, too); afterwards its own again.

    What `torch.func.functional_call` does, without its checks: those take as long as a small model itself. Differentiate inside it:
    checkpointed modules run again during the backward pass, with whatever parameters are in place then.

    Args:
        model: nobody else may call it meanwhile.
        tensors: by the names of `named_parameters` and `named_buffers`.
    """
    if not tensors:
        yield
        return
    places = _places(model)
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for name, tensor in tensors.items():
            for store, key in places[name]:
                before.append((store, key, store[key]))
                store[key] = tensor
        yield
    finally:
        for store, key, own in reversed(before):
            store[key] = own


def _places(model: nn.Module) -> dict[str, list[tuple[dict[str, Any], str]]]:
    """By name: every module's dictionary, and the key in it, that holds this very tensor."""
    by_tensor: dict[int, list[tuple[dict[str, Any], str]]] = {}
    names: dict[str, int] = {}
    left: list[tuple[str, nn.Module]] = [("", model)]
    while left:  # `named_modules(remove_duplicate=False)`, whose generators take as long as a small model
        prefix, module = left.pop()
        left.extend(
            (f"{prefix}{name}.", inner) for name, inner in module._modules.items() if inner is not None
        )
        stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for store in stores:
            for key, tensor in store.items():
                if tensor is not None:
                    names[prefix + key] = id(tensor)
                    by_tensor.setdefault(id(tensor), []).append((store, key))
    return {name: by_tensor[own] for name, own in names.items()}


class ExampleLosses:
    """From a batch's outputs and targets to one loss per example: a mean over a batch, evaluated for each example by itself."""

    def __init__(self, loss: Loss) -> None:
        self.loss, self._vmap = loss, True

    def __call__(self, outputs: Any, target: Any, examples: int) -> Tensor:
        """The losses, (examples,)."""
        if isinstance(outputs, Tensor) and isinstance(target, Tensor):
            if self.loss is F.cross_entropy and outputs.ndim == 2 and target.ndim == 1:
                return F.cross_entropy(outputs, target, reduction="none")
            if self.loss in _MEANS and outputs.shape == target.shape:
                function: Any = self.loss
                each: Tensor = function(outputs, target, reduction="none")
                return each.reshape(examples, -1).mean(1)
        if self._vmap:
            try:
                with quiet():
                    losses: Tensor = torch.vmap(self._one)(outputs, target)
            except FAILURES as error:
                self._vmap = False
                _log.warning(
                    "torch.vmap cannot run the loss (%s): it is computed one example after the other",
                    in_short(error),
                )
            else:
                return losses
        return torch.stack([self._one(pick(outputs, k), pick(target, k)) for k in range(examples)])

    def _one(self, outputs: Any, target: Any) -> Tensor:
        return self.loss(pick(outputs, None), pick(target, None))


def as_function(loss: Loss) -> Loss:
    """torch's function for a loss module of torch with default settings, such as `F.cross_entropy` for `nn.CrossEntropyLoss()`;
    any other loss as it is."""
    kind: Any = type(loss)
    plain = kind in _FUNCTIONS and _settings(loss) == _settings(kind())
    return _FUNCTIONS[kind] if plain else loss


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
    if weigh is None or isinstance(loss, ModelLoss):
        return loss
    each = ExampleLosses(loss)
    return lambda outputs, targets: (each(outputs, targets, len(outputs)) * weigh(targets).to(outputs)).mean()


def one_number(loss: Loss) -> Loss:
    """The same loss, averaged where it gives a number for every example."""
    known = getattr(loss, "__module__", "") == "torch.nn.functional"  # one number; engines know some of them
    return loss if known or isinstance(loss, ModelLoss) else lambda *given: loss(*given).mean()


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's remarks that `torch.vmap` has no batching rule for an operation: the result is right."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
        yield


@contextmanager
def unwritten(tensors: Iterable[Tensor], words: str = WRITES) -> Iterator[None]:
    """Refuse a model that writes over parameters while it runs: they would follow the data, and no noise would hide that."""
    held = list(tensors)
    before = [tensor._version for tensor in held]
    yield
    if [tensor._version for tensor in held] != before:
        raise UsageError(words)


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


# One example by plain autograd: slow, and right for every model


class GradientError(RuntimeError):
    """The backward pass failed: for this example, or for every one."""


def cannot_be_differentiated(model: nn.Module, error: GradientError) -> UsageError:
    """The error for a user."""
    return UsageError(f"{type(model).__name__} cannot be differentiated: {in_short(error)}")


def leaves_of(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters, each to be differentiated by itself."""
    return {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}


def gradient_of_one(
    model: nn.Module, loss: Loss, leaves: Mapping[str, Tensor], x: Any, target: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradient of one example, in a batch of its own."""
    alone = pick((x, target), None)
    try:
        return _gradient(model, loss, leaves, alone)
    except FAILURES:
        with suppress(
            *FAILURES
        ):  # models may drop an axis of length one; the mean over the same example twice is its own
            return _gradient(model, loss, leaves, pick(alone, torch.zeros(2, dtype=torch.int64)))
        raise


def _gradient(
    model: nn.Module, loss: Loss, leaves: Mapping[str, Tensor], batch: tuple[Any, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    with swapped(model, leaves):  # until the end: checkpointed modules run forward again in the backward pass
        value = loss_of(model, {}, *batch, loss)
        if not value.requires_grad:
            return value.detach(), {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        for leaf in leaves.values():
            leaf.grad = None
        try:  # not torch.autograd.grad, to which what re-entrant checkpoints hold is invisible
            torch.autograd.backward(value)
        except FAILURES as error:
            raise GradientError(in_short(error)) from error
    return value.detach(), {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in leaves.items()}
