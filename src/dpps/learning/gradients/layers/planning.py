"""What to expect of a model: found out once on made-up examples, and checked there against plain autograd.

`Observer` runs batches of two and of three made-up examples: what grows with the number of examples is the axis they lie along.
There is no plan (`IrregularModel`) where a row cannot be attributed to one example. No real data are used.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
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
    tensors_in,
)
from dpps.learning.gradients.layers.recording import (
    Found,
    Recorder,
    Site,
    Sites,
    Watching,
    name_of,
    refuse_assignment,
)
from dpps.learning.gradients.layers.rule import RULES, IrregularModel, Key, tensors_of
from dpps.learning.preflight import made_up

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3}


@dataclass(frozen=True)
class Plan:
    """What to expect of a model, in order, and how much memory an example takes.

    Args:
        each: the examples' losses.
        sites: where weights go in.
        numbers: how many numbers one example leaves behind on its way forward and back.
        fast_formats: whether the model runs with memory laid out as is fastest.
    """

    each: ExampleLosses
    sites: Sites
    numbers: int
    fast_formats: bool

    def run(self, model: nn.Module, leaves: dict[str, Tensor], batch: tuple[Any, Any]) -> Found:
        """One forward and one backward pass."""
        recorder = Recorder(leaves, self.sites, len(tensors_in(batch)[0]), self.fast_formats)
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
        """For a model that takes such examples; `whole` as in `made_up`."""
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
            refuse_assignment(func)
            return result
        given = list(tensors_of([*((str(k), a) for k, a in enumerate(args)), *kwargs.items()]))
        own = [tensor for _, tensor in given if tensor in self.weights]
        meets = self._from_batch(args, kwargs) or len(self.seen) in self._meets
        inputs = tuple((key, tuple(tensor.shape)) for key, tensor in given)
        outputs = tuple(tuple(tensor.shape) for tensor in made)
        parameters = self.weights.origin(*own)
        self.seen.append(Seen(name_of(func), inputs, parameters, outputs, meets, made if meets else []))
        if meets:
            self._note(result)
        else:
            self.weights.add(result, own)
        return result


def _find_sites(
    model: nn.Module, each: ExampleLosses, parameters: Mapping[str, Tensor], batches: Batches
) -> tuple[Sites, int]:
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
    sites = Sites(_site(*seen) for seen in zip(two.seen, three.seen, changed.seen, strict=True))
    return sites, max(1, (three.numbers - two.numbers))


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
    """Which rows of an axis with several positions of every example change with the first example:
    every third, or the first third.

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

_ALONG_ONE = frozenset(
    (
        *("index_select", "gather", "take_along_dim", "unbind", "roll", "select"),
        *("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy"),
    )
)
_ALONG_ALL = frozenset(("take", "put", "masked_select", "masked_scatter", "_pack_padded_sequence"))
_BY_INDEX = frozenset(("__getitem__", "__setitem__", "index_put"))
_CUTTING = frozenset(("narrow", "split", "chunk", "tensor_split", "split_with_sizes"))
_DIM = {"take_along_dim": 2, "roll": 2, "split": 2, "chunk": 2, "tensor_split": 2, "split_with_sizes": 2}
"""Where a function has the axis, if not behind the tensor."""


@dataclass(frozen=True)
class Picked:
    """A call that picks rows.

    Args:
        name: of the function.
        shape: of the tensor whose rows are picked, or written to.
        axes: along which.
        cut: along which a part is taken from one row to another: of two or three examples it may be all of them, of more not.
    """

    name: str
    shape: tuple[int, ...]
    axes: frozenset[int]
    cut: frozenset[int] = frozenset()


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
        given = [tensor for _, tensor in tensors_of([*(("", a) for a in args), *kwargs.items()])]
        if name == "arange" or (given and all(tensor in self for tensor in given)):
            self._held.update((id(tensor), tensor) for _, tensor in tensors_of([("", result)]))


def picked(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], constants: Constants) -> Picked | None:
    """What a call picks by anything but constants; None: nothing."""
    name = name if name.endswith("__") else name.removesuffix("_")
    tensor = args[0] if args else kwargs.get("input")
    if name == "embedding":  # torch's two functions of this name have their arguments in another order
        given = (a for a in (*args[:2], *kwargs.values()) if isinstance(a, Tensor))
        table = next((a for a in given if a.is_floating_point()), None)
        return Picked(name, tuple(table.shape), frozenset({0})) if table is not None else None
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
    return Picked(name, tuple(tensor.shape), frozenset(axes), frozenset(cut)) if axes or cut else None


def _named_axes(name: str, tensor: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    place = _DIM.get(name, 1)
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
