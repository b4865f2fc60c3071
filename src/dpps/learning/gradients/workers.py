"""Several nodes at once, each in a thread of its own: where one node's products are small, two threads within one of them are
hardly faster than one."""

import copy
import dis
import inspect
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

_MOST = 4  # nodes at once: each needs memory for what its passes leave

_PURE = frozenset(
    (
        *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.Flatten, nn.Sequential, nn.ModuleList),
        *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm),
        *(nn.Identity, nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.LeakyReLU, nn.ELU),
        *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
        nn.AdaptiveAvgPool2d,
    )
)
"""Modules that draw no random numbers and keep nothing but registered buffers."""

_WRITES = frozenset(
    ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_SUBSCR", "DELETE_SUBSCR")
)
_BY_NAME = frozenset(
    ("setattr", "delattr", "getattr", "vars", "globals", "locals", "exec", "eval", "compile", "open")
)
"""Built-in functions by which code writes, or reaches what its names do not show."""


class Workers:
    """Threads that share torch's own: each has a copy of the model, for parameters are put into it for a while. None are started
    unless `several` nodes may run at once."""

    def __init__(self, model: nn.Module, *, several: bool = True) -> None:
        self._model, self._several, self._kind = model, several, (0, 0)
        self._models: SimpleQueue[nn.Module] = SimpleQueue()
        self._pool: ThreadPoolExecutor | None = None

    def count(self, rows: Tensor) -> int:
        """How many of so many nodes run at once; it follows the number of torch's threads."""
        # autocast belongs to the thread that asks for it
        if not self._several or rows.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
            return 1
        return max(1, min(torch.get_num_threads(), len(rows), _MOST))

    def _start(self, count: int) -> ThreadPoolExecutor:
        threads = torch.get_num_threads()
        if self._pool is None or (threads, count) != self._kind:
            self.close()
            self._kind, self._models = (threads, count), SimpleQueue()
            for _ in range(count):
                # of its own, but for its parameters: they are only read, and a frozen backbone may be large
                same = {id(p): p for p in self._model.parameters()}
                self._models.put(copy.deepcopy(self._model, same))
            # the number of torch's threads belongs to the thread that sets it: those that run already keep theirs
            self._pool = ThreadPoolExecutor(
                count, "dpps", initializer=torch.set_num_threads, initargs=(threads // count,)
            )
        return self._pool

    def close(self) -> None:
        """End the threads; the next work starts new ones."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def each(self, work: Callable[[nn.Module, int], None], nodes: int, count: int) -> None:
        """Call `work` with a model and the number of every node, `count` of them at once; return, or raise what one of them raised,
        when all are done."""
        if count == 1:
            for k in range(nodes):
                work(self._model, k)
            return
        pool = self._start(count)
        futures = [pool.submit(self._one, work, k) for k in range(nodes)]
        try:
            wait(futures)
        except BaseException:  # Ctrl-C: nobody may go on writing behind the caller's back
            for future in futures:
                future.cancel()
            wait(futures)
            raise
        for future in futures:
            future.result()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Workers, several=self._several), (self._model,)  # a copy has threads of its own

    def _one(self, work: Callable[[nn.Module, int], None], k: int) -> None:
        model = self._models.get()
        try:
            work(model, k)
        finally:
            self._models.put(model)


def draws_nothing(model: nn.Module) -> bool:
    """Whether the model is made of modules that are known to draw no random numbers, and nobody listens to them."""
    return all(
        _as_written(m) and (type(m) in _PURE or isinstance(m, _DropoutNd) or _is_from(m, "dpps.models."))
        for m in model.modules()
    )


def keeps_nothing(model: nn.Module) -> bool:
    """Whether no module of the model writes anywhere but into tensors and names of its own call, as far as code can be read.

    Modules of torch and of `dpps.models` are known. Of others `forward` is read: it may use torch, numbers, and the module's own
    parameters and modules; whatever else it uses may write. Two threads with a copy of the model each then do not meet.
    """
    known = "torch.", "dpps.models."
    return all(_as_written(m) and (_is_from(m, *known) or _only_reads(m)) for m in model.modules())


def _as_written(module: nn.Module) -> bool:
    """Whether nobody listens to the module or has patched it, and it drops nothing."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    if hooks or module._backward_pre_hooks or "forward" in vars(module):
        return False
    return not (isinstance(module, _DropoutNd) and module.p > 0)


def _is_from(module: nn.Module, *packages: str) -> bool:
    return type(module).__module__.startswith(packages)


def _only_reads(module: nn.Module) -> bool:
    forward = type(module).forward
    if not isinstance(forward, types.FunctionType) or forward.__closure__:
        return False
    steps = [step for code in _with_inner(forward.__code__) for step in dis.get_instructions(code)]
    names = {str(step.argval) for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    if any(step.opname in _WRITES for step in steps) or not _BY_NAME.isdisjoint(names):
        return False
    # whatever an attribute is taken of: it may be the module, so what the module has of that name must keep nothing
    attributes = {str(step.argval) for step in steps if step.opname in ("LOAD_ATTR", "LOAD_METHOD")}
    own = {name: inspect.getattr_static(type(module), name, None) for name in attributes} | vars(module)
    used = [forward.__globals__[name] for name in names if name in forward.__globals__]
    return all(_is_harmless(value) for value in (*used, *(own[name] for name in attributes)))


def _is_harmless(value: Any) -> bool:
    """Numbers, texts and torch; lists and dictionaries may be written to by their methods."""
    if isinstance(value, (int, float, str, bool, type(None), torch.dtype, torch.device)):
        return True
    if isinstance(value, tuple):
        return all(map(_is_harmless, value))
    if isinstance(value, types.ModuleType):
        return value.__name__.split(".")[0] in ("torch", "math")
    return str(getattr(value, "__module__", "")).split(".")[0] in ("torch", "math") and callable(value)


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_inner(constant)
