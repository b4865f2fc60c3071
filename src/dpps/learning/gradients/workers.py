"""Several nodes at once, each in a thread of its own: where one node's products are small, two threads within one of them are
hardly faster than one."""

import copy
import dis
import inspect
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

_MOST = 4  # nodes at once: each needs memory for what its passes leave

_WRITES = frozenset(
    ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_SUBSCR", "DELETE_SUBSCR")
)
_BY_NAME = frozenset(
    ("setattr", "delattr", "getattr", "vars", "globals", "locals", "exec", "eval", "compile", "open")
)
"""Built-in functions by which code writes, or reaches what its names do not show."""


class Workers:
    """Threads that share torch's own: each has a copy of the model, for parameters are put into it for a while.

    Args:
        model: what the nodes train.
        nodes: how many there are.
    """

    def __init__(self, model: nn.Module, nodes: int) -> None:
        self._model, self.nodes, self._threads = model, nodes, 0
        self._models: SimpleQueue[nn.Module] = SimpleQueue()
        self._pool: ThreadPoolExecutor | None = None

    @property
    def count(self) -> int:
        """How many nodes run at once; it follows the number of torch's threads."""
        return max(1, min(torch.get_num_threads(), self.nodes, _MOST))

    def _start(self) -> ThreadPoolExecutor:
        threads = torch.get_num_threads()
        if self._pool is None or threads != self._threads:
            self.close()
            self._threads, self._models = threads, SimpleQueue()
            for _ in range(self.count):
                # of its own, but for its parameters: they are only read, and a frozen backbone may be large
                same = {id(p): p for p in self._model.parameters()}
                self._models.put(copy.deepcopy(self._model, same))
            # the number of torch's threads belongs to the thread that sets it: those that run already keep theirs
            self._pool = ThreadPoolExecutor(
                self.count, "dpps", initializer=torch.set_num_threads, initargs=(threads // self.count,)
            )
        return self._pool

    def close(self) -> None:
        """End the threads; the next work starts new ones."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def each(self, work: Callable[[nn.Module, int], None], nodes: int) -> None:
        """Call `work` with a model and the number of every node; return, or raise what one of them raised, when all are done."""
        pool = self._start()
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

    def __reduce__(self) -> tuple[type["Workers"], tuple[nn.Module, int]]:
        return Workers, (self._model, self.nodes)  # a copy has threads of its own

    def _one(self, work: Callable[[nn.Module, int], None], k: int) -> None:
        model = self._models.get()
        try:
            work(model, k)
        finally:
            self._models.put(model)


def may_run(device: torch.device) -> bool:
    """Whether there is more than one thread to be had; autocast belongs to the thread that asks for it."""
    return device.type == "cpu" and torch.get_num_threads() > 1 and not torch.is_autocast_enabled("cpu")


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
