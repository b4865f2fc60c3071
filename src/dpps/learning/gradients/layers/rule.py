"""A rule, and a call of a torch function that takes a trained weight: what went in, and where its batch lies."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dpps.learning.gradients.contributions import Contribution

Key = tuple[str, int]
"""The name of an argument, and for a list of tensors the position in it (otherwise -1)."""


class IrregularModel(Exception):  # noqa: N818  (no error for a user: the model goes another way)
    """Rules do not cover the model, or it does not do the same with every batch; `args` says what."""


def tensors_of(arguments: Iterable[tuple[str, Any]]) -> Iterator[tuple[Key, Tensor]]:
    """All tensors among arguments, also those in lists."""
    for name, value in arguments:
        if isinstance(value, Tensor):
            yield (name, -1), value
        elif isinstance(value, (list, tuple)):
            for k, item in enumerate(value):
                if isinstance(item, Tensor):
                    yield (name, k), item


def replace_tensors(arguments: dict[str, Any], new: dict[Key, Tensor]) -> dict[str, Any]:
    """The arguments with some tensors replaced."""
    replaced = dict(arguments)
    for (name, k), tensor in new.items():
        if k < 0:
            replaced[name] = tensor
        else:
            parts = list(replaced[name])
            parts[k] = tensor
            replaced[name] = parts
    return replaced


@dataclass
class Call:
    """One call. `arguments` holds the weights cut off from their own graph, so that no gradient of them is computed."""

    function: Callable[..., Any]
    names: tuple[str, ...]
    """Of the arguments given by position."""
    arguments: dict[str, Any]
    weights: dict[Key, Tensor]
    """The weights as the model had them, with whatever graph leads to the parameters."""
    dims: dict[Key, int | None]
    """Where in each argument the examples lie; None for tensors without them."""
    out_dims: tuple[int | None, ...]
    """The same of the tensors that come out."""
    single_shapes: tuple[tuple[int, ...], ...]
    """The shapes of these, with 1 example."""
    examples: int
    minor: bool = False
    """See `Site`."""
    fast_formats: bool = False
    """Whether outputs may lie in memory as is fastest; some models insist on the usual order of numbers."""
    complete: Callable[["Call"], None] = lambda _: None
    """Called during the backward pass, when the gradients of all watched tensors have come back."""
    root: Tensor = field(default_factory=lambda: torch.empty(0, requires_grad=True))
    """What every graph begins with that no earlier call has begun."""
    kept: dict[str, Any] = field(default_factory=dict)
    """What a rule keeps from its `run` for its `gradients`, cut off from the graph."""
    backs: list[Tensor | None] = field(default_factory=list)
    """What has come back to the watched tensors, in their order."""
    _forms: list[tuple[torch.Size, torch.dtype, torch.device]] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    def run(self, arguments: dict[str, Any] | None = None) -> Any:
        """Call the function, with these arguments or its own."""
        own = self.arguments if arguments is None else arguments
        return self.function(
            *(own[name] for name in self.names), **{k: v for k, v in own.items() if k not in self.names}
        )

    def watch(self, tensor: Tensor) -> Tensor:
        """Ask for the gradient that comes back to a tensor of floats: use what is returned from here on."""
        place = len(self.backs)
        self.backs.append(None)
        self._forms.append((tensor.shape, tensor.dtype, tensor.device))
        if not tensor.requires_grad:
            tensor = self.start(tensor)
        tensor.register_hook(partial(self._came_back, place))  # type: ignore[no-untyped-call]
        return tensor

    def start(self, tensor: Tensor) -> Tensor:
        """The tensor, from now on part of a graph: unlike a leaf it may be written over by an activation."""
        own = tensor.clone() if tensor._is_view() else tensor
        started: Tensor = _Start.apply(own, self.root)  # type: ignore[no-untyped-call]
        return started

    def _came_back(self, place: int, gradient: Tensor) -> None:
        """The gradient of a watched tensor is there."""
        self.backs[place] = gradient
        if all(own is not None for own in self.backs):
            self.complete(self)

    def cut(self) -> None:
        """Release the graph. It holds this call, so a reference back would keep both alive."""
        new = {
            key: tensor.detach() for key, tensor in tensors_of(self.arguments.items()) if tensor.requires_grad
        }
        if new:
            self.arguments = replace_tensors(self.arguments, new)

    def settle(self) -> None:
        """The loss does not depend on watched tensors whose gradient never came back: zero, unless that is so of all."""
        if any(own is not None for own in self.backs) and any(own is None for own in self.backs):
            for place, (shape, dtype, device) in enumerate(self._forms):
                if self.backs[place] is None:
                    self.backs[place] = torch.zeros(shape, dtype=dtype, device=device)
            self.complete(self)

    @property
    def out_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of what comes out."""
        return tuple(
            tuple(size * self.examples if k == dim else size for k, size in enumerate(shape))
            for shape, dim in zip(self.single_shapes, self.out_dims, strict=True)
        )

    def first(self, tensor: Tensor, dim: int | None) -> Tensor:
        """The tensor with the axis of examples first; one that holds several positions of each example is split."""
        if dim is None:
            raise IrregularModel(f"{self.function.__name__}: no axis of examples")
        if tensor.shape[dim] != self.examples:
            if self.minor:
                return torch.unflatten(tensor, dim, (-1, self.examples)).movedim(dim + 1, 0)
            tensor = torch.unflatten(tensor, dim, (self.examples, -1))
        return tensor.movedim(dim, 0) if dim else tensor

    def input(self, name: str) -> Tensor:
        """An argument, detached, with the axis of examples first."""
        return self.first(self.arguments[name].detach(), self.dims.get((name, -1)))

    def output(self, back: Tensor) -> Tensor:
        """What came back to the first output, with the axis of examples first."""
        return self.first(back, self.out_dims[0])


class _Start(torch.autograd.Function):
    """Marks a tensor as the beginning of a graph without copying it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, _: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, None]:
        return None, None


class Rule(ABC):
    """How the examples' gradients follow for one family of torch functions.

    A rule is about *functions* (`torch.conv2d`), not modules: whatever module calls the function has the rule.
    """

    functions: tuple[str, ...]
    """The names of the torch functions (`torch.conv2d.__name__`)."""
    arguments: tuple[str, ...] = ()
    """What the functions call their positional arguments, in order."""

    def suits(self, call: Call) -> bool:
        """Whether the rule covers a call with such arguments; if not, the model goes another way."""
        return True

    def run(self, call: Call) -> Any:
        """The function's result, every tensor of it watched whose gradient the rule needs."""
        return call.watch(call.run())

    @abstractmethod
    def gradients(self, call: Call, back: Sequence[Tensor]) -> dict[Key, Contribution]:
        """The examples' contributions to every weight in `call.weights`.

        Args:
            call: what `run` was given.
            back: the gradients that came back to what `run` watched, in that order.
        """


RULES: dict[str, Rule] = {}
"""By the names of torch functions."""


def register(rule: Rule) -> None:
    """Make a rule known; a later one for the same function takes the place of an earlier one."""
    for name in rule.functions:
        RULES[name] = rule
