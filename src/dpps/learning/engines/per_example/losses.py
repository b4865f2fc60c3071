"""Every example's own loss. A loss that is a mean over the batch is asked for each example by itself."""

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpps.learning.engines.calling import FAILURES, Loss, in_short, pick
from dpps.learning.engines.per_example.fallback import quiet

_log = logging.getLogger(__name__)

_MEANS = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy_with_logits,
    F.binary_cross_entropy,
)
"""Losses that are plain means over all numbers."""


class ExampleLosses:
    """From outputs and targets of a batch to one loss per example.

    Args:
        loss: of (outputs, targets), a mean over a batch.
    """

    def __init__(self, loss: Loss) -> None:
        self.loss, self._vmap = loss, True

    def __call__(self, outputs: Any, target: Any, examples: int) -> Tensor:
        """The losses, (examples,)."""
        if isinstance(outputs, Tensor) and isinstance(target, Tensor):
            if self.loss is F.cross_entropy and outputs.ndim == 2 and target.ndim == 1:
                return F.cross_entropy(outputs, target, reduction="none")
            if self.loss in _MEANS and outputs.shape == target.shape:
                each: Tensor = self.loss(outputs, target, reduction="none")
                return each.reshape(examples, -1).mean(1)
        if self._vmap:
            try:
                with quiet():
                    losses: Tensor = torch.vmap(self._one)(outputs, target)
            except FAILURES as error:
                self._vmap = False
                _log.warning(
                    "torch.vmap cannot run the loss (%s): it is computed one example after the other",
                    in_short(error),
                )
            else:
                return losses
        return torch.stack([self._one(pick(outputs, k), pick(target, k)) for k in range(examples)])

    def _one(self, outputs: Any, target: Any) -> Tensor:
        return self.loss(pick(outputs, None), pick(target, None))
