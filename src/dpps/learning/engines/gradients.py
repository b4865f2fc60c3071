"""The two gradients of Algorithm 2, for all nodes held here.

Two engines give the same numbers: `Vectorised` runs all nodes at once (`torch.vmap` over stacked parameters), `Loop` one node
after the other, for models whose layers keep state or draw random numbers (BatchNorm, dropout) and for convolutions on a CPU,
where a loop is faster. (`dpps.learning.engines.chain` has a third for chains of linear layers,
`dpps.learning.engines.choice` chooses.) When the shared parameters are the first stages of the model, their forward pass is computed once a
round and serves both gradients: BatchNorm statistics in the shared part then move once a round, and both gradients see the
same dropout mask.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dpps.learning.engines.calling import FAILURES, Loss, ModelLoss, call_model, loss_of, pick
from dpps.learning.engines.workers import Workers, may_run, suits
from dpps.learning.partition import Partition, Slot
from dpps.models import call_stages
from dpps.models.swapping import swapped
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
        self.prefix = (
            None if isinstance(loss, ModelLoss) else partition.prefix()
        )  # it calls the model as a whole
        self.away: frozenset[int] = frozenset()
        """Positions of rows whose nodes are absent this round: nothing they keep may change."""
        self._shared = torch.empty(0)
        self._local: list[Tensor] = []

    @abstractmethod
    def step(
        self, y: Tensor, l: Tensor, x: Any, target: Any, update: Update, round_: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Losses at (y, l), the new local parameters, and the shared gradients at (y, l_new) on the same batch.

        The results may lie in memory that is used again: gradients by the next round, local parameters by the one after.
        """

    @abstractmethod
    def outputs(self, s: Tensor, l: Tensor, x: Tensor) -> Tensor:
        """Evaluation: every node's output, (rows, batch, ...), for the same inputs and one s for all."""

    @torch.no_grad()
    def outputs_of(self, k: int, s: Tensor, l: Tensor, x: Tensor) -> Tensor:
        """Evaluation: the output of the k-th node held here."""
        self.model.eval()
        out: Tensor = self._whole(s, l, x)
        return out

    def step_all_the_same(
        self,
        y: Tensor,
        l: Tensor,
        x: Any,
        target: Any,
        update: Update,
        round_: int,
        undo: Callable[[], None] = lambda: None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`step`; where failures must be hidden and the model fails on somebody's batch, node by node, and only those nodes
        stay as they are on whose batches it fails.

        Args:
            undo: takes back what `update` may have done on the way.
        """
        try:
            return self.step(y, l, x, target, update, round_)
        except FAILURES:
            if not self.hides_failures:
                raise
        undo()
        loop = Loop(self.partition, self.loss, self.rows, self.seed)
        loop.hides_failures, loop.away = True, self.away
        return loop.step(y, l, x, target, update, round_)

    def _first_half(self, s: Tensor, x: Any) -> Any:
        return call_stages(self.model, self.partition.views(s, None), x, 0, self.prefix)

    def _second_half(self, l: Tensor, h: Any) -> Any:
        return call_stages(self.model, self.partition.views(None, l), h, self.prefix or 0, None)

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

    def step(
        self, y: Tensor, l: Tensor, x: Tensor, target: Tensor, update: Update, round_: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.model.train()
        y, l = y.detach().requires_grad_(), l.detach().requires_grad_()
        h = None if self.prefix is None else torch.vmap(self._first_half)(y, x)
        if not self.partition.local:
            losses = self._losses(y, l, h, x, target)
            return losses.detach(), l.detach(), _gradient(losses, y)
        losses = self._losses(y.detach(), l, _detach(h), x, target)
        new = update(_gradient(losses, l), slice(0, len(l))).detach()
        return losses.detach(), new, _gradient(self._losses(y, new, h, x, target), y)

    def _losses(self, y: Tensor, l: Tensor, h: Any, x: Tensor, target: Tensor) -> Tensor:
        """Every node's loss; from the output h of the shared stages where there is one."""
        losses: Tensor
        if h is None:
            losses = torch.vmap(self._loss)(y, l, x, target)
        else:
            losses = torch.vmap(lambda l, h, t: self.loss(self._second_half(l, h), t))(l, h, target)
        return losses

    def _loss(self, s: Tensor, l: Tensor, x: Any, target: Any) -> Tensor:
        return loss_of(self.model, self.partition.views(s, l), x, target, self.loss)

    @torch.no_grad()
    def outputs(self, s: Tensor, l: Tensor, x: Tensor) -> Tensor:
        self.model.eval()
        out: Tensor
        if self.prefix is None:
            out = torch.vmap(self._whole, in_dims=(None, 0, None))(s, l, x)
            return out
        h = self._first_half(s, x)
        if not self.partition.local:
            out = self._second_half(l[0], h)
            return out.expand(len(l), *out.shape)
        out = torch.vmap(self._second_half, in_dims=(0, None))(l, h)
        return out


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

    def step(
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
                    losses.data[k] = self._one(
                        model, k, y[k].detach(), l[k].detach(), pick(x, k), pick(target, k), update, *rows
                    )
            except FAILURES as error:
                if not self.hides_failures:
                    raise
                self._stay(k, l[k], losses, *rows, error)
                self.buffers[k].update(before)
            if k in self.away:
                self.buffers[k].update(before)

        self._each(one, y)
        return losses, new, shared

    def _stay(
        self, k: int, l: Tensor, losses: Tensor, new: Tensor, gradient: Tensor, error: Exception
    ) -> None:
        """The model failed on this node's batch: nothing is learned from it, and noise is sent all the same."""
        losses.data[k] = torch.nan
        new.copy_(l)
        gradient.zero_()
        _log.warning(
            "node %d learns nothing in this round and sends its noise all the same: the model failed on its examples (%s: %s)",
            self.rows[k],
            type(error).__name__,
            error,
        )

    def _one(
        self,
        model: nn.Module,
        k: int,
        y: Tensor,
        l: Tensor,
        x: Any,
        target: Any,
        update: Update,
        new: Tensor,
        gradient: Tensor,
    ) -> Tensor:
        """One node's loss; its new local parameters and shared gradient go into the rows `new` and `gradient`."""
        part, first = self.partition, None
        shared, local = _leaves(part.shared, y), _leaves(part.local, l)

        def loss(h: Any) -> Tensor:
            if h is None:
                return loss_of(model, {}, x, target, self.loss)
            return self.loss(call_stages(model, {}, h, self.prefix or 0, None), target)

        # the backward passes are inside, too: checkpointed modules run forward again in them
        with swapped(model, shared | self.buffers[k]):
            h = None if self.prefix is None else call_stages(model, {}, x, 0, self.prefix)
            if part.local:
                constant = part.views(y, None) if h is None else {}
                with swapped(model, constant | local):
                    first = loss(_detach(h))
                    _write(part.local, new, first, local)
                stepped = update(new[None], slice(k, k + 1))[0]
                if stepped.data_ptr() != new.data_ptr():
                    new.copy_(stepped)
                local = part.views(None, new)
            if not part.shared:
                assert first is not None
                return first.detach()
            with swapped(model, local):
                after = loss(h)
                _write(part.shared, gradient, after, shared)
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


def _detach(h: Any) -> Any:
    if h is None:
        return None
    return tuple(part.detach() for part in h) if isinstance(h, tuple) else h.detach()


def _leaves(slots: Sequence[Slot], flat: Tensor) -> dict[str, Tensor]:
    """Parameters by name, each to be differentiated by itself: the gradient of a slice would be as long as the whole vector."""
    return {slot.name: slot.shaped(flat[slot.start : slot.stop]).detach().requires_grad_() for slot in slots}


def _write(slots: Sequence[Slot], row: Tensor, loss: Tensor, leaves: dict[str, Tensor]) -> None:
    """The loss's gradient at the leaves, into their places in a flat row."""
    # not torch.autograd.grad, to which what re-entrant checkpoints hold is invisible
    torch.autograd.backward(loss)
    found = (leaves[slot.name] for slot in slots)
    parts = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in found]
    torch.cat([part.reshape(-1) for part in parts], out=row)
