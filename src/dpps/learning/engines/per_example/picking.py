"""Rows that are picked by an index. Where the data decide which (the longest sequence first, tokens but no padding), a row
behind that no longer belongs to the example it seems to belong to, and made-up examples need not show it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpps.learning.engines.per_example.calls import tensors_of

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
        tensor = next((a for a in (*args[:2], *kwargs.values()) if _is_table(a)), None)
        return Picked(name, tuple(tensor.shape), frozenset({0})) if tensor is not None else None
    if not isinstance(tensor, Tensor):
        return None
    axes: set[int] = set()
    cut: set[int] = set()
    if name in _ALONG_ALL:
        axes = set(range(tensor.ndim))
    elif name in _ALONG_ONE and not any(a in constants for a in (*args[1:], *kwargs.values())):
        axes = _named_axes(name, tensor, args, kwargs)
    elif name in _BY_INDEX and len(args) > 1 and not (len(args) > 2 and _is_one_number(args[2])):
        axes = _indexed_axes(tensor, args[1], lambda part: not _keeps_rows(part, constants))
        cut = _indexed_axes(tensor, args[1], lambda part: isinstance(part, slice) and part != slice(None))
    elif name in _CUTTING:
        cut = _named_axes(name, tensor, args, kwargs)
    return Picked(name, tuple(tensor.shape), frozenset(axes), frozenset(cut)) if axes or cut else None


def _is_table(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_one_number(value: Any) -> bool:
    """The same number for whatever is written to: nothing changes its place."""
    return not isinstance(value, Tensor) or value.ndim == 0


def _named_axes(name: str, tensor: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    place = _DIM.get(name, 1)
    default = 0 if name == "unbind" or name in _CUTTING else None
    dim = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else default))
    if dim is None:
        return set(range(tensor.ndim))
    return {int(d) % max(tensor.ndim, 1) for d in (dim if isinstance(dim, (tuple, list)) else (dim,))}


def _indexed_axes(tensor: Tensor, index: Any, which: Callable[[Any], bool]) -> set[int]:
    """The axes that such parts of an index are about."""
    parts = list(index) if isinstance(index, tuple) else [index]
    behind = next((k for k, part in enumerate(parts) if part is Ellipsis), len(parts))
    found: set[int] = set()
    axis = 0
    for part in parts[:behind]:
        width = _width(part)
        if which(part):
            found |= set(range(axis, axis + width))
        axis += width
    axis = tensor.ndim
    for part in reversed(parts[behind + 1 :]):
        width = _width(part)
        axis -= width
        if which(part):
            found |= set(range(axis, axis + width))
    return found


def _width(part: Any) -> int:
    """How many axes a part of an index is about."""
    if part is None or isinstance(part, bool):
        return 0
    return part.ndim if isinstance(part, Tensor) and part.dtype == torch.bool else 1


def _keeps_rows(part: Any, constants: Constants) -> bool:
    return part is None or isinstance(part, (slice, bool)) or part in constants
