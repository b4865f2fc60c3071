"""The gradients of one round on made-up examples: to see how long they take, without anybody's data and without a trace."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from dpps.learning.algorithm import TrainState
from dpps.learning.engines.calling import move, pick, tensors_in
from dpps.learning.engines.per_example.madeup import made_up
from dpps.learning.nodes import Nodes
from dpps.learning.updates import RecordUpdates


def rehearsal(nodes: Nodes, state: TrainState) -> Callable[[], None]:
    """What computes the gradients of a round like those to come; parameters, buffers and random numbers stay as they are.

    Args:
        nodes: made ready for a run.
        state: whose parameters are used, as copies.
    """
    count, batch = len(nodes.rows), min(math.ceil(nodes.plan.largest_batch), *nodes.data.sizes)
    example = pick(pick(nodes.data.slice(0, 1), 0), 0)
    examples = move(made_up(example, count * batch), nodes.device)
    x, target = tree_map(lambda part: torch.unflatten(part, 0, (count, batch)), examples)
    y, local = state.shared.y.clone(), state.local.clone()
    mask = torch.ones(count, batch, dtype=torch.bool, device=nodes.device)

    def gradients() -> None:
        if isinstance(nodes.updates, RecordUpdates):
            nodes.updates.per_example.sums(y, local, x, target, mask)
            return
        before = {name: buffer.clone() for name, buffer in nodes.engine.state().items()}
        nodes.engine.step(y, local, x, target, lambda g, _: g, 0)
        nodes.engine.load_state(before)

    return gradients


def size_of(nodes: Nodes) -> dict[str, Any]:
    """What the time of a round depends on: the model, the examples and how many there are."""
    x, target = nodes.data.slice(0, 1)
    slots = (*nodes.partition.shared, *nodes.partition.local)
    return {
        "model": type(nodes.partition.model).__qualname__,
        "parameters": [(slot.name, *slot.shape) for slot in slots],
        "examples": [(str(part.dtype), *part.shape[2:]) for part in tensors_in((x, target))],
        "nodes": len(nodes.rows),
        "batch": nodes.plan.batch_size,
        "each example clipped": isinstance(nodes.updates, RecordUpdates),
    }
