"""How good the models are: the paper's way, and each node on its own kind of data."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dpps.learning.gradients import Engine


def accuracies(engine: Engine, s: Tensor, l: Tensor, x: Tensor, labels: Tensor) -> list[float]:
    """The paper's evaluation: the averaged s with each node's own l on the whole test set; percent, one per node."""
    right = torch.zeros(len(l), device=labels.device)
    for first in range(0, len(x), engine.at_once):
        part = slice(first, first + engine.at_once)
        right += (engine.outputs(s, l, x[part]).argmax(-1) == labels[part]).sum(1)
    return (100 * right / len(labels)).tolist()


def own_accuracies(
    engine: Engine,
    s: Tensor,
    l: Tensor,
    held_out: Sequence[tuple[Tensor, Tensor]],
) -> list[float]:
    """Every node on examples held out of its own data (`held_out[k]` belongs to the k-th row): what local heads are for."""
    result = []
    for k, (x, labels) in enumerate(held_out):
        right = 0
        for first in range(0, len(x), engine.at_once):
            part = slice(first, first + engine.at_once)
            right += int((engine.outputs_of(k, s, l[k], x[part]).argmax(-1) == labels[part]).sum())
        result.append(100 * right / len(labels))
    return result
