"""Which modules may run in several threads at once: those whose code is known to keep nothing."""

import dis
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

_WRITES = frozenset(
    ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_SUBSCR", "DELETE_SUBSCR")
)
_OURS = ("torch.", "dpps.models.")
_BY_NAME = frozenset(
    ("setattr", "delattr", "getattr", "vars", "globals", "locals", "exec", "eval", "compile", "open")
)
"""Built-in functions by which code writes, or reaches what its names do not show."""


def keeps_nothing(model: nn.Module) -> bool:
    """Whether no module of the model writes anywhere but into tensors and names of its own call, as far as code can be read.

    Modules of torch and of `dpps.models` are known; of others `forward` and what it calls is read, methods and attributes of the
    module itself included, and whatever cannot be read counts as writing. Two threads with a copy of the model each then do not
    meet.
    """
    return all(_is_known(module) for module in model.modules())


def _is_known(module: nn.Module) -> bool:
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    if hooks or module._backward_pre_hooks or "forward" in vars(module):
        return False
    if isinstance(module, _DropoutNd) and module.p > 0:
        return False
    return type(module).__module__.startswith(_OURS) or _only_reads(type(module).forward, module, set())


def _only_reads(function: Callable[..., Any], module: nn.Module, seen: set[Any]) -> bool:
    if function in seen:
        return True
    seen.add(function)
    if not isinstance(function, types.FunctionType) or function.__closure__:
        return False
    names: set[str] = set()
    attributes: set[str] = set()
    for code in _with_inner(function.__code__):
        for step in dis.get_instructions(code):
            if step.opname in _WRITES:
                return False
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                names.add(str(step.argval))
            if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                attributes.add(str(step.argval))
    if not _BY_NAME.isdisjoint(names):
        return False
    used = (function.__globals__[name] for name in names if name in function.__globals__)
    return all(_is_harmless(value, module, seen) for value in used) and all(
        _only_reads_attribute(name, module, seen) for name in attributes
    )


def _only_reads_attribute(name: str, module: nn.Module, seen: set[Any]) -> bool:
    """Whatever the attribute is taken of: it may be the module, so what the module has of that name must keep nothing."""
    if name in vars(module):
        return _is_harmless(vars(module)[name], module, seen)
    own = inspect.getattr_static(type(module), name, None)
    if isinstance(own, (staticmethod, classmethod)):
        own = own.__func__
    if isinstance(own, property):
        own = own.fget
    if own is None or str(getattr(own, "__module__", "")).startswith("torch."):
        return True  # a parameter, a module, torch's own, or nothing of this module
    return _is_harmless(own, module, seen)


def _is_harmless(value: Any, module: nn.Module, seen: set[Any]) -> bool:
    """Numbers, texts, torch and what only reads; lists and dictionaries may be written to by their methods."""
    if isinstance(value, (int, float, str, bool, type(None), torch.dtype, torch.device)):
        return True
    if isinstance(value, tuple):
        return all(_is_harmless(part, module, seen) for part in value)
    if isinstance(value, types.ModuleType):
        return value.__name__.split(".")[0] in ("torch", "math")
    if str(getattr(value, "__module__", "")).split(".")[0] in ("torch", "math"):
        return callable(value)
    return isinstance(value, types.FunctionType) and _only_reads(value, module, seen)


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_inner(constant)
