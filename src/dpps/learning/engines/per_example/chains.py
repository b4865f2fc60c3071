"""Chains of linear layers: every pass written out for all nodes at once.

With input a and returning gradient d, example e's gradient of a layer is d_e a_e^T, so norms and clipped sums follow from what
`dpps.learning.engines.chain` leaves behind, several nodes at a time.
"""

from typing import Any

import torch
from torch import Tensor

from dpps.learning.engines.calling import FAILURES, Loss
from dpps.learning.engines.chain import Chain, blocks, output_gradients
from dpps.learning.engines.per_example.adding import squared_norms, sum_of_products
from dpps.learning.engines.per_example.base import PerExample, Sums
from dpps.learning.engines.per_example.single import OneByOne
from dpps.learning.partition import Partition


class Chains(PerExample):
    r"""$\|g_e\|^2 = \sum_{layers} \|d_e\|^2 (\|a_e\|^2 + 1)$ and the clipped sum is $\sum_e f_e d_e a_e^T$."""

    def __init__(self, partition: Partition, loss: Loss, clip: float, batch: int = 1) -> None:
        super().__init__(partition, loss, clip, batch)
        self._chain = Chain(partition)
        self._single = OneByOne(partition, loss, clip, batch)
        self._single.skipped, self._single.tried = self.skipped, True
        self._widest = max(max(link.inputs, link.outputs) for link in self._chain.links)

    def sums(self, y: Tensor, l: Tensor, x: Any, target: Any, mask: Tensor) -> Sums:
        try:
            return self._all_at_once(y, l, x, target, mask)
        except FAILURES:  # a label that is no class, say
            if not self.hides_failures:
                raise
        self._single.hides_failures = True
        return self._single.sums(y, l, x, target, mask)

    def _all_at_once(self, y: Tensor, l: Tensor, x: Any, target: Any, mask: Tensor) -> Sums:
        losses, clipped = (torch.empty(len(y), dtype=y.dtype, device=y.device) for _ in range(2))
        piece = self._piece(mask, y.dtype)
        sum_s, sum_l = (self._empty(part, piece) for part in (y, l))
        for rows in blocks(len(y), mask.shape[1] * self._widest):
            each, squares = self._passes(y[rows], l[rows], x[rows], target[rows])
            own = mask[rows]
            present = own.sum(1).clamp(min=1)
            self._clipped(squares, own, sum_s[rows], sum_l[rows], piece)
            self.skipped.not_finite(int((~torch.isfinite(squares) & own).sum()))
            clipped[rows] = ((squares > self.clip**2) & own).sum(1) / present
            losses[rows] = each.masked_fill(~own, 0.0).sum(1) / present
        self.skipped.report(int(mask.sum()))
        return Sums.of(losses, sum_s, sum_l, clipped)

    def _passes(self, y: Tensor, l: Tensor, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Every example's loss and squared norm; what went into each layer and what came back stays in the chain."""
        chain, losses = self._chain, torch.empty(target.shape[:2], dtype=y.dtype, device=y.device)
        layers = chain.layers(y, l)
        gradient = output_gradients(self.loss, target, each_example=True)(chain.forward(layers, x), losses)
        chain.backward(layers, gradient)
        squares = torch.zeros(target.shape[:2], dtype=torch.float64, device=y.device)
        for link, a, d in zip(chain.links, chain.inputs[:-1], chain.returned, strict=True):
            squares += squared_norms(d) * (squared_norms(a) + float(link.bias))
        return losses, squares

    def _clipped(
        self, squares: Tensor, mask: Tensor, sum_s: Tensor, sum_l: Tensor, piece: int | None
    ) -> None:
        inputs, returned = self._chain.inputs[:-1], self._chain.returned
        bad = ~torch.isfinite(squares)
        # neither a NaN nor stopping because of one may tell of an example: it counts as zero
        if bool(bad.any()):
            inputs, returned = (
                [part.masked_fill(bad[:, :, None], 0.0) for part in parts] for parts in (inputs, returned)
            )
            squares = squares.masked_fill(bad, 0.0)
        factors = self._factors(squares, returned[0].dtype) * mask
        places = self._chain.layers(sum_s, sum_l)
        for (weight, bias), a, d in zip(places, inputs, returned, strict=True):
            narrow = d * factors[:, :, None]
            weight.copy_(sum_of_products(narrow, a, 1, piece))
            if bias is not None:
                bias.copy_(narrow.sum(1) if piece is None else narrow.sum(1, dtype=torch.float64))
