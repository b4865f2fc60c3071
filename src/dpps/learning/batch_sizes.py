"""How many examples each node expects to draw in a round: one number for all, one per node,
or the same part of every node's data.

With one number for all, small nodes draw a larger part of their examples, and the one with the largest part
sets everybody's noise. With one part for all, every node draws at the same rate, spends the same, and nobody limits anybody.
"""

from collections.abc import Sequence
from typing import NamedTuple

from dpps.errors import UsageError

BatchSize = int | float | Sequence[int]
"""A whole number for all nodes, one per node, or a part in (0, 1) of every node's declared size."""

FORMS = "a whole number for all nodes, one per node with commas between (17,90,45), or a part of every node's examples (1/8)"


class Batches(NamedTuple):
    """Of every node, from declared sizes."""

    expected: tuple[float, ...]
    """How many examples a round uses: exactly so many, or on average in the unit record."""
    rates: tuple[float, ...]
    """The chance of an example to be drawn."""

    @property
    def mean(self) -> float:
        """By which sums of gradients are divided; a whole number stays one."""
        found = sum(self.expected) / len(self.expected)
        return int(found) if found == int(found) else found

    def rounds(self, sizes: Sequence[int], steps: int = 1) -> int:
        """How many rounds of so many steps a pass over all nodes' examples takes."""
        return max(1, int(sum(sizes) / (sum(self.expected) * steps) * (1 + 1e-12)))

    @property
    def differ(self) -> bool:
        """Whether nodes draw different numbers of examples."""
        return len(set(self.expected)) > 1


def parse_batch(given: int | str) -> BatchSize:
    """The value of --batch-size."""
    try:
        read = _read(given)
    except (ValueError, ZeroDivisionError):
        raise UsageError(f"--batch-size is {given!r}: give {FORMS}") from None
    check_batch(read, "--batch-size")
    return read


def _read(given: int | str) -> BatchSize:
    if isinstance(given, int):
        return given
    if "," in given:
        return tuple(int(part) for part in given.split(","))
    if "/" in given:
        over, under = (int(part) for part in given.split("/"))
        return over / under
    return float(given) if "." in given else int(given)


def check_batch(batch: BatchSize, name: str = "batch_size") -> None:
    """Refuse what is no batch in any network."""
    part = isinstance(batch, float) and 0 < batch < 1
    for each in [] if part else list(batch) if isinstance(batch, Sequence) else [batch]:
        if not hasattr(each, "__index__") or each < 1:
            raise UsageError(f"{name} is {batch!r}: give {FORMS}")


def batches(batch: BatchSize, sizes: Sequence[int]) -> Batches:
    """What every node of these declared sizes draws.

    Raises:
        UsageError: as many numbers as there are not nodes, or more examples than a node that was given its own number has.
    """
    if isinstance(batch, float):
        return Batches(tuple(batch * n for n in sizes), (batch,) * len(sizes))
    if not isinstance(batch, Sequence):
        return Batches((batch,) * len(sizes), tuple(min(1.0, batch / n) for n in sizes))
    if len(batch) != len(sizes):
        raise UsageError(f"{len(batch)} batch sizes for {len(sizes)} nodes: give {FORMS}")
    for node, (each, n) in enumerate(zip(batch, sizes, strict=True)):
        if each > n:
            raise UsageError(
                f"the batch of node {node} is {each}, larger than the {n} examples that it declares: use at most so many"
            )
    return Batches(tuple(batch), tuple(each / n for each, n in zip(batch, sizes, strict=True)))
