"""The two gradients of Algorithm 2 on whole batches, for all nodes held here.

`Vectorised` runs all nodes at once (`torch.vmap` over stacked parameters). `Loop` runs one node after the other: for models whose
layers keep state or draw random numbers (BatchNorm, dropout), and for convolutions on a CPU, where a loop is faster. `Workers` let
a loop run several nodes at once, each in a thread. `dpps.learning.gradients.chain` has a third engine, for chains of linear layers.
All give the same numbers.
"""

import copy
import dis
import inspect
import logging
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from dpps.learning.gradients.calling import FAILURES, Loss, call_model, leaves_of, loss_of, pick, swapped
from dpps.learning.partition import Partition, Slot
from dpps.noise.source import DROPOUT, key

Update = Callable[[Tensor, slice], Tensor]
"""Takes local gradients (k, d_l) and which rows they belong to, and returns the new local parameters of these rows."""
EngineName = Literal["auto", "vectorised", "loop"]

_log = logging.getLogger(__name__)


class Engine(ABC):
    """Gradients of the rows held here. `x` and `target` have one entry per row (a stacked tensor or a list)."""

    at_once = 1000
    """How many examples `outputs` should be asked for at a time."""
    hides_failures = False
    """Whether a node on whose batch the model fails stays as it is for a round: stopping because of it would tell of its data."""

    def __init__(self, partition: Partition, loss: Loss, rows: Sequence[int], seed: int = 0) -> None:
        self.partition, self.loss, self.rows, self.seed = partition, loss, rows, seed
        self.model = partition.model
        self.away: frozenset[int] = frozenset()
        """Positions of rows whose nodes are absent this round: nothing they keep may change."""
        self._shared = torch.empty(0)
        self._local: list[Tensor] = []

    def step(
        self,
        y: Tensor,
        l: Tensor,
        x: Any,
        target: Any,
        update: Update,
        round_: int,
        undo: Callable[[], None] = lambda: None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Losses at (y, l), the new local parameters, and the shared gradients at (y, l_new) on the same batch.

        The results may lie in memory that is used again: gradients by the next round, local parameters by the one after. Where
        failures are hidden and the model fails on somebody's batch, the step is repeated node by node, and only the nodes on
        whose batches it fails stay as they are.

        Args:
            undo: takes back what `update` has done before the step is repeated.
        """
        try:
            return self._step(y, l, x, target, update, round_)
        except FAILURES:
            if not self.hides_failures:
                raise
        undo()
        loop = Loop(self.partition, self.loss, self.rows, self.seed)
        loop.hides_failures, loop.away = True, self.away
        return loop._step(y, l, x, target, update, round_)

    @abstractmethod
    def _step(
        self, y: Tensor, l: Tensor, x: Any, target: Any, update: Update, round_: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`step`, raising whatever the model raises."""

    @abstractmethod
    def outputs(self, s: Tensor, l: Tensor, x: Tensor) -> Tensor:
        """Evaluation: every node's output, (rows, batch, ...), for the same inputs and one s for all."""

    @torch.no_grad()
    def outputs_of(self, k: int, s: Tensor, l: Tensor, x: Tensor) -> Tensor:
        """Evaluation: the output of the k-th node held here."""
        self.model.eval()
        out: Tensor = self._whole(s, l, x)
        return out

    def _whole(self, s: Tensor, l: Tensor, x: Any) -> Any:
        return call_model(self.model, self.partition.views(s, l), x)

    def _spare(self, l: Tensor) -> Tensor:
        """Memory for new local parameters, of two that take turns: fresh pages would cost as much as a step."""
        if len(self._local) != 2 or any(own.shape != l.shape or own.dtype != l.dtype for own in self._local):
            self._local = [torch.empty_like(l), torch.empty_like(l)]
        return next(own for own in self._local if own.data_ptr() != l.data_ptr() or not l.numel())

    def _gradients(self, y: Tensor) -> Tensor:
        """Memory for shared gradients, used again in every round."""
        if self._shared.shape != y.shape or self._shared.dtype != y.dtype:
            self._shared = torch.empty_like(y)
        return self._shared

    def state(self) -> dict[str, Tensor]:
        """What the engine keeps from round to round (buffers), for checkpoints."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take up what `state` gave."""
        assert not state


class Vectorised(Engine):
    """All nodes at once. The sum of the nodes' losses has each node's gradient in its own row."""

    def _step(
        self, y: Tensor, l: Tensor, x: Tensor, target: Tensor, update: Update, round_: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.model.train()
        y, l = y.detach().requires_grad_(), l.detach().requires_grad_()
        if not self.partition.local:
            losses = self._losses(y, l, x, target)
            return losses.detach(), l.detach(), _gradient(losses, y)
        losses = self._losses(y.detach(), l, x, target)
        new = update(_gradient(losses, l), slice(0, len(l))).detach()
        return losses.detach(), new, _gradient(self._losses(y, new, x, target), y)

    def _losses(self, y: Tensor, l: Tensor, x: Tensor, target: Tensor) -> Tensor:
        def one(s: Tensor, l: Tensor, x: Any, target: Any) -> Tensor:
            return loss_of(self.model, self.partition.views(s, l), x, target, self.loss)

        losses: Tensor = torch.vmap(one)(y, l, x, target)
        return losses

    @torch.no_grad()
    def outputs(self, s: Tensor, l: Tensor, x: Tensor) -> Tensor:
        self.model.eval()
        if self.partition.local:
            return torch.vmap(self._whole, in_dims=(None, 0, None))(s, l, x)  # type: ignore[no-any-return]
        out: Tensor = self._whole(s, l[0], x)
        return out.expand(len(l), *out.shape)


class Loop(Engine):
    """Node by node; each has its own buffers and its own dropout stream. `Workers` take several at once where that gains."""

    def __init__(self, partition: Partition, loss: Loss, rows: Sequence[int], seed: int = 0) -> None:
        super().__init__(partition, loss, rows, seed)
        self.buffers = [{n: b.clone() for n, b in self.model.named_buffers()} for _ in rows]
        self._workers: Workers | None = None
        if len(rows) > 1 and suits(self.model, loss):
            self._workers = Workers(self.model, len(rows))

    def _each(self, work: Callable[[nn.Module, int], None], rows: Tensor) -> None:
        """Do the work of every row: several at once where that may be done and gains."""
        if self._workers is not None and may_run(rows.device):
            self._workers.each(work, len(rows))
            return
        for k in range(len(rows)):
            work(self.model, k)

    def _step(
        self, y: Tensor, l: Tensor, x: Any, target: Any, update: Update, round_: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        losses, new, shared = y.new_zeros(len(y)), self._spare(l), self._gradients(y)

        def one(model: nn.Module, k: int) -> None:
            model.train()
            kept = k in self.away or self.hides_failures
            before = {n: b.clone() for n, b in self.buffers[k].items()} if kept else {}
            # .data: to autograd rows of one tensor are one thing, and another thread's writing would look like a mistake
            rows = new[k].data, shared[k].data
            try:
                with self._dropout_stream(k, round_):
                    at, batch = (y[k].detach(), l[k].detach()), (pick(x, k), pick(target, k))
                    losses.data[k] = self._one(model, k, at, batch, update, *rows)
            except FAILURES as error:
                if not self.hides_failures:
                    raise
                # nothing is learned from this batch, and noise is sent all the same
                losses.data[k] = torch.nan
                rows[0].copy_(l[k])
                rows[1].zero_()
                self.buffers[k].update(before)
                _log.warning(
                    "node %d learns nothing in this round and sends its noise all the same: the model failed on its examples (%s: %s)",
                    *(self.rows[k], type(error).__name__, error),
                )
            if k in self.away:
                self.buffers[k].update(before)

        self._each(one, y)
        return losses, new, shared

    def _one(
        self,
        model: nn.Module,
        k: int,
        at: tuple[Tensor, Tensor],
        batch: tuple[Any, Any],
        update: Update,
        new: Tensor,
        gradient: Tensor,
    ) -> Tensor:
        """One node's loss at (y, l); its new local parameters and shared gradient go into the rows `new` and `gradient`."""
        part, buffers, first, (y, l) = self.partition, self.buffers[k], None, at
        # the backward passes are inside, too: checkpointed modules run forward again in them
        if part.local:
            leaves = leaves_of(part.views(None, l))
            with swapped(model, buffers | part.views(y, None) | leaves):
                first = loss_of(model, {}, *batch, self.loss)
                _write(part.local, new, first, leaves)
            stepped = update(new[None], slice(k, k + 1))[0]
            if stepped.data_ptr() != new.data_ptr():
                new.copy_(stepped)
        if not part.shared:
            assert first is not None
            return first.detach()
        leaves = leaves_of(part.views(y, None))
        with swapped(model, buffers | part.views(None, new) | leaves):
            after = loss_of(model, {}, *batch, self.loss)
            _write(part.shared, gradient, after, leaves)
        return (after if first is None else first).detach()

    def outputs(self, s: Tensor, l: Tensor, x: Tensor) -> Tensor:
        found: dict[int, Tensor] = {}

        def one(model: nn.Module, k: int) -> None:
            found[k] = self._outputs_of(model, k, s, l[k], x)

        self._each(one, l)
        return torch.stack([found[k] for k in range(len(l))])

    def outputs_of(self, k: int, s: Tensor, l: Tensor, x: Tensor) -> Tensor:
        return self._outputs_of(self.model, k, s, l, x)

    @torch.no_grad()  # belongs to the thread that asks for it
    def _outputs_of(self, model: nn.Module, k: int, s: Tensor, l: Tensor, x: Tensor) -> Tensor:
        model.eval()
        out: Tensor = call_model(model, self.partition.views(s, l) | self.buffers[k], x)
        return out

    def _dropout_stream(self, k: int, round_: int) -> AbstractContextManager[None]:
        """For whatever draws numbers: dropout hides in functions, attention and recurrent layers, too. What workers run draws none."""
        return nullcontext() if self._workers else _seeded(key(self.seed, DROPOUT, self.rows[k], round_))

    def state(self) -> dict[str, Tensor]:
        return {f"{k}.{n}": b for k, own in enumerate(self.buffers) for n, b in own.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        for k, own in enumerate(self.buffers):
            for name, buffer in own.items():
                buffer.copy_(state[f"{k}.{name}"])


@contextmanager
def _seeded(words: tuple[int, int]) -> Iterator[None]:
    """torch's own generator, seeded for one node and round, and put back afterwards."""
    mixed = (words[0] * 0x9E3779B97F4A7C15 + words[1] * 0xD1B54A32D192ED03) % (1 << 64)
    with torch.random.fork_rng():
        torch.manual_seed(mixed ^ (mixed >> 32))  # the CPU generator looks at the low 32 bits only
        yield


def _gradient(losses: Tensor, of: Tensor) -> Tensor:
    if of.shape[-1] == 0:
        return torch.zeros_like(of)
    (gradient,) = torch.autograd.grad(losses.sum(), of)
    return gradient


def _write(slots: Sequence[Slot], row: Tensor, loss: Tensor, leaves: dict[str, Tensor]) -> None:
    """The loss's gradient at the leaves, into their places in a flat row."""
    # not torch.autograd.grad, to which what re-entrant checkpoints hold is invisible
    torch.autograd.backward(loss)
    found = (leaves[slot.name] for slot in slots)
    parts = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in found]
    torch.cat([part.reshape(-1) for part in parts], out=row)


# Several nodes at once, each in a thread of its own: two threads within one convolution are hardly faster than one

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


def suits(model: nn.Module, loss: Callable[..., Any]) -> bool:
    """Whether nodes may be worked on at once (all code that runs is known) and gain by it (there are convolutions)."""
    modules = list(model.modules())
    return (
        any(isinstance(m, nn.modules.conv._ConvNd) for m in modules)
        and all(
            _as_written(m) and (type(m) in _PURE or isinstance(m, _DropoutNd) or _is_from(m, "dpps.models."))
            for m in modules
        )
        and getattr(loss, "__module__", "") == "torch.nn.functional"
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
