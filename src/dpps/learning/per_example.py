"""Per-example clipped gradients (unit record): what one example can change is bounded, whatever the model."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.nn.modules.batchnorm import _BatchNorm

from dpps.errors import UsageError
from dpps.learning.gradients import Loss
from dpps.learning.partition import Partition

_LIMIT = 1 << 24  # gradient numbers held at a time: 64 MiB in float32
_MARGIN = 1e-4  # clipping stays below the bound by more than the rounding of float32 norms and sums


class PerExample:
    """Sums over a batch of per-example gradients, each scaled down to an L2 norm of `clip` over shared and local together.

    One backward pass at (y, l) serves both parts; all nodes and examples at once, in chunks that bound memory.
    """

    def __init__(self, partition: Partition, loss: Loss, clip: float) -> None:
        refuse_batch_norm(partition.model)
        self.partition, self.clip = partition, clip

        def one(s: Tensor, l: Tensor, x: Tensor, target: Tensor) -> Tensor:
            return loss(functional_call(partition.model, partition.views(s, l), (x[None],)), target[None])

        examples = torch.vmap(
            grad_and_value(one, argnums=(0, 1)), in_dims=(None, None, 0, 0), randomness="different"
        )
        self._gradients = torch.vmap(examples, randomness="different")

    def sums(
        self, y: Tensor, l: Tensor, x: Tensor, target: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mean losses (for display), and the sums of clipped gradients for s and l, over the examples in the mask."""
        self.partition.model.train()
        losses = torch.zeros(len(y), device=y.device)
        sum_s, sum_l = torch.zeros_like(y), torch.zeros_like(l)
        per_example = max(1, y.shape[1] + l.shape[1]) * len(y)
        for first in range(0, mask.shape[1], chunk := max(1, _LIMIT // per_example)):
            part = slice(first, first + chunk)
            (g_s, g_l), values = self._gradients(y, l, x[:, part], target[:, part])
            norms = torch.sqrt(_squares(g_s) + _squares(g_l))
            factor = self.clip / norms.clamp(min=self.clip) * (1 - _MARGIN) * mask[:, part]
            sum_s += torch.bmm(factor[:, None], g_s)[:, 0]
            sum_l += torch.bmm(factor[:, None], g_l)[:, 0]
            losses += (values * mask[:, part]).sum(1)
        return losses / mask.sum(1).clamp(min=1), sum_s, sum_l


def _squares(g: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(g, dim=2)
    return norms.square()


def refuse_batch_norm(model: nn.Module) -> None:
    """BatchNorm mixes the examples of a batch, so no gradient belongs to one example."""
    found: Sequence[str] = [name for name, m in model.named_modules() if isinstance(m, _BatchNorm)]
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise UsageError(
            f"{', '.join(found[:3])}{more}: BatchNorm mixes examples, so the record unit cannot bound one example's share; "
            "use GroupNorm instead (ResNet18(norm='group')), or the unit contribution"
        )
