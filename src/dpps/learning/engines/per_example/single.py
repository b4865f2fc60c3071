"""One example after the other, with plain autograd: slow, and right for every model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpps.errors import UsageError
from dpps.learning.engines.calling import FAILURES, in_short, pick
from dpps.learning.engines.per_example.base import PerExample, Sums
from dpps.learning.engines.per_example.objective import Objective
from dpps.learning.engines.per_example.probe import refusing_randomness, refusing_state
from dpps.learning.partition import Slot
from dpps.models.swapping import swapped


class OneByOne(PerExample):
    """The reference that every other way is checked against, and the last resort."""

    tried = False
    """Whether the model draws nothing and keeps nothing on made-up examples: if it does on others, the data make it do so, and
    stopping because of them would tell of them."""

    def sums(self, y: Tensor, l: Tensor, x: Any, target: Any, mask: Tensor) -> Sums:
        self.partition.model.train()
        objective = Objective.of(self.loss)
        losses, clipped = y.new_zeros(len(y)), y.new_zeros(len(y))
        piece = self._piece(mask, y.dtype)
        sum_s, sum_l = (self._empty(part, piece).zero_() for part in (y, l))
        for k in range(len(y)):
            chosen = mask[k].nonzero().flatten().tolist()
            leaves = leaves_of(self.partition.views(y[k], l[k]))
            counted = 0
            for e in chosen:
                own = pick(pick((x, target), k), e)
                try:
                    with refusing_randomness(), refusing_state(self.partition.model):
                        loss, gradients = gradient_of_one(self.partition.model, objective, leaves, *own)
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
                clipped[k] += (squares > self.clip**2) / len(chosen)
                factor = self._factors(squares[None], y.dtype)[0]
                for slots, row in ((self.partition.shared, sum_s[k]), (self.partition.local, sum_l[k])):
                    add_to(slots, row, {n: g * factor for n, g in gradients.items()})
            if chosen:
                losses[k] = losses[k] / counted if counted else torch.nan
        self.skipped.report(int(mask.sum()))
        return Sums.of(losses, sum_s, sum_l, clipped)


def leaves_of(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters, each to be differentiated by itself."""
    return {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}


def gradient_of_one(
    model: nn.Module, objective: Objective, leaves: Mapping[str, Tensor], x: Any, target: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradient of one example, in a batch of its own."""
    alone = pick((x, target), None)
    try:
        return _gradient(model, objective, leaves, alone)
    except FAILURES:
        twice = pick(alone, torch.zeros(2, dtype=torch.int64))
        try:  # models may drop an axis of length one; the mean over the same example twice is its own
            return _gradient(model, objective, leaves, twice)
        except FAILURES:
            pass
        raise


class GradientError(RuntimeError):
    """The backward pass failed: for this example, or for every one."""


def cannot_be_differentiated(model: nn.Module, error: GradientError) -> UsageError:
    """What a user is told."""
    return UsageError(f"{type(model).__name__} cannot be differentiated: {in_short(error)}")


def _gradient(
    model: nn.Module, objective: Objective, leaves: Mapping[str, Tensor], batch: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    with swapped(model, leaves):  # until the end: checkpointed modules run forward again in the backward pass
        loss = objective.whole(model, {}, *batch)
        if not loss.requires_grad:
            return loss.detach(), {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        for leaf in leaves.values():
            leaf.grad = None
        try:
            torch.autograd.backward(
                loss
            )  # to torch.autograd.grad what re-entrant checkpoints hold is invisible
        except FAILURES as error:
            raise GradientError(in_short(error)) from error
    return loss.detach(), {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in leaves.items()}


def add_to(slots: list[Slot], row: Tensor, parts: Mapping[str, Tensor]) -> None:
    """Add parameters by name to their places in a flat row."""
    for slot in slots:
        if slot.name in parts:
            row[slot.start : slot.stop].add_(parts[slot.name].reshape(-1))
