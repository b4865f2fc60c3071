"""Clipped sums by book-keeping: one forward and one backward pass give every example's norm and then the weighted sum.

An example's gradient of a weight follows from what went into a function and what came back. Its norm is computed from both, all
norms of an example are added up over the parameters, and one weighted product per weight gives the sum of clipped gradients: no
gradient per example is kept beyond a few layers' worth, and the model runs once.
"""

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpps.errors import UsageError
from dpps.learning.engines.calling import FAILURES, Loss, in_short, pick, tensors_in
from dpps.learning.engines.known_code import keeps_nothing
from dpps.learning.engines.per_example.base import PerExample, Sums
from dpps.learning.engines.per_example.calls import IrregularModel
from dpps.learning.engines.per_example.fallback import General
from dpps.learning.engines.per_example.madeup import Batches, moved
from dpps.learning.engines.per_example.objective import Objective
from dpps.learning.engines.per_example.plan import Plan, make_plan, run
from dpps.learning.engines.per_example.probe import refusing_randomness
from dpps.learning.engines.per_example.recorder import Recorder
from dpps.learning.engines.per_example.single import OneByOne, add_to, leaves_of
from dpps.learning.engines.workers import Workers, may_run
from dpps.learning.partition import Partition

_log = logging.getLogger(__name__)

# numbers held at a time (256 MiB in float32): batches are worked off in parts of this size
_NUMBERS = 1 << 26


class BookKeeping(PerExample):
    """Any model whose examples do not mix, node by node, and several nodes at once, each in a thread, where all code is known.

    What the model does is found out at the first batch of a kind (shapes and types), on made-up examples, and checked there
    against plain autograd. Where that fails the model runs one example after the other.
    """

    def __init__(self, partition: Partition, loss: Loss, clip: float, batch: int = 1) -> None:
        super().__init__(partition, loss, clip, batch)
        self._plans: dict[Any, Plan | None] = {}
        self._single = OneByOne(partition, loss, clip, batch)
        self._single.skipped, self._single.tried = self.skipped, True
        self._objective = Objective.of(loss)  # once: it remembers what torch.vmap could not do
        self._reasons: set[str] = set()
        self._several = keeps_nothing(partition.model) and getattr(loss, "__module__", "") == F.__name__
        self._workers: Workers | None = None

    def sums(self, y: Tensor, l: Tensor, x: Any, target: Any, mask: Tensor) -> Sums:
        self.partition.model.train()
        plan = self.plan(pick(pick(x, 0), 0), pick(pick(target, 0), 0), y, l)
        if plan is None:
            self._single.hides_failures = self.hides_failures
            return self._single.sums(y, l, x, target, mask)
        losses, clipped = y.new_zeros(len(y)), y.new_zeros(len(y))
        piece = self._piece(mask, y.dtype)
        sum_s, sum_l = (self._empty(part, piece).zero_() for part in (y, l))

        workers = self._threads(plan, y)
        height = max(2, _NUMBERS // (plan.numbers * (workers.count if workers else 1)))

        def one(model: nn.Module, k: int) -> None:
            own = pick((pick(x, k), pick(target, k)), _present(mask[k]))
            losses[k], clipped[k] = self._node(
                model, plan, y[k], l[k], own, (sum_s[k], sum_l[k]), piece, height
            )

        try:
            if workers:
                workers.each(one, len(y))
            else:
                for k in range(len(y)):
                    one(self.partition.model, k)
        except (IrregularModel, *FAILURES) as reason:
            self._single.hides_failures = self.hides_failures
            self.skipped.forget()  # they are counted again, one by one
            if type(reason).__name__ not in self._reasons:  # what it says may differ from batch to batch
                self._reasons.add(type(reason).__name__)
                _log.warning("gradients one example after the other where the model does this: %s", reason)
            return self._single.sums(y, l, x, target, mask)
        self.skipped.report(int(mask.sum()))
        return Sums.of(losses, sum_s, sum_l, clipped)

    def _threads(self, plan: Plan, y: Tensor) -> Workers | None:
        """What runs several nodes at once, where that may be done."""
        ruled = not any(isinstance(site.rule, General) for site in plan.sites)
        if len(y) == 1 or not (self._several and ruled and may_run(y.device)):
            return None
        if self._workers is None or self._workers.nodes != len(y):
            self._workers = Workers(self.partition.model, len(y))
        return self._workers

    def plan(self, x: Any, target: Any, y: Tensor, l: Tensor) -> Plan | None:
        """How batches of such examples are worked off; None: one example after the other."""
        kind = tuple((tuple(part.shape), part.dtype) for part in tensors_in((x, target)))
        if kind not in self._plans:
            self._plans[kind] = self._make(x, target, self.partition.views(y[0], l[0]))
        return self._plans[kind]

    def _make(self, x: Any, target: Any, parameters: dict[str, Tensor]) -> Plan | None:
        model, objective = self.partition.model, self._objective
        somewhere = {name: moved(tensor) for name, tensor in parameters.items()}
        reason: Exception | None = None
        for whole in (False, True):
            batches = Batches.like((x, target), whole=whole)
            try:
                with torch.enable_grad(), refusing_randomness():
                    return make_plan(model, objective, somewhere, batches)
            except UsageError:
                raise
            except (IrregularModel, *FAILURES) as error:
                reason = reason or error
        _log.warning(
            "%s: gradients one example after the other, which is slow (%s)",
            type(model).__name__,
            in_short(reason),
        )
        return None

    def _node(
        self,
        model: nn.Module,
        plan: Plan,
        y: Tensor,
        l: Tensor,
        batch: Any,
        rows: tuple[Tensor, Tensor],
        piece: int | None,
        height: int,
    ) -> tuple[float, float]:
        """One node's mean loss and share of clipped examples; its sums are added to the rows."""
        count = len(tensors_in(batch)[0])
        leaves = leaves_of(self.partition.views(y, l))
        loss, clipped = 0.0, 0
        height = -(-count // -(-count // height)) if count else 1  # parts of equal size
        for first in range(0, count, height):
            own = self._part(model, plan, leaves, pick(batch, slice(first, first + height)), rows, piece)
            loss, clipped = loss + own[0], clipped + own[1]
        return loss / max(count, 1), clipped / max(count, 1)

    def _part(
        self,
        model: nn.Module,
        plan: Plan,
        leaves: dict[str, Tensor],
        batch: Any,
        rows: tuple[Tensor, Tensor],
        piece: int | None,
    ) -> tuple[float, int]:
        """A part of a batch: the sum of its losses and the number of clipped examples."""
        count = len(tensors_in(batch)[0])
        if count == 0:
            return 0.0, 0
        if count == 1:  # models may drop an axis of length one: twice, and the second does not count
            batch = pick(batch, torch.zeros(2, dtype=torch.int64))
        examples = max(count, 2)
        recorder = Recorder(leaves, plan.sites, examples, plan.fast_formats)
        x, target = batch
        found = run(model, self._objective, leaves, recorder, x, target, examples)
        losses, squares = found.losses[:count], found.squares
        bad = ~torch.isfinite(squares[:count])
        if bool(bad.any()):
            self.skipped.not_finite(int(bad.sum()))
            # neither a NaN nor stopping because of one may tell of an example: without it, once more
            good = pick(batch, (~bad).nonzero().flatten())
            loss, clipped = self._part(model, plan, leaves, good, rows, piece)
            return loss + float(losses[bad].sum()), clipped
        factors = self._factors(squares, losses.dtype)
        factors[count:] = 0.0
        totals = found.totals(factors, piece)
        add_to(self.partition.shared, rows[0], totals)
        add_to(self.partition.local, rows[1], totals)
        return float(losses.sum()), int((squares[:count] > self.clip**2).sum())


def _present(mask: Tensor) -> Any:
    """The examples in a mask: a slice where they come first, as samplers put them."""
    count = int(mask.sum())
    return slice(0, count) if bool(mask[:count].all()) else mask
