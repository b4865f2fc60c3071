"""A device that every machine has: tensors on it say that they are on "meta", and keep their numbers.

As on a graphics card, an operation on tensors here and there is an error, numbers come back by `.cpu()`, `.item()` or `.tolist()`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "meta"
_aten = torch.ops.aten
_MOVES = (_aten._to_copy.default, _aten.copy_.default, _aten._local_scalar_dense.default)
_INDEXES = (_aten.index.Tensor, _aten.index_put_.default, _aten._index_put_impl_.default)


class _There(Tensor):
    """A tensor on the device."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> "_There":
        layout = {"strides": numbers.stride(), "storage_offset": numbers.storage_offset()}
        made = torch.Tensor._make_wrapper_subclass(
            cls, numbers.shape, dtype=numbers.dtype, device=NAME, requires_grad=False, **layout
        )
        made.numbers = numbers
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _carried_out(func, args, kwargs or {})


class _Made(TorchFunctionMode):
    """`torch.tensor` makes tensors on a device without being seen by a dispatch mode, and so does a list as an index."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.__getitem__ and isinstance(args[1], list):
            return func(args[0], torch.tensor(args[1]))
        if func is torch.tensor and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        return func(*args, **kwargs)


class Elsewhere(TorchDispatchMode):
    """Within it, there is the device."""

    def __enter__(self) -> Any:
        self._made = _Made()
        self._made.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._made.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _carried_out(func, args, kwargs or {})


def _carried_out(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = tree_leaves((args, kwargs))
    there = any(isinstance(leaf, _There) for leaf in leaves)
    here = [
        leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, _There) and leaf.ndim
    ]
    if there and here and func not in _MOVES and func not in _INDEXES:
        raise RuntimeError(f"{func}: expected all tensors to be on the same device")
    asked = kwargs.get("device")
    if asked is not None:
        there = torch.device(asked).type == NAME
        kwargs = kwargs | {"device": torch.device("cpu")}
    elif func is _aten.copy_.default:
        there = isinstance(args[0], _There)
    plain = tree_map(lambda leaf: leaf.numbers if isinstance(leaf, _There) else leaf, (args, kwargs))
    found = func(*plain[0], **plain[1])
    return tree_map(lambda leaf: _There(leaf) if there and isinstance(leaf, Tensor) else leaf, found)
