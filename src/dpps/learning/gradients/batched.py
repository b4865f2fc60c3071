"""Clipped gradients of any model that does not mix examples, one node's batch at a time: by rules for layers (see
`dpps.learning.gradients.layers`), or by `vmap(grad)`, which holds one gradient per example and in which no example can see
another."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpps.errors import UsageError
from dpps.learning.gradients.batch import Workers, keeps_nothing, may_run
from dpps.learning.gradients.calling import (
    FAILURES,
    ExampleLosses,
    Loss,
    ModelLoss,
    in_short,
    leaves_of,
    loss_of,
    pick,
    quiet,
    tensors_in,
)
from dpps.learning.gradients.clipped import Contribution, Explicit, PerExample, Sums, Weigh, add_to
from dpps.learning.gradients.layers.recording import Batches, Found, Plan, check, make_plan
from dpps.learning.gradients.layers.rules import IrregularModel
from dpps.learning.partition import Partition
from dpps.learning.preflight import moved, refusing_randomness

_NUMBERS = 1 << 26  # numbers held at a time (256 MiB in float32): larger batches are computed in parts
_EXAMPLES = 32  # that `vmap(grad)` runs at a time

_log = logging.getLogger(__name__)


class Batched(PerExample):
    """Any model that does not mix examples: node by node, or several nodes at once in threads where all code is known.

    The first batch of a kind (shapes and types) decides how: by rules for layers, else by `vmap(grad)`. Either is tried on made-up
    examples and checked there against plain autograd. Where neither works, the model runs one example after the other.
    """

    def __init__(
        self, partition: Partition, loss: Loss, clip: float, batch: int = 1, weigh: Weigh | None = None
    ) -> None:
        super().__init__(partition, loss, clip, batch, weigh)
        self._plans: dict[Any, Plan | VmapPlan | None] = {}
        self._each = ExampleLosses(loss)  # once: it remembers what torch.vmap could not do
        self._reasons: set[str] = set()
        self._several = keeps_nothing(partition.model) and getattr(loss, "__module__", "") == F.__name__
        self._workers: Workers | None = None

    def sums(self, y: Tensor, l: Tensor, x: Any, target: Any, mask: Tensor) -> Sums:
        self.partition.model.train()
        plan = self.plan((pick(x, (0, 0)), pick(target, (0, 0))), y, l)
        if plan is None:
            return self._one_by_one(y, l, x, target, mask)
        losses, clipped = y.new_zeros(len(y)), y.new_zeros(len(y))
        piece = self._piece(mask, y.dtype)
        sum_s, sum_l = (self._empty(part, piece).zero_() for part in (y, l))

        workers = self._threads(plan, y)
        height = max(2, _NUMBERS // (plan.numbers * (workers.count if workers else 1)))

        def one(model: nn.Module, k: int) -> None:
            drawn = int(mask[k].sum())  # samplers put those that are drawn first
            present = slice(0, drawn) if bool(mask[k, :drawn].all()) else mask[k]
            own = pick((pick(x, k), pick(target, k)), present)
            leaves, rows = leaves_of(self.partition.views(y[k], l[k])), (sum_s[k], sum_l[k])
            loss, long = 0.0, 0
            size = -(-drawn // -(-drawn // height)) if drawn else 1  # parts of equal size
            for first in range(0, drawn, size):
                part = self._part(model, plan, leaves, pick(own, slice(first, first + size)), rows, piece)
                loss, long = loss + part[0], long + part[1]
            losses[k], clipped[k] = loss / max(drawn, 1), long / max(drawn, 1)

        try:
            if workers:
                workers.each(one, len(y))
            else:
                for k in range(len(y)):
                    one(self.partition.model, k)
        except (IrregularModel, *FAILURES) as reason:
            self.skipped.forget()  # they are counted again, one by one
            if type(reason).__name__ not in self._reasons:  # what it says may differ from batch to batch
                self._reasons.add(type(reason).__name__)
                _log.warning("gradients one example after the other where the model does this: %s", reason)
            return self._one_by_one(y, l, x, target, mask)
        self.skipped.report(int(mask.sum()))
        return Sums.of(losses, sum_s, sum_l, clipped)

    def _threads(self, plan: "Plan | VmapPlan", y: Tensor) -> Workers | None:
        """The threads that run several nodes at once, or None where that is not safe."""
        if len(y) == 1 or not (self._several and isinstance(plan, Plan) and may_run(y.device)):
            return None
        if self._workers is None or self._workers.nodes != len(y):
            self._workers = Workers(self.partition.model, len(y))
        return self._workers

    def plan(self, example: tuple[Any, Any], y: Tensor, l: Tensor) -> "Plan | VmapPlan | None":
        """How batches of such examples (inputs, target) are computed; None: one example after the other."""
        kind = tuple((tuple(part.shape), part.dtype) for part in tensors_in(example))
        if kind not in self._plans:
            self._plans[kind] = self._make(example, self.partition.views(y[0], l[0]))
        return self._plans[kind]

    def _make(self, example: tuple[Any, Any], parameters: dict[str, Tensor]) -> "Plan | VmapPlan | None":
        model, name = self.partition.model, type(self.partition.model).__name__
        somewhere = {n: moved(tensor) for n, tensor in parameters.items()}
        reasons: list[str] = []
        for make in (self._by_rules, self._by_vmap):
            for whole in (False, True):
                batches = Batches.like(example, whole=whole)
                try:
                    with torch.enable_grad(), refusing_randomness():
                        plan = make(model, somewhere, batches)
                except UsageError:
                    raise
                except (IrregularModel, *FAILURES) as error:
                    reasons.append(in_short(error))
                    continue
                if reasons:
                    _log.info("%s: one gradient per example, by torch.vmap (%s)", name, reasons[0])
                return plan
        _log.warning("%s: gradients one example after the other, which is slow (%s)", name, reasons[0])
        return None

    def _by_rules(self, model: nn.Module, parameters: Mapping[str, Tensor], batches: Batches) -> Plan:
        if isinstance(self.loss, ModelLoss):
            raise IrregularModel("the loss calls the model itself")
        return make_plan(model, self._each, parameters, batches)

    def _by_vmap(self, model: nn.Module, parameters: Mapping[str, Tensor], batches: Batches) -> "VmapPlan":
        plan = VmapPlan(self.loss, sum(tensor.numel() for tensor in parameters.values()))
        found = plan.run(model, leaves_of(parameters), batches.three)
        check(model, self.loss, parameters, found, batches.three)
        return plan

    def _part(
        self,
        model: nn.Module,
        plan: "Plan | VmapPlan",
        leaves: dict[str, Tensor],
        batch: Any,
        rows: tuple[Tensor, Tensor],
        piece: int | None,
    ) -> tuple[float, int]:
        """A part of a node's batch: the sum of its losses and the number of clipped examples; its sums are added to the rows."""
        count = len(tensors_in(batch)[0])
        if count == 0:
            return 0.0, 0
        if count == 1:  # models may drop an axis of length one: twice, and the second does not count
            batch = pick(batch, torch.zeros(2, dtype=torch.int64))
        found = plan.run(model, leaves, batch)
        losses, squares = found.losses[:count], found.squares
        bad = ~torch.isfinite(squares[:count])
        if bool(bad.any()):
            self.skipped.not_finite(int(bad.sum()))
            # neither a NaN nor an error may reveal an example: once more without it
            good = pick(batch, (~bad).nonzero().flatten())
            loss, clipped = self._part(model, plan, leaves, good, rows, piece)
            return loss + float(losses[bad].sum()), clipped
        factors = self._factors(squares, losses.dtype, batch[1])
        factors[count:] = 0.0
        totals = found.totals(factors, piece)
        add_to(self.partition.shared, rows[0], totals)
        add_to(self.partition.local, rows[1], totals)
        return float(losses.sum()), int((squares[:count] > self.clip**2).sum())


@dataclass(frozen=True)
class VmapPlan:
    """One gradient per example by `vmap(grad)`: every example runs in a batch of its own, so none can see another.

    Args:
        loss: of a batch.
        parameters: how many numbers are trained.
    """

    loss: Loss
    parameters: int

    @property
    def numbers(self) -> int:
        """Memory per example, stated so that at most `_EXAMPLES` run at a time."""
        return max(4 * self.parameters, _NUMBERS // _EXAMPLES)

    def run(self, model: nn.Module, leaves: dict[str, Tensor], batch: tuple[Any, Any]) -> Found:
        """All gradients of a part of a batch."""

        def one(own: dict[str, Tensor], x: Any, target: Any) -> Tensor:
            return loss_of(model, own, pick(x, None), pick(target, None), self.loss)

        constants = {name: leaf.detach() for name, leaf in leaves.items()}
        with quiet():
            gradients, losses = torch.vmap(torch.func.grad_and_value(one), (None, 0, 0))(constants, *batch)
        contributions: dict[str, Contribution] = {name: Explicit(g) for name, g in gradients.items()}
        return Found.of(losses, contributions, [own.norms() for own in contributions.values()])
