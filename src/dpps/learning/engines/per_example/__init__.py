"""Per-example clipped gradients (unit record): what one example can change is bounded, whatever the model.

`per_example` chooses: `Chains` for chains of linear layers (all nodes at once), `BookKeeping` for everything else (one forward and
one backward pass, by rules for torch's functions, see `rules`), and `OneByOne` where nothing else is right.
"""

import logging
from typing import Any

from torch import Tensor

from dpps.errors import UsageError
from dpps.learning.engines.calling import FAILURES, Loss, ModelLoss, in_short
from dpps.learning.engines.chain import is_chain
from dpps.learning.engines.per_example.base import PerExample, Sums
from dpps.learning.engines.per_example.book import BookKeeping
from dpps.learning.engines.per_example.chains import Chains
from dpps.learning.engines.per_example.probe import refuse_by_trial, refuse_mixing
from dpps.learning.engines.per_example.single import OneByOne
from dpps.learning.partition import Partition

__all__ = ["BookKeeping", "Chains", "OneByOne", "PerExample", "Sums", "per_example"]

_log = logging.getLogger(__name__)


def per_example(partition: Partition, loss: Loss, clip: float, example: Any, batch: int = 1) -> PerExample:
    """The quickest way that is right for a model.

    Args:
        partition: of the model.
        loss: of (outputs, targets), a mean over the batch; or a `ModelLoss`.
        clip: the largest L2 norm of an example's gradient over all parameters.
        example: one example's inputs: a tensor, or a tuple or dictionary of tensors; only shapes and types are looked at.
        batch: the expected number of examples in a batch, a public number.

    Raises:
        UsageError: the model mixes examples, or draws random numbers.
    """
    refuse_mixing(partition.model)
    return _quick(partition, loss, example)(partition, loss, clip, batch)


def _quick(partition: Partition, loss: Loss, example: Any) -> type[PerExample]:
    if (
        isinstance(example, Tensor)
        and is_chain(partition, example.ndim + 1)
        and not isinstance(loss, ModelLoss)
    ):
        return Chains
    reason: Exception | None = None
    for whole in (False, True):
        try:
            refuse_by_trial(partition, example, whole=whole)
        except UsageError:
            raise
        except FAILURES as error:
            reason = reason or error
        else:
            return BookKeeping
    _log.warning(
        "%s does not run on made-up examples (%s): gradients one example after the other, which is slow",
        type(partition.model).__name__,
        in_short(reason),
    )
    return OneByOne
