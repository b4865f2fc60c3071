"""Sees every torch function that takes a trained weight while a model runs.

`Observer` finds out, on batches of two and of three made-up examples, where weights meet examples and where the examples lie in
every tensor there. `Recorder` then runs real batches: where a weight meets examples it is cut off from the graph, so that no
gradient of it is computed, and what went in is kept.
"""

import types
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dpps.learning.engines.per_example.calls import Call, IrregularModel, Key, replace_tensors, tensors_of
from dpps.learning.engines.per_example.gathering import Gathered, Gathering
from dpps.learning.engines.per_example.picking import Constants, Picked, picked
from dpps.learning.engines.per_example.rules.base import Rule
from dpps.learning.engines.per_example.weights import Weights


def name_of(function: Callable[..., Any]) -> str:
    """The name under which rules know a function; properties such as `W.T` have that of the property."""
    name = getattr(function, "__name__", "?")
    return getattr(getattr(function, "__self__", None), "__name__", name) if name == "__get__" else name


def body_of(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """For functions that torch writes in Python: the same without the question who overrides it, so that its parts are seen."""
    if getattr(function, "__globals__", None) is not vars(F):
        return None
    if function not in _BODIES:
        never = {name: _never for name in vars(F) if name.startswith("has_torch_function")}
        code: Any = function
        body = types.FunctionType(
            code.__code__, vars(F) | never, code.__name__, code.__defaults__, code.__closure__
        )
        body.__kwdefaults__ = code.__kwdefaults__
        _BODIES[function] = body
    return _BODIES[function]


_BODIES: dict[Callable[..., Any], Callable[..., Any]] = {}


def _never(*_: Any) -> bool:
    return False


@dataclass(frozen=True)
class Seen:
    """A function that took weights, with the shapes of its tensors."""

    name: str
    inputs: tuple[tuple[Key, tuple[int, ...]], ...]
    weights: frozenset[Key]
    parameters: frozenset[str]
    outputs: tuple[tuple[int, ...], ...]
    meets: bool
    made: tuple[Tensor, ...]


class _Mode(TorchFunctionMode):
    def __init__(self, leaves: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.weights = Weights(leaves)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if not torch.is_grad_enabled() or not self._concerns(args, named):
            return self.other(func, args, named)
        body = body_of(func)
        if body is not None:
            with self:
                return body(*args, **named)
        return self.weighted(func, args, named)

    def _concerns(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        held = self.weights._held
        for value in (*args, *kwargs.values()):
            if id(value) in held:
                return True
            if isinstance(value, (list, tuple)) and any(id(item) in held for item in value):
                return True
        return False

    def other(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A function that takes no weight."""
        return func(*args, **kwargs)

    @abstractmethod
    def weighted(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A function that takes a weight."""


class Observer(_Mode):
    """Notes what takes weights, on a made-up batch.

    Args:
        leaves: the trained parameters.
        batch: the tensors that hold examples.
        meets: positions among what takes weights that meet examples although no tensor of the batch goes in.
    """

    def __init__(self, leaves: Mapping[str, Tensor], batch: Sequence[Tensor], meets: frozenset[int]) -> None:
        super().__init__(leaves)
        self._batch, self._meets = {id(tensor): tensor for tensor in batch}, meets
        self.seen: list[Seen] = []
        self.numbers = 0
        """How many numbers all functions gave back; views take no memory."""
        self.picked: list[Picked] = []
        self.shapes: list[tuple[int, ...]] = []
        """Of what came of the batch without a weight."""
        self._constants = Constants()

    def _from_batch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        named = [("", args), *kwargs.items()]
        nested = [("", value) for value in args]
        return any(id(tensor) in self._batch for _, tensor in tensors_of([*named, *nested]))

    def _note(self, result: Any) -> None:
        for _, tensor in tensors_of([("", result)]):
            self._batch[id(tensor)] = tensor
            self.numbers += 0 if tensor._is_view() else tensor.numel()

    def other(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = func(*args, **kwargs)
        name = name_of(func)
        self._constants.note(name, args, kwargs, result)
        rows = picked(name, args, kwargs, self._constants)
        if rows is not None:
            self.picked.append(rows)
        if self._from_batch(args, kwargs):
            self._note(result)
            self.shapes += [tuple(tensor.shape) for _, tensor in tensors_of([("", result)])]
        return result

    def weighted(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = func(*args, **kwargs)
        made = [tensor for _, tensor in tensors_of([("", result)])]
        if not made:
            refuse_writing(func)
            return result
        given = list(tensors_of([*((str(k), a) for k, a in enumerate(args)), *kwargs.items()]))
        own = [(key, tensor) for key, tensor in given if tensor in self.weights]
        meets = self._from_batch(args, kwargs) or len(self.seen) in self._meets
        name = name_of(func)
        parameters = frozenset().union(*(self.weights.origin(tensor).parameters for _, tensor in own))
        self.seen.append(
            Seen(
                name,
                tuple((key, tuple(tensor.shape)) for key, tensor in given),
                frozenset(key for key, _ in own),
                parameters,
                tuple(tuple(tensor.shape) for tensor in made),
                meets,
                tuple(made) if meets else (),
            )
        )
        if meets:
            self._note(result)
        else:
            self.weights.add(name, result, [tensor for _, tensor in own])
        return result


def refuse_writing(func: Callable[..., Any]) -> None:
    """A weight that is written into a tensor leaves no result to be watched."""
    if name_of(func) == "__setitem__":
        raise IrregularModel(
            "a parameter is written into a part of a tensor (use torch.where or torch.cat instead)"
        )


@dataclass(frozen=True)
class CallSite:
    """What happens at one place of the model that takes weights."""

    name: str
    rule: Rule | None
    """None: only weights go in, and what comes out is a weight."""
    dims: dict[Key, int | None]
    """Arguments given by position are called "0", "1", ..."""
    out_dims: tuple[int | None, ...]
    out_shapes: tuple[tuple[int, ...], ...]
    """With 1 example."""
    parameters: frozenset[str]
    minor: bool
    """Where an axis holds several positions of every example: whether the examples of one position lie beside each other."""

    @cached_property
    def named_dims(self) -> dict[Key, int | None]:
        """The same by the rule's names of arguments."""
        renamed = {str(k): name for k, name in enumerate(self.rule.arguments)} if self.rule else {}
        return {(renamed.get(name, name), k): dim for (name, k), dim in self.dims.items()}

    def names(self, count: int) -> tuple[str, ...]:
        """What the rule calls the first arguments."""
        known = self.rule.arguments if self.rule else ()
        return (*known[:count], *(str(k) for k in range(len(known), count)))


class Sites(tuple[CallSite, ...]):
    """All of them, in order."""

    @cached_property
    def met_once(self) -> frozenset[str]:
        """Parameters that meet examples at one place only: their norms are final when that place has been passed."""
        met = Counter(name for site in self if site.rule is not None for name in site.parameters)
        return frozenset(name for name, count in met.items() if count == 1)


class Recorder(_Mode):
    """Runs a model on a batch and gathers what comes back to every function where weights meet examples.

    Args:
        leaves: the trained parameters, each to be differentiated.
        sites: what to expect.
        examples: how many there are in the batch.
        fast_formats: see `Call`.
    """

    def __init__(self, leaves: Mapping[str, Tensor], sites: Sites, examples: int, fast_formats: bool) -> None:
        super().__init__(leaves)
        self._sites, self._examples, self._fast, self._next = sites, examples, fast_formats, 0
        self._gathering = Gathering(leaves, self.weights, sites.met_once)
        self._calls: list[Call] = []
        self._root = torch.empty(0, requires_grad=True)

    def weighted(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self._next == len(self._sites):
            return self._beyond(func, args, kwargs)
        site, name = self._sites[self._next], name_of(func)
        if site.name != name:
            return self._beyond(func, args, kwargs)
        self._next += 1
        if site.rule is None:
            result = func(*args, **kwargs)
            given = tensors_of([("", args), *(("", a) for a in args), *kwargs.items()])
            self.weights.add(name, result, [tensor for _, tensor in given if tensor in self.weights])
            return result
        call = self.call(func, site, args, kwargs)
        self._calls.append(call)
        result = site.rule.run(call)
        if tuple(tuple(part.shape) for _, part in tensors_of([("", result)])) != call.out_shapes:
            raise IrregularModel(f"{name} made less or more of these examples than of made-up ones")
        call.cut()
        return result

    def call(self, func: Any, site: CallSite, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """The call with its arguments by the rule's names and its weights cut off."""
        assert site.rule is not None
        names = site.names(len(args))
        arguments = dict(zip(names, args, strict=True)) | dict(kwargs)
        own = {key: tensor for key, tensor in tensors_of(arguments.items()) if tensor in self.weights}
        if {
            name for tensor in own.values() for name in self.weights.origin(tensor).parameters
        } != site.parameters:
            raise IrregularModel(f"{site.name} took other parameters than with made-up examples")
        cut = replace_tensors(arguments, {key: tensor.detach() for key, tensor in own.items()})
        return Call(
            *(func, names, cut, own, site.named_dims, site.out_dims, site.out_shapes),
            *(self._examples, site.minor, self._fast, partial(self._gathering.take, site.rule), self._root),
        )

    def backward(self, losses: Tensor) -> Gathered:
        """Differentiate the sum of the examples' losses; what comes back is worked off on the way."""
        asked = [(call, place, leaf) for call in self._calls for place, leaf in call.leaves]
        total = losses.sum()
        with torch.no_grad():
            if total.requires_grad:
                sources = [self._root, *(leaf for _, _, leaf in asked)]
                found = torch.autograd.grad(total, sources, allow_unused=True)
                for (call, place, _), gradient in zip(asked, found[1:], strict=True):
                    if gradient is not None:
                        call.came_back(place, gradient)
            for call in self._calls:
                call.settle()
            return self._gathering.finish(losses.detach())

    def _beyond(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if next(tensors_of([("", result)]), None) is None:
            refuse_writing(func)
            return result
        raise IrregularModel(
            f"{name_of(func)} was not called with made-up examples: the model depends on the data"
        )
