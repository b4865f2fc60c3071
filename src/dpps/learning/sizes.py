"""Declared sizes: how many examples every node says it holds, a public number that the run keeps to from its start.

The number of rounds and, in the unit record, the sampling rates follow from it. If they followed from the actual sizes, one
example more would change how often all the others are drawn, and the usual accounting would not hold.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dpps.errors import PeerError, UsageError
from dpps.privacy.promise import Contract
from dpps.transport import Fabric

log = logging.getLogger(__name__)

LARGEST = 10**9


def parse_sizes(text: str) -> int | list[int]:
    """The value of --declared-sizes: one number for all nodes, or one per node with commas between."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(
            f"--declared-sizes is {text!r}: give one whole number for all nodes, or one per node with commas between (200,350,90)"
        ) from None
    return sizes if "," in text else sizes[0]


def for_every_node(sizes: int | Sequence[int], nodes: int) -> tuple[int, ...]:
    """One declared size per node, from one per node or one for all."""
    several = isinstance(sizes, Iterable) and not isinstance(sizes, str)
    each: list[Any] = list(sizes) if several else [sizes] * nodes  # type: ignore[arg-type]
    if len(each) != nodes:
        raise UsageError(
            f"{len(each)} declared sizes for {nodes} nodes: give one per node, or one number for all"
        )
    for size in each:
        if not hasattr(size, "__index__") or not 1 <= size <= LARGEST:  # a whole number, numpy's too
            raise UsageError(f"declared size {size!r}: it must be a whole number from 1 to {LARGEST}")
    return tuple(int(size) for size in each)


def announce(
    declared: Sequence[int] | None, held: Sequence[int], fabric: Fabric, contract: Contract | None
) -> list[int]:
    """The declared sizes of all nodes, of which each process tells its own.

    Args:
        declared: as the user gave them; otherwise they are those of the contract, and at the first start what the nodes hold.
        held: how many examples the nodes here have.
        fabric: where the nodes are.
        contract: of the first start, when a run is resumed.

    Raises:
        PeerError: another process tells a number that cannot be one of examples.
    """
    known = contract.plan.declared_sizes if declared is None and contract else declared
    own = list(held) if known is None else [known[row] for row in fabric.rows]
    for row, actual, size in zip(fabric.rows, held, own, strict=True):
        if actual != size:
            log.warning(
                "node %d learns from %d examples and declared %d: rounds and sampling follow what was declared",
                row,
                actual,
                size,
            )
    if not fabric.meets:
        if known is None:
            raise UsageError(
                "members come and go, so nobody is asked how many examples it holds: give declared_sizes, "
                "one number or one per node"
            )
        return list(known)
    told = fabric.gather(torch.tensor(own, dtype=torch.float64)).tolist()
    for node, size in enumerate(told):
        if not (size.is_integer() and 1 <= size <= LARGEST):
            raise PeerError(
                f"node {node} announces {size:.15g} examples: it must be a whole number from 1 to {LARGEST}; nothing was sent"
            )
    return [int(size) for size in told]
