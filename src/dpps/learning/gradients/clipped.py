"""Per-example clipped gradients (unit record): what one example can change is bounded, whatever the model.

`PerExample` has the clip and its margin. Three ways give the same sums: `Batched` runs one node's batch at a time, by rules for
layers (see `dpps.learning.gradients.layers`) or by `vmap(grad)`; `dpps.learning.gradients.chain.Chains` writes out every pass of a
chain of linear layers, for all nodes at once; `OneByOne` is plain autograd: the reference, and the last resort.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpps.errors import UsageError
from dpps.frozen import Frozen
from dpps.learning.gradients.calling import (
    FAILURES,
    ExampleLosses,
    GradientError,
    Loss,
    ModelLoss,
    cannot_be_differentiated,
    gradient_of_one,
    in_short,
    leaves_of,
    loss_of,
    pick,
    quiet,
    tensors_in,
)
from dpps.learning.gradients.layers.contributions import Contribution, Explicit
from dpps.learning.gradients.layers.recording import Batches, Found, Plan, check, make_plan
from dpps.learning.gradients.layers.rules import IrregularModel
from dpps.learning.gradients.workers import Workers, keeps_nothing
from dpps.learning.partition import Partition
from dpps.learning.preflight import moved, refusing_randomness, refusing_state

_MARGIN = 1e-4  # clipping stays below the bound by more than the rounding of norms and products
_WIDEST_MARGIN = 6e-3  # what adding up in float32 may cost of the clip
_PIECES = (40, 32, 16, 4)  # examples that are added up one after the other in float32, see `PerExample`
_NUMBERS = 1 << 26  # numbers held at a time (256 MiB in float32): larger batches are computed in parts
_EXAMPLES = 32  # that `vmap(grad)` runs at a time
_NOT_FINITE = "their gradient is not finite"

_log = logging.getLogger(__name__)

Weigh = Callable[[Any], Tensor]
"""From the targets of examples to one weight for each."""


class Skipped:
    """Counts the examples that were left out, by reason.

    A reason is logged when it first occurs, and again whenever it has occurred ten times as often. The line quotes the last error,
    which may tell of the data: the log belongs to the node and is not sent.
    """

    def __init__(self) -> None:
        self.drawn = 0
        """Examples drawn so far; one that is drawn in two rounds counts twice."""
        self.counts: Counter[str] = Counter()
        """How many were left out, by reason."""
        self._logged: Counter[str] = Counter()
        self._new: list[tuple[str, str, int]] = []  # appended to by several threads, read by one

    def failed(self, error: Exception) -> None:
        """The model, or its backward pass, raised something for one example."""
        kind = type(error).__name__
        self._new.append((kind, f"the model fails on them ({kind}: {in_short(error)})", 1))

    def not_finite(self, count: int) -> None:
        """The gradients of `count` examples were not finite."""
        if count:
            self._new.append((_NOT_FINITE, _NOT_FINITE, count))

    def forget(self) -> None:
        """Drop what was noted of the current batch: it is computed again in another way."""
        self._new.clear()

    def report(self, drawn: int) -> None:
        """Count and log what was noted, at the end of a batch of `drawn` examples."""
        self.drawn += drawn
        new, self._new = self._new, []
        for kind, _, count in new:
            self.counts[kind] += count
        for kind, words in {kind: words for kind, words, _ in new}.items():
            if self.counts[kind] >= 10 * self._logged[kind]:
                self._logged[kind] = self.counts[kind]
                _log.warning(
                    "%d of %d examples drawn so far taught nothing: %s; look at these examples and their labels",
                    *(self.counts[kind], self.drawn, words),
                )


class Sums(tuple[Tensor, Tensor, Tensor]):
    """Mean losses (for display), and the sums of clipped gradients for s and for l, one row per node.

    `clipped` is the fraction of every node's examples whose gradient was longer than the clip. No noise hides it, so it must not
    leave the node.
    """

    clipped: Tensor


class PerExample(Frozen, ABC):
    """Sums of per-example gradients over a batch, each gradient scaled down to an L2 norm of `clip` over shared and local together.

    Adding one example, whatever it holds, moves the sum by at most `clip`: the noise is calibrated to that. Gradients are
    therefore clipped slightly below `clip`, by a margin that covers rounding: 1e-4 of the clip for norms and products, and more for
    float32 sums. A model's output for an example must not depend on the rest of the batch, which `check_model` checks.

    The float32 sum of B vectors of length at most clip is off by at most B u x B clip (u: half a unit in the last place at 1), in
    either of two neighbouring batches. Summing pieces of P, and then their sums in pairs, is off by at most
    (P + log2(B / P)) u x B clip. The margin must not depend on the batch that was drawn. It is computed for a larger batch than is
    ever drawn (twice the expected size, or twelve standard deviations more); still larger batches are summed in float64.

    Args:
        partition: the model, and what of it is shared.
        loss: of (outputs, targets).
        clip: bound on the L2 norm of one example's gradient.
        batch: the expected number of examples, a public number.
        weigh: from targets to one weight per example, between 0 and 1. It multiplies the clipped gradient, which stays as short as the
            clip: a weight in the loss would be undone by clipping.
    """

    fixed = frozenset({"clip", "margin", "narrow", "piece", "weigh"})

    hides_failures = False
    """Whether an example on which the model fails counts as zero: stopping because of it would reveal it."""

    def __init__(
        self, partition: Partition, loss: Loss, clip: float, batch: int = 1, weigh: Weigh | None = None
    ) -> None:
        self.partition, self.loss, self.clip, self.weigh, self._batch = partition, loss, clip, weigh, batch
        self.skipped = Skipped()
        """Examples that counted as zero; it stays at the node."""
        usual = min(2 * batch, batch + math.ceil(12 * math.sqrt(batch)))
        u = torch.finfo(torch.float32).eps / 2
        largest = usual + 8
        roundings = {largest - 1: largest} | {
            piece: piece + 1 + math.ceil(math.log2(largest / piece)) for piece in _PIECES if piece < largest
        }
        needed = {piece: 2 * largest * count * u for piece, count in roundings.items()}
        fits = [piece for piece, margin in needed.items() if margin <= _WIDEST_MARGIN]
        self.margin = _MARGIN + (needed[fits[0]] if fits else 0.0)
        self.piece = fits[0] if fits else 0
        """How many examples are summed in float32 at a time (0: none)."""
        self.narrow = usual if fits else 0
        """The largest batch to which `piece` applies."""

    @abstractmethod
    def sums(self, y: Tensor, l: Tensor, x: Any, target: Any, mask: Tensor) -> Sums:
        """The clipped sums over the examples in the mask (nodes, batch); all other entries count as absent.

        The sums are in float64 where float32 would be off by more than the margin. One backward pass at (y, l) gives both parts.
        Both are noised afterwards: local parameters without noise would let one example change all other examples' gradients.
        """

    def _one_by_one(self, y: Tensor, l: Tensor, x: Any, target: Any, mask: Tensor) -> Sums:
        """`sums` by plain autograd, where this way does not work for a batch."""
        single = OneByOne(self.partition, self.loss, self.clip, self._batch, self.weigh)
        single.skipped, single.tried, single.hides_failures = self.skipped, True, self.hides_failures
        return single.sums(y, l, x, target, mask)

    def _start(self, y: Tensor, l: Tensor, mask: Tensor) -> tuple[Sums, int | None]:
        """Zeros to add to, and how many examples of this batch may be summed in float32 at a time (0: none, None: all of them)."""
        piece = self.piece if self.piece <= self.narrow else None
        if y.dtype != torch.float32 or mask.shape[1] > self.narrow:
            piece = 0
        dtype = y.dtype if piece is None else torch.float64
        sums = Sums((y.new_zeros(len(y)), *(torch.zeros_like(part, dtype=dtype) for part in (y, l))))
        sums.clipped = y.new_zeros(len(y))
        return sums, piece

    def _factors(self, squares: Tensor, dtype: torch.dtype, target: Any) -> Tensor:
        """The factors that clip the examples' gradients, from their squared norms (float64), and weigh them by their targets."""
        norms = squares.sqrt().clamp(min=self.clip)
        factors = self.clip / norms * (1 - self.margin)
        if self.weigh is not None:  # whatever it says, no gradient becomes longer than the clip
            weights = self.weigh(target).to(factors).reshape(factors.shape)
            factors = factors * torch.nan_to_num(weights, nan=0.0).clamp(0.0, 1.0)
        factors = factors.to(dtype)
        # a factor below the smallest normal number may be rounded up by more than the margin
        return factors.masked_fill(factors < torch.finfo(dtype).tiny, 0.0)

    def _add(self, parts: Mapping[str, Tensor], shared: Tensor, local: Tensor) -> None:
        """Add parameters by name to their places in two flat rows."""
        for slots, row in ((self.partition.shared, shared), (self.partition.local, local)):
            for slot in slots:
                if slot.name in parts:
                    row[slot.start : slot.stop].add_(parts[slot.name].reshape(-1))


class OneByOne(PerExample):
    """The reference that every other way is checked against, and the last resort."""

    tried = False
    """Whether `check_model` has seen that the model draws and keeps nothing on made-up examples. If it does so on real ones, the
    data cause it, and an error would reveal them."""

    def sums(self, y: Tensor, l: Tensor, x: Any, target: Any, mask: Tensor) -> Sums:
        self.partition.model.train()
        sums, _ = self._start(y, l, mask)
        losses, sum_s, sum_l = sums
        for k in range(len(y)):
            chosen = mask[k].nonzero().flatten().tolist()
            leaves = leaves_of(self.partition.views(y[k], l[k]))
            counted = 0
            for e in chosen:
                own = pick(pick((x, target), k), e)
                try:
                    with refusing_randomness(), refusing_state(self.partition.model):
                        loss, gradients = gradient_of_one(self.partition.model, self.loss, leaves, *own)
                except FAILURES as error:
                    if self.hides_failures and (self.tried or not isinstance(error, UsageError)):
                        self.skipped.failed(error)
                        continue
                    if isinstance(error, GradientError):
                        raise cannot_be_differentiated(self.partition.model, error) from error
                    raise
                counted += 1
                squares = sum(g.double().square().sum() for g in gradients.values())
                assert isinstance(squares, Tensor)
                losses[k] += loss
                if not bool(torch.isfinite(squares)):
                    self.skipped.not_finite(1)
                    continue
                sums.clipped[k] += (squares > self.clip**2) / len(chosen)
                factor = self._factors(squares[None], y.dtype, pick(own[1], None))[0]
                self._add({n: g * factor for n, g in gradients.items()}, sum_s[k], sum_l[k])
            if chosen:
                losses[k] = losses[k] / counted if counted else torch.nan
        self.skipped.report(int(mask.sum()))
        return sums


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
        plain = getattr(loss, "__module__", "") == F.__name__
        self._workers = Workers(partition.model, several=plain and keeps_nothing(partition.model))

    def sums(self, y: Tensor, l: Tensor, x: Any, target: Any, mask: Tensor) -> Sums:
        self.partition.model.train()
        plan = self.plan((pick(x, (0, 0)), pick(target, (0, 0))), y, l)
        if plan is None:
            return self._one_by_one(y, l, x, target, mask)
        sums, piece = self._start(y, l, mask)
        losses, sum_s, sum_l = sums
        at_once = self._workers.count(y) if isinstance(plan, Plan) else 1
        height = max(2, _NUMBERS // (plan.numbers * at_once))

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
            losses[k], sums.clipped[k] = loss / max(drawn, 1), long / max(drawn, 1)

        try:
            self._workers.each(one, len(y), at_once)
        except (IrregularModel, *FAILURES) as reason:
            self.skipped.forget()  # they are counted again, one by one
            if type(reason).__name__ not in self._reasons:  # what it says may differ from batch to batch
                self._reasons.add(type(reason).__name__)
                _log.warning("gradients one example after the other where the model does this: %s", reason)
            return self._one_by_one(y, l, x, target, mask)
        self.skipped.report(int(mask.sum()))
        return sums

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
        self._add(found.totals(factors, piece), *rows)
        return float(losses.sum()), int((squares[:count] > self.clip**2).sum())


@dataclass(frozen=True)
class VmapPlan:
    """One gradient per example by `vmap(grad)`: every example runs in a batch of its own, so none can see another."""

    loss: Loss
    parameters: int
    """How many numbers are trained."""

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


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Without autocast and reduced matrix products, which somebody may have switched on around a run: they round by more than
    the margin below the clip makes up for."""
    asked = torch.get_float32_matmul_precision()
    if asked != "highest":
        torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        if asked != "highest":
            torch.set_float32_matmul_precision(asked)
