"""One forward and one backward pass that give every example's norm, and then the sum of clipped gradients.

`Observer` watches a model run on made-up examples and notes every torch function that takes a trained weight: a `Site`. A `Plan`
is the list of sites, checked against plain autograd. `Recorder` then runs real batches by the plan: where a weight meets examples
it is cut off from the graph, so that no gradient of it is computed, and what went in is kept. `Gathering` takes what comes back.
"""

import types
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from dpps.learning.gradients.calling import (
    ExampleLosses,
    GradientError,
    Loss,
    call_model,
    cannot_be_differentiated,
    gradient_of_one,
    leaves_of,
    pick,
    quiet,
    tensors_in,
)
from dpps.learning.gradients.layers.contributions import Contribution, Explicit, combine
from dpps.learning.gradients.layers.rules import (
    RULES,
    Call,
    IrregularModel,
    Key,
    Rule,
    replace_tensors,
    tensors_of,
)
from dpps.learning.preflight import made_up


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
        for tensor in tensors_in(result):
            if tensor.requires_grad and tensor not in self:
                self.held[id(tensor)] = tensor, self.origin(*sources)

    def taken_back(self, contribution: Contribution, weight: Tensor) -> dict[str, Contribution]:
        """A contribution to a weight as contributions to the parameters that it is computed from."""
        names = sorted(self.origin(weight))
        leaves = [self.leaves[name] for name in names]
        if weight is leaves[0]:
            return {names[0]: contribution}
        options = {"is_grads_batched": True, "retain_graph": True, "materialize_grads": True}
        with torch.enable_grad(), quiet():
            found = torch.autograd.grad(weight, leaves, contribution.explicit(), **options)
        return {name: Explicit(g) for name, g in zip(names, found, strict=True)}


@dataclass
class Found:
    """What one pass found."""

    losses: Tensor
    """Of every example."""
    contributions: dict[str, Contribution]
    """By parameter."""
    squares: Tensor
    """Every example's squared norm over all parameters, in float64."""

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
    """Puts together what comes back, call by call during the backward pass: it is still in the cache then, and most of it need
    not be kept. The norms of parameters that are `met_once` are final after one call. Calls hold it, so it holds no call: torch
    holds graphs in which Python's collector would not see a cycle.
    """

    def __init__(self, weights: Weights, met_once: frozenset[str]) -> None:
        self._weights, self._met_once = weights, met_once
        self._uses: dict[str, list[Contribution]] = {}
        self._norms: list[Tensor] = []

    def take(self, rule: Rule, call: Call) -> None:
        """Note the gradients of a call to whose watched tensors everything has come back."""
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
        self._uses[name] = [combine(self._uses[name])]
        self._norms.append(self._uses[name][0].norms())

    def finish(self, losses: Tensor) -> Found:
        """Return all norms and contributions, when the backward pass is over."""
        for name in [name for name in self._uses if name not in self._met_once]:
            self._settle(name)
        return Found.of(losses, {name: uses[0] for name, uses in self._uses.items()}, self._norms)


# Watching a model run


def name_of(function: Callable[..., Any]) -> str:
    """The name under which rules know a function; properties such as `W.T` have that of the property."""
    name = getattr(function, "__name__", "?")
    return getattr(getattr(function, "__self__", None), "__name__", name) if name == "__get__" else name


@cache
def body_of(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """For functions that torch writes in Python: the same without the question who overrides it, so that its parts are seen."""
    if getattr(function, "__globals__", None) is not vars(F):
        return None
    never = {name: lambda *_: False for name in vars(F) if name.startswith("has_torch_function")}
    code: Any = function
    body = types.FunctionType(
        code.__code__, vars(F) | never, code.__name__, code.__defaults__, code.__closure__
    )
    body.__kwdefaults__ = code.__kwdefaults__
    return body


def names_of(rule: Rule | None, count: int) -> tuple[str, ...]:
    """What a rule calls its first arguments; those that it has no name for are called by their numbers."""
    known = rule.arguments[:count] if rule else ()
    return (*known, *(str(k) for k in range(len(known), count)))


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
        return any(
            id(value) in held
            or (isinstance(value, (list, tuple)) and any(id(item) in held for item in value))
            for value in (*args, *kwargs.values())
        )

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
    """The axis of examples of every argument."""
    out_dims: tuple[int | None, ...]
    out_shapes: tuple[tuple[int, ...], ...]
    """With 1 example."""
    parameters: frozenset[str]
    minor: bool
    """Where an axis holds several positions of every example: whether the examples of one position are adjacent."""


class Recorder(Watching):
    """Runs a model on a batch as planned and gathers what comes back to every function where weights meet examples."""

    def __init__(self, leaves: Mapping[str, Tensor], plan: "Plan", examples: int) -> None:
        super().__init__(leaves)
        self._plan, self._examples, self._next = plan, examples, 0
        self._gathering = Gathering(self.weights, plan.met_once)
        self._calls: list[Call] = []
        self._root = torch.empty(0, requires_grad=True)

    def weighted(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        name = name_of(func)
        if self._next == len(self._plan.sites) or self._plan.sites[self._next].name != name:
            result = func(*args, **kwargs)
            if not tensors_in(result):
                refuse_assignment(func)
                return result
            raise IrregularModel(
                f"{name} was not called with made-up examples: the model depends on the data"
            )
        site = self._plan.sites[self._next]
        self._next += 1
        if site.rule is None:
            result = func(*args, **kwargs)
            self.weights.add(result, [t for t in tensors_in((args, kwargs)) if t in self.weights])
            return result
        call = self._call(func, site, site.rule, args, kwargs)
        if not site.rule.suits(call):
            raise IrregularModel(f"the rule for {name} does not cover such a call")
        self._calls.append(call)
        result = site.rule.run(call)
        if tuple(tuple(part.shape) for part in tensors_in(result)) != call.out_shapes:
            raise IrregularModel(f"{name} made less or more of these examples than of made-up ones")
        call.cut()
        return result

    def _call(
        self, func: Any, site: Site, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Call:
        """The call with its arguments by the rule's names and its weights cut off."""
        names = names_of(rule, len(args))
        arguments = dict(zip(names, args, strict=True)) | dict(kwargs)
        own = {key: tensor for key, tensor in tensors_of(arguments.items()) if tensor in self.weights}
        if self.weights.origin(*own.values()) != site.parameters:
            raise IrregularModel(f"{site.name} took other parameters than with made-up examples")
        cut = replace_tensors(arguments, {key: tensor.detach() for key, tensor in own.items()})
        return Call(
            *(func, names, cut, own, site.dims, site.out_dims, site.out_shapes, self._examples),
            *(site.minor, self._plan.fast_formats, partial(self._gathering.take, rule), self._root),
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


# What to expect of a model: found out once on made-up examples, and checked there against plain autograd.
#
# `Observer` runs batches of two and of three made-up examples: what grows with the number of examples is the axis they lie along.
# There is no plan (`IrregularModel`) where a row cannot be attributed to one example. No real data are used.


_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3}


@dataclass(frozen=True)
class Plan:
    """What to expect of a model, in order, and how much memory an example takes."""

    each: ExampleLosses
    sites: tuple[Site, ...]
    """Where weights go in."""
    numbers: int
    """How many numbers one example leaves behind on its way forward and back."""
    fast_formats: bool
    """Whether the model runs with memory laid out as is fastest."""

    @cached_property
    def met_once(self) -> frozenset[str]:
        """Parameters that meet examples at one place only."""
        met = Counter(name for site in self.sites if site.rule is not None for name in site.parameters)
        return frozenset(name for name, count in met.items() if count == 1)

    def run(self, model: nn.Module, leaves: dict[str, Tensor], batch: tuple[Any, Any]) -> Found:
        """One forward and one backward pass."""
        recorder = Recorder(leaves, self, len(tensors_in(batch)[0]))
        with torch.enable_grad():
            return recorder.backward(_losses(model, self.each, recorder, batch))


@dataclass(frozen=True)
class Batches:
    """Made-up batches of (inputs, targets): two examples, three, and three of which the first is another."""

    two: tuple[Any, Any]
    three: tuple[Any, Any]
    changed: tuple[Any, Any]

    @classmethod
    def like(cls, example: tuple[Any, Any], *, whole: bool = False) -> Self:
        """Make them up for a model that takes such examples; `whole` as in `made_up`."""
        three, other = made_up(example, 3, whole=whole), made_up(example, 1, whole=whole, seed=1)

        def joined(new: Any, own: Any) -> Any:
            return torch.cat([new, own[1:]]) if isinstance(own, Tensor) else own

        return cls(made_up(example, 2, whole=whole), three, tree_map(joined, other, three))


def make_plan(
    model: nn.Module, each: ExampleLosses, parameters: Mapping[str, Tensor], batches: Batches
) -> Plan:
    """A plan that gives what plain autograd gives, for made-up batches of two and of three examples.

    Raises:
        IrregularModel: there is none.
    """
    sites, numbers = _find_sites(model, each, parameters, batches)
    for fast in (True, False):
        try:
            found = Plan(each, sites, numbers, fast).run(model, leaves_of(parameters), batches.three)
        except RuntimeError:  # a view of what does not lie in the usual order
            if not fast:
                raise
            continue
        check(model, each.loss, parameters, found, batches.three)
        return Plan(each, sites, 2 * numbers + found.numbers // 3, fast)
    raise AssertionError("unreachable")


def _losses(model: nn.Module, each: ExampleLosses, watching: Watching, batch: tuple[Any, Any]) -> Tensor:
    with watching:
        outputs = call_model(model, watching.weights.leaves, batch[0])
    return each(outputs, batch[1], len(tensors_in(batch)[0]))


def check(
    model: nn.Module, loss: Loss, parameters: Mapping[str, Tensor], found: Found, batch: tuple[Any, Any]
) -> None:
    """Compare what was found for made-up examples with plain autograd, one example after the other.

    Raises:
        IrregularModel: they differ.
        UsageError: autograd cannot differentiate the model either.
    """
    losses, squares = found.losses, found.squares
    factors = 1.0 / torch.arange(1, len(losses) + 1).to(losses)
    leaves = leaves_of(parameters)
    totals: dict[str, Tensor] = {}
    ours = found.totals(factors)
    for k, factor in enumerate(factors):
        try:
            own, gradients = gradient_of_one(model, loss, leaves, *pick(batch, k))
        except GradientError as error:  # nobody's data are here, so stopping tells nothing
            raise cannot_be_differentiated(model, error) from error
        norm = torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt()
        _close(own, losses[k], "the loss of an example depends on the others in its batch")
        _close(norm, squares[k].sqrt(), "the norm of a gradient is not what autograd says")
        for name, g in gradients.items():
            totals[name] = totals.get(name, torch.zeros_like(g)) + factor * g
    scale = torch.stack([squares.max().sqrt().to(losses), *(t.norm() for t in totals.values())]).max()
    for name, total in totals.items():
        own = ours.get(name, torch.zeros_like(total))
        if not bool((own - total).abs().max() <= _TOLERANCE.get(total.dtype, 1e-2) * scale):
            raise IrregularModel(f"the gradient of {name} is not what autograd says")


def _close(a: Tensor, b: Tensor, message: str) -> None:
    tolerance = _TOLERANCE.get(b.dtype if b.dtype != torch.float64 else a.dtype, 1e-2)
    tolerance = max(tolerance, 2e-3 if torch.get_default_dtype() == torch.float32 else tolerance)
    if not bool((a.double() - b.double()).abs() <= tolerance * (1e-3 + a.double().abs())):
        raise IrregularModel(message)


# Where weights meet examples


@dataclass(frozen=True)
class Seen:
    """A function that took weights, with the shapes of its tensors."""

    name: str
    inputs: tuple[tuple[Key, tuple[int, ...]], ...]
    parameters: frozenset[str]
    outputs: tuple[tuple[int, ...], ...]
    meets: bool
    made: list[Tensor]


class Observer(Watching):
    """Notes what takes weights, on a made-up batch. `meets` are positions among it where examples are met although no tensor of the
    batch goes in."""

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
        return any(id(tensor) in self._batch for tensor in tensors_in((args, kwargs)))

    def _note(self, made: Sequence[Tensor]) -> None:
        for tensor in made:
            self._batch[id(tensor)] = tensor
            self.numbers += 0 if tensor._is_view() else tensor.numel()

    def other(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result, name = func(*args, **kwargs), name_of(func)
        self._constants.note(name, args, kwargs, result)
        rows = picked(name, args, kwargs, self._constants)
        if rows is not None:
            self.picked.append(rows)
        if self._from_batch(args, kwargs):
            self._note(tensors_in(result))
            self.shapes += [tuple(tensor.shape) for tensor in tensors_in(result)]
        return result

    def weighted(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result, name = func(*args, **kwargs), name_of(func)
        made = tensors_in(result)
        if not made:
            refuse_assignment(func)
            return result
        names = names_of(RULES.get(name), len(args))
        given = list(tensors_of([*zip(names, args, strict=True), *kwargs.items()]))
        own = [tensor for _, tensor in given if tensor in self.weights]
        meets = self._from_batch(args, kwargs) or len(self.seen) in self._meets
        inputs = tuple((key, tuple(tensor.shape)) for key, tensor in given)
        outputs = tuple(tuple(tensor.shape) for tensor in made)
        self.seen.append(Seen(name, inputs, self.weights.origin(*own), outputs, meets, made if meets else []))
        if meets:
            self._note(made)
        else:
            self.weights.add(result, own)
        return result


def _find_sites(
    model: nn.Module, each: ExampleLosses, parameters: Mapping[str, Tensor], batches: Batches
) -> tuple[tuple[Site, ...], int]:
    """Where weights meet examples, from runs with two and with three examples; and the numbers an example leaves."""
    meets: frozenset[int] = frozenset()
    while True:
        two, three = (_observe(model, each, parameters, b, meets) for b in (batches.two, batches.three))
        _refuse_picking(two, three)
        pairs = list(zip(two.seen, three.seen, strict=False))
        if len(two.seen) != len(three.seen) or any(a.name != b.name for a, b in pairs):
            raise IrregularModel("what the model does depends on the number of examples")
        grown = [
            any(_dim(a, b) is not None for a, b in zip(one.outputs, other.outputs, strict=True))
            for one, other in pairs
        ]
        new = next((k for k, (one, _) in enumerate(pairs) if grown[k] and not one.meets), None)
        if new is None:
            break
        meets |= {new}
    if any(one.meets and not grows for (one, _), grows in zip(pairs, grown, strict=True)):
        raise IrregularModel("a sum over the batch meets a parameter")
    changed = _observe(model, each, parameters, batches.changed, meets)
    sites = tuple(_site(*seen) for seen in zip(two.seen, three.seen, changed.seen, strict=True))
    return sites, max(1, three.numbers - two.numbers)


def _refuse_picking(two: Observer, three: Observer) -> None:
    """Rows along the axis of examples that are picked by an index, or by a matrix of examples by examples."""
    if len(two.picked) != len(three.picked) or len(two.shapes) != len(three.shapes):
        raise IrregularModel("what the model does depends on the number of examples")
    for a, b in zip(two.picked, three.picked, strict=True):
        cut = {k for k in a.cut if (a.shape[k], b.shape[k]) == (2, 3)}
        if cut or a.axes & _grown(a.shape, b.shape):
            raise IrregularModel(
                f"{a.name} picks rows of the batch, so they cannot be attributed to examples"
            )
    if any(len(_grown(a, b)) > 1 for a, b in zip(two.shapes, three.shapes, strict=True)):
        raise IrregularModel("a tensor has the examples along two axes")


def _grown(two: Sequence[int], three: Sequence[int]) -> set[int]:
    """The axes of a tensor that are longer with three examples than with two."""
    return {k for k, (a, b) in enumerate(zip(two, three, strict=False)) if a != b}


def _observe(
    model: nn.Module,
    each: ExampleLosses,
    parameters: Mapping[str, Tensor],
    batch: tuple[Any, Any],
    meets: frozenset[int],
) -> Observer:
    observer = Observer(leaves_of(parameters), tensors_in(batch), meets)
    _losses(model, each, observer, batch)
    return observer


def _dim(two: Sequence[int], three: Sequence[int]) -> int | None:
    """The axis of a tensor that grows with the number of examples."""
    if len(two) != len(three):
        raise IrregularModel("the number of axes of a tensor depends on the number of examples")
    grown = _grown(two, three)
    if not grown:
        return None
    axis = grown.pop()
    if grown or two[axis] * 3 != three[axis] * 2:
        raise IrregularModel("a tensor does not grow in proportion to the number of examples")
    return axis


def _is_minor(three: Seen, changed: Seen, out: Sequence[int | None]) -> bool:
    """Which rows of an axis with several positions of every example change with the first example: every third, or the first third.

    Raises:
        IrregularModel: what changes fits both or neither, so it is not known whose rows they are. Guessing would bound the
            norms of mixtures.
    """
    for before, after, dim in zip(three.made, changed.made, out, strict=False):
        if dim is None or before.shape[dim] == 3 or not before.is_floating_point():
            continue
        differs = (before != after).movedim(dim, 0).flatten(1).any(1) if before.ndim > 1 else before != after
        minor = not bool(torch.unflatten(differs, 0, (-1, 3))[:, 1:].any())
        major = not bool(torch.unflatten(differs, 0, (3, -1))[1:].any())
        if minor == major:
            raise IrregularModel("the rows of a layer cannot be attributed to examples")
        return minor
    return False


def _site(two: Seen, three: Seen, changed: Seen) -> Site:
    dims: dict[Key, int | None] = {
        key: _dim(a, b) for (key, a), (_, b) in zip(two.inputs, three.inputs, strict=True)
    }
    out = tuple(_dim(a, b) for a, b in zip(two.outputs, three.outputs, strict=True))
    single = tuple(
        tuple(size // 2 if k == dim else size for k, size in enumerate(shape))
        for shape, dim in zip(two.outputs, out, strict=True)
    )
    if not two.meets:
        return Site(two.name, None, dims, out, single, two.parameters, minor=False)
    rule = RULES.get(two.name)
    if rule is None:
        raise IrregularModel(f"{', '.join(sorted(two.parameters)[:3])}: {two.name} has no rule")
    return Site(two.name, rule, dims, out, single, two.parameters, _is_minor(three, changed, out))


# Rows picked by an index: where the data decide which (the longest sequence first, tokens but no padding), a row behind no longer
# belongs to the example it seems to belong to, and made-up examples need not show it

_ALONG_ONE = dict.fromkeys(
    (
        *("index_select", "gather", "unbind", "select"),
        *("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy"),
    ),
    1,
) | {"take_along_dim": 2, "roll": 2}
"""Functions, and where their axis is given."""
_ALONG_ALL = frozenset(("take", "put", "masked_select", "masked_scatter", "_pack_padded_sequence"))
_BY_INDEX = frozenset(("__getitem__", "__setitem__", "index_put"))
_CUTTING = {"narrow": 1, "split": 2, "chunk": 2, "tensor_split": 2, "split_with_sizes": 2}


@dataclass(frozen=True)
class Picked:
    """A call that picks rows."""

    name: str
    shape: tuple[int, ...]
    """Of the tensor whose rows are picked, or written to."""
    axes: set[int]
    """Along which."""
    cut: set[int]
    """Along which a part is taken from one row to another: of two or three examples it may be all of them, of more not."""


class Constants:
    """Index tensors that no data had a part in: `torch.arange(...)`, and what is made of such alone."""

    def __init__(self) -> None:
        self._held: dict[int, Tensor] = {}  # holding them keeps their identities from being given anew

    def __contains__(self, index: object) -> bool:
        if not isinstance(index, Tensor):
            return False
        return id(index) in self._held or torch._C._functorch.is_batchedtensor(index)  # inside torch.vmap

    def note(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """A function has been called."""
        given = tensors_in((args, kwargs))
        if name == "arange" or (given and all(tensor in self for tensor in given)):
            self._held.update((id(tensor), tensor) for tensor in tensors_in(result))


def picked(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], constants: Constants) -> Picked | None:
    """What a call picks by anything but constants; None: nothing."""
    name = name if name.endswith("__") else name.removesuffix("_")
    tensor = args[0] if args else kwargs.get("input")
    if name == "embedding":  # torch's two functions of this name have their arguments in another order
        given = (a for a in (*args[:2], *kwargs.values()) if isinstance(a, Tensor))
        table = next((a for a in given if a.is_floating_point()), None)
        return Picked(name, tuple(table.shape), {0}, set()) if table is not None else None
    if not isinstance(tensor, Tensor):
        return None
    axes: set[int] = set()
    cut: set[int] = set()
    if name in _ALONG_ALL:
        axes = set(range(tensor.ndim))
    elif name in _ALONG_ONE and not any(a in constants for a in (*args[1:], *kwargs.values())):
        axes = _named_axes(name, tensor, args, kwargs)
    elif name in _BY_INDEX and len(args) > 1:
        # the same number for whatever is written to: nothing changes its place
        if len(args) > 2 and not (isinstance(args[2], Tensor) and args[2].ndim):
            return None

        def picks(part: Any) -> bool:
            return not (part is None or isinstance(part, (slice, bool)) or part in constants)

        axes = _indexed_axes(tensor, args[1], picks)
        cut = _indexed_axes(tensor, args[1], lambda part: isinstance(part, slice) and part != slice(None))
    elif name in _CUTTING:
        cut = _named_axes(name, tensor, args, kwargs)
    return Picked(name, tuple(tensor.shape), axes, cut) if axes or cut else None


def _named_axes(name: str, tensor: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    place = (_ALONG_ONE | _CUTTING)[name]
    default = 0 if name == "unbind" or name in _CUTTING else None
    dim = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else default))
    if dim is None:
        return set(range(tensor.ndim))
    return {int(d) % max(tensor.ndim, 1) for d in (dim if isinstance(dim, (tuple, list)) else (dim,))}


def _indexed_axes(tensor: Tensor, index: Any, which: Callable[[Any], bool]) -> set[int]:
    """The axes that such parts of an index are about."""
    parts: list[Any] = list(index) if isinstance(index, tuple) else [index]
    rest = tensor.ndim - sum(_width(part) for part in parts)
    found: set[int] = set()
    axis = 0
    for part in parts:
        width = rest if part is Ellipsis else _width(part)
        if part is not Ellipsis and which(part):
            found |= set(range(axis, axis + width))
        axis += width
    return found


def _width(part: Any) -> int:
    """How many axes a part of an index is about."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    return part.ndim if isinstance(part, Tensor) and part.dtype == torch.bool else 1
