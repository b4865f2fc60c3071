"""One forward and one backward pass that give every example's norm and then the clipped sum.

`Recorder` sees every torch function that takes a trained weight while a model runs. Where a weight meets examples it is cut off
from the graph, so that no gradient of it is computed, and what went in is kept. `Gathering` takes what comes back, call by call.
"""

import types
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dpps.learning.gradients.calling import quiet
from dpps.learning.gradients.contributions import Contribution, Explicit, combine
from dpps.learning.gradients.layers.rule import Call, IrregularModel, Key, Rule, replace_tensors, tensors_of


class Weights:
    """The trained parameters and everything that is computed from them alone, by identity."""

    def __init__(self, leaves: Mapping[str, Tensor]) -> None:
        self.leaves = leaves
        # holding them keeps their identities from being given anew
        self.held: dict[int, tuple[Tensor, frozenset[str]]] = {
            id(leaf): (leaf, frozenset({name})) for name, leaf in leaves.items()
        }

    def __contains__(self, tensor: object) -> bool:
        return id(tensor) in self.held

    def origin(self, *tensors: Tensor) -> frozenset[str]:
        """The parameters that weights are computed from."""
        return frozenset().union(*(self.held[id(tensor)][1] for tensor in tensors))

    def add(self, result: Any, sources: Sequence[Tensor]) -> None:
        """What a function made of weights alone."""
        for _, tensor in tensors_of([("", result)]):
            if tensor.requires_grad and tensor not in self:
                self.held[id(tensor)] = tensor, self.origin(*sources)

    def taken_back(self, contribution: Contribution, weight: Tensor) -> dict[str, Contribution]:
        """A contribution to a weight as contributions to the parameters that it is computed from."""
        names = sorted(self.origin(weight))
        leaves = [self.leaves[name] for name in names]
        if weight is leaves[0]:
            return {names[0]: contribution}
        with torch.enable_grad(), quiet():
            found = torch.autograd.grad(
                weight,
                leaves,
                contribution.explicit(),
                is_grads_batched=True,
                retain_graph=True,
                materialize_grads=True,
            )
        return {name: Explicit(g) for name, g in zip(names, found, strict=True)}


@dataclass
class Found:
    """What one pass found.

    Args:
        losses: every example's loss.
        contributions: by parameter.
        squares: every example's squared norm over all parameters, in float64.
    """

    losses: Tensor
    contributions: dict[str, Contribution]
    squares: Tensor

    @classmethod
    def of(cls, losses: Tensor, contributions: dict[str, Contribution], norms: Sequence[Tensor]) -> Self:
        """With the squared norms, from the norms of all parts, (examples, parts)."""
        squares = torch.zeros(len(losses), dtype=torch.float64, device=losses.device)
        for dtype in dict.fromkeys(own.dtype for own in norms):
            alike = torch.cat([own for own in norms if own.dtype == dtype], 1)
            squares += alike.double().square_().sum(1)
        return cls(losses, contributions, squares)

    @property
    def numbers(self) -> int:
        """How many numbers are held for the gradients at most."""
        return sum(contribution.numbers for contribution in self.contributions.values())

    def totals(self, factors: Tensor, piece: int | None = None) -> dict[str, Tensor]:
        """The sum of the examples' gradients, each times its factor, by parameter; `piece` as in `weighted_sum`."""
        return {name: own.total(factors, piece) for name, own in self.contributions.items()}


class Gathering:
    """Puts together what comes back, call by call while the backward pass runs: so long it is in the cache, and most of it
    need not be kept. Calls hold it, so it holds no call: torch holds graphs in which Python's collector would not see a cycle.

    Args:
        weights: where the weights of calls come from.
        met_once: parameters whose norms are final after one call.
    """

    def __init__(self, weights: Weights, met_once: frozenset[str] = frozenset()) -> None:
        self._weights, self._met_once = weights, met_once
        self._uses: dict[str, list[Contribution]] = {}
        self._norms: list[Tensor] = []

    def take(self, rule: Rule, call: Call) -> None:
        """Everything has come back to a call."""
        backs = [back for back in call.backs if back is not None]
        own: dict[str, list[Contribution]] = {}
        for key, contribution in rule.gradients(call, backs).items():
            for name, part in self._weights.taken_back(contribution, call.weights[key]).items():
                own.setdefault(name, []).append(part)
        call.backs.clear()
        for name, uses in own.items():
            self._uses.setdefault(name, []).extend(uses)
            if name in self._met_once:
                self._settle(name)

    def _settle(self, name: str) -> None:
        """All uses of a parameter are there."""
        self._uses[name] = [combine(self._uses[name])]
        self._norms.append(self._uses[name][0].norms())

    def finish(self, losses: Tensor) -> Found:
        """All norms and contributions, when the backward pass is over."""
        for name in [name for name in self._uses if name not in self._met_once]:
            self._settle(name)
        return Found.of(losses, {name: uses[0] for name, uses in self._uses.items()}, self._norms)


# Watching a model run


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


class Watching(TorchFunctionMode):
    """Tells functions that take a weight from those that take none."""

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
        held = self.weights.held
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


def refuse_assignment(func: Callable[..., Any]) -> None:
    """A weight that is written into a tensor leaves no result to be watched."""
    if name_of(func) == "__setitem__":
        raise IrregularModel(
            "a parameter is written into a part of a tensor (use torch.where or torch.cat instead)"
        )


@dataclass(frozen=True)
class Site:
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
    """Where an axis holds several positions of every example: whether the examples of one position are adjacent."""

    @cached_property
    def named_dims(self) -> dict[Key, int | None]:
        """The same by the rule's names of arguments."""
        renamed = {str(k): name for k, name in enumerate(self.rule.arguments)} if self.rule else {}
        return {(renamed.get(name, name), k): dim for (name, k), dim in self.dims.items()}

    def names(self, count: int) -> tuple[str, ...]:
        """What the rule calls the first arguments."""
        known = self.rule.arguments if self.rule else ()
        return (*known[:count], *(str(k) for k in range(len(known), count)))


class Sites(tuple[Site, ...]):
    """All of them, in order."""

    @cached_property
    def met_once(self) -> frozenset[str]:
        """Parameters that meet examples at one place only: their norms are final when that place has been passed."""
        met = Counter(name for site in self if site.rule is not None for name in site.parameters)
        return frozenset(name for name, count in met.items() if count == 1)


class Recorder(Watching):
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
        self._gathering = Gathering(self.weights, sites.met_once)
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
            self.weights.add(result, [tensor for _, tensor in given if tensor in self.weights])
            return result
        call = self._call(func, site, args, kwargs)
        if not site.rule.suits(call):
            raise IrregularModel(f"the rule for {name} does not cover such a call")
        self._calls.append(call)
        result = site.rule.run(call)
        if tuple(tuple(part.shape) for _, part in tensors_of([("", result)])) != call.out_shapes:
            raise IrregularModel(f"{name} made less or more of these examples than of made-up ones")
        call.cut()
        return result

    def _call(self, func: Any, site: Site, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """The call with its arguments by the rule's names and its weights cut off."""
        assert site.rule is not None
        names = site.names(len(args))
        arguments = dict(zip(names, args, strict=True)) | dict(kwargs)
        own = {key: tensor for key, tensor in tensors_of(arguments.items()) if tensor in self.weights}
        if self.weights.origin(*own.values()) != site.parameters:
            raise IrregularModel(f"{site.name} took other parameters than with made-up examples")
        cut = replace_tensors(arguments, {key: tensor.detach() for key, tensor in own.items()})
        return Call(
            *(func, names, cut, own, site.named_dims, site.out_dims, site.out_shapes),
            *(self._examples, site.minor, self._fast, partial(self._gathering.take, site.rule), self._root),
        )

    def backward(self, losses: Tensor) -> Found:
        """Differentiate the sum of the examples' losses; what comes back is worked off on the way."""
        total = losses.sum()
        with torch.no_grad():
            if total.requires_grad:
                torch.autograd.grad(total, self._root, allow_unused=True)
            for call in self._calls:
                call.settle()
            return self._gathering.finish(losses.detach())

    def _beyond(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if next(tensors_of([("", result)]), None) is None:
            refuse_assignment(func)
            return result
        raise IrregularModel(
            f"{name_of(func)} was not called with made-up examples: the model depends on the data"
        )
