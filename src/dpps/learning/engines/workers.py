"""Several nodes at once, each in a thread of its own: two threads within one convolution are hardly faster than one."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from dpps.models.stages import ELEMENTWISE

_MOST = 4  # nodes at once: each needs memory for what its passes leave

_PURE = frozenset(
    (
        *(
            nn.Conv1d,
            nn.Conv2d,
            nn.Conv3d,
            nn.Linear,
            nn.BatchNorm1d,
            nn.BatchNorm2d,
            nn.BatchNorm3d,
            nn.GroupNorm,
            nn.LayerNorm,
        ),
        *(*ELEMENTWISE, nn.Flatten, nn.Sequential),
        *(
            nn.MaxPool1d,
            nn.MaxPool2d,
            nn.MaxPool3d,
            nn.AvgPool1d,
            nn.AvgPool2d,
            nn.AvgPool3d,
            nn.AdaptiveAvgPool2d,
            nn.ModuleList,
        ),
    )
)
"""Modules that draw no random numbers and keep nothing but registered buffers."""


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
                self._models.put(self._copy())
            # the number of torch's threads belongs to the thread that sets it: those that run already keep theirs
            self._pool = ThreadPoolExecutor(
                self.count, "dpps", initializer=torch.set_num_threads, initargs=(threads // self.count,)
            )
        return self._pool

    def _copy(self) -> nn.Module:
        """A model of its own whose parameters are the same tensors: they are only read, and a frozen backbone may be large."""
        return copy.deepcopy(self._model, {id(p): p for p in self._model.parameters()})

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


def suits(model: nn.Module, loss: Callable[..., Any]) -> bool:
    """Whether nodes may be worked on at once (all code that runs is known) and gain by it (there are convolutions)."""
    modules = list(model.modules())
    return (
        any(isinstance(m, nn.modules.conv._ConvNd) for m in modules)
        and all(_is_known(m) for m in modules)
        and getattr(loss, "__module__", "") == "torch.nn.functional"
    )


def _is_known(module: nn.Module) -> bool:
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    if hooks or module._backward_pre_hooks or "forward" in vars(module):
        return False
    if isinstance(module, _DropoutNd):
        return module.p == 0
    return type(module) in _PURE or type(module).__module__.startswith("dpps.models.")
