"""The two gradients of Algorithm 2 on whole batches, for all nodes held here.

`Vectorised` runs all nodes at once (`torch.vmap` over stacked parameters). `Loop` runs one node after the other: for models whose
layers keep state or draw random numbers (BatchNorm, dropout), and for convolutions on a CPU, where a loop is faster.
`dpps.learning.gradients.chain` has a third engine, for chains of linear layers. All give the same numbers.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from dpps.learning.gradients.calling import FAILURES, Loss, call_model, leaves_of, loss_of, pick, swapped
from dpps.learning.gradients.workers import Workers, draws_nothing
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
    """Node by node; each has its own buffers and its own dropout stream. Several run at once where all code is known: then two
    threads within one convolution are hardly faster than one."""

    def __init__(self, partition: Partition, loss: Loss, rows: Sequence[int], seed: int = 0) -> None:
        super().__init__(partition, loss, rows, seed)
        self.buffers = [{n: b.clone() for n, b in self.model.named_buffers()} for _ in rows]
        gains = any(isinstance(m, _ConvNd) for m in self.model.modules())
        plain = getattr(loss, "__module__", "") == "torch.nn.functional"
        self._several = gains and plain and draws_nothing(self.model)
        self._workers = Workers(self.model, several=self._several)

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
            at, batch = (y[k].detach(), l[k].detach()), (pick(x, k), pick(target, k))
            stream = key(self.seed, DROPOUT, self.rows[k], round_)
            try:
                # the generator is one for all threads: what runs in several draws nothing
                with nullcontext() if self._several else _seeded(stream):
                    losses[k] = self._one(model, k, at, batch, update, *rows)
            except FAILURES as error:
                if not self.hides_failures:
                    raise
                # nothing is learned from this batch, and noise is sent all the same
                losses[k] = torch.nan
                rows[0].copy_(l[k])
                rows[1].zero_()
                self.buffers[k].update(before)
                _log.warning(
                    "node %d learns nothing in this round and sends its noise all the same: the model failed on its examples (%s: %s)",
                    *(self.rows[k], type(error).__name__, error),
                )
            if k in self.away:
                self.buffers[k].update(before)

        self._workers.each(one, len(y), self._workers.count(y))
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

        self._workers.each(one, len(l), self._workers.count(l))
        return torch.stack([found[k] for k in range(len(l))])

    def outputs_of(self, k: int, s: Tensor, l: Tensor, x: Tensor) -> Tensor:
        return self._outputs_of(self.model, k, s, l, x)

    @torch.no_grad()  # belongs to the thread that asks for it
    def _outputs_of(self, model: nn.Module, k: int, s: Tensor, l: Tensor, x: Tensor) -> Tensor:
        model.eval()
        out: Tensor = call_model(model, self.partition.views(s, l) | self.buffers[k], x)
        return out

    def state(self) -> dict[str, Tensor]:
        return {f"{k}.{n}": b for k, own in enumerate(self.buffers) for n, b in own.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        for k, own in enumerate(self.buffers):
            for name, buffer in own.items():
                buffer.copy_(state[f"{k}.{name}"])


@contextmanager
def _seeded(words: tuple[int, int]) -> Iterator[None]:
    """Seed torch's own generator for one node and round, and put it back afterwards: dropout hides in functions, attention and
    recurrent layers, too."""
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
