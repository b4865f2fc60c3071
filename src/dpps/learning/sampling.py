"""Which examples a round uses: how many every node declares, how large its batches are, and which examples are drawn.

**Declared sizes** are how many examples every node says it holds: public numbers that a run keeps to from its start.
The number of rounds and, in the unit record, the sampling rates follow from them. If they followed from the actual
sizes, one example more would change how often all the others are drawn, and the usual accounting would not hold.

**Batch sizes** are one number for all nodes, one per node, or the same part of every node's data. With one number for
all, small nodes draw a larger part of their examples, and the one with the largest part sets everybody's noise. With
one part for all, every node draws at the same rate, spends the same, and nobody limits anybody.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset, TensorDataset, default_collate

from dpps.data import Images
from dpps.errors import PeerError, UsageError
from dpps.frozen import Frozen
from dpps.learning.gradients.calling import move, tensors_in
from dpps.noise.sampler import Keystream
from dpps.noise.source import SAMPLING, Streams
from dpps.privacy.promise import Contract
from dpps.transport import Fabric

log = logging.getLogger(__name__)

LARGEST = 10**9
"""The largest size that a node may declare."""

BatchSize = int | float | Sequence[int]
"""A whole number for all nodes, one per node, or a part in (0, 1) of every node's declared size."""

BATCHES = "a whole number for all nodes, one per node with commas between (17,90,45), or a part of every node's examples (1/8)"
"""What may be given as a batch size, for messages."""


# Declared sizes


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
    """The declared sizes of all nodes; each process announces those of its own.

    Args:
        declared: as the user gave them; otherwise they are those of the contract, and at the first start what the nodes hold.
        held: how many examples the nodes here have.
        fabric: where the nodes are.
        contract: of the first start, when a run is resumed.

    Raises:
        PeerError: another process announces a number that cannot be a number of examples.
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
    announced = fabric.gather(torch.tensor(own, dtype=torch.float64)).tolist()
    for node, size in enumerate(announced):
        if not (size.is_integer() and 1 <= size <= LARGEST):
            raise PeerError(
                f"node {node} announces {size:.15g} examples: it must be a whole number from 1 to {LARGEST}; nothing was sent"
            )
    return [int(size) for size in announced]


# Batch sizes


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
    batch: BatchSize
    text = str(given)
    try:
        if "," in text:
            batch = tuple(int(part) for part in text.split(","))
        elif "/" in text:
            over, under = (int(part) for part in text.split("/"))
            batch = over / under
        else:
            batch = float(text) if "." in text else int(text)
    except (ValueError, ZeroDivisionError):
        raise UsageError(f"--batch-size is {given!r}: give {BATCHES}") from None
    check_batch(batch, "--batch-size")
    return batch


def check_batch(batch: BatchSize, name: str = "batch_size") -> None:
    """Refuse what is no batch in any network."""
    part = isinstance(batch, float) and 0 < batch < 1
    for each in [] if part else list(batch) if isinstance(batch, Sequence) else [batch]:
        if not hasattr(each, "__index__") or each < 1:
            raise UsageError(f"{name} is {batch!r}: give {BATCHES}")


def batches(batch: BatchSize, sizes: Sequence[int]) -> Batches:
    """What every node of these declared sizes draws.

    Raises:
        UsageError: there are not as many numbers as nodes, or a node has fewer examples than its number.
    """
    if isinstance(batch, float):
        return Batches(tuple(batch * n for n in sizes), (batch,) * len(sizes))
    if not isinstance(batch, Sequence):
        return Batches((batch,) * len(sizes), tuple(min(1.0, batch / n) for n in sizes))
    if len(batch) != len(sizes):
        raise UsageError(f"{len(batch)} batch sizes for {len(sizes)} nodes: give {BATCHES}")
    for node, (each, n) in enumerate(zip(batch, sizes, strict=True)):
        if each > n:
            raise UsageError(
                f"the batch of node {node} is {each}, larger than the {n} examples that it declares: use at most so many"
            )
    return Batches(tuple(batch), tuple(each / n for each, n in zip(batch, sizes, strict=True)))


# The examples of the nodes here


class NodeData:
    """The examples of the nodes held here, one data set per node.

    `TensorDataset`s, and `Images` (as bytes, until a batch is read), are kept as one tensor, so a batch of all nodes is one
    read (half precision becomes float32 then); any other map-style data set is asked item by item; its inputs
    may be tensors in a tuple or a dictionary.
    """

    hides_failures = False
    """Whether an example that cannot be read is left out: stopping because of one would tell of it."""

    def __init__(self, datasets: Sequence[Dataset[Any]], device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.datasets = list(datasets)
        self.sizes = [len(d) for d in self.datasets]  # type: ignore[arg-type]
        self._starts = np.concatenate([[0], np.cumsum(self.sizes)[:-1]])
        self._tensors: tuple[Tensor, Tensor] | None = None
        self._images: Images | None = None
        self._memory = torch.empty(0)
        self._first: dict[int, Any] = {}
        images = [d for d in self.datasets if isinstance(d, Images)]
        plain = [d.tensors for d in self.datasets if isinstance(d, TensorDataset) and len(d.tensors) == 2]
        kinds = {(d.shape, d.pixels.shape[1:], d.mean, d.deviation) for d in images}
        if len(images) == len(self.datasets) and len(kinds) == 1:
            self._images, plain = images[0], [(d.pixels, d.labels) for d in images]
        if len(plain) == len(self.datasets):
            x, target = (_join(parts).to(self.device) for parts in zip(*plain, strict=True))
            self._tensors = x, target

    @property
    def targets(self) -> Tensor | None:
        """Of all examples of the nodes held here; None where they are asked for item by item."""
        return None if self._tensors is None else self._tensors[1]

    def _read(self, x: Tensor) -> Tensor:
        """What a model reads. Images are prepared in memory that the next batch uses again:
        fresh pages cost more than the work."""
        if self._images is None and x.dtype != torch.float16:
            return x
        size = x.numel() if self._images is None else prod(x.shape[:-3]) * prod(self._images.shape)
        if self._memory.numel() < size:
            self._memory = torch.empty(size, device=x.device)
        if self._images is None:  # features are kept in half precision
            return self._memory[:size].view(x.shape).copy_(x)
        return self._images.prepared(x, self._memory)

    def slice(self, first: int, count: int) -> tuple[Any, Any]:
        """Examples first..first+count-1 of every node, without a copy where all nodes hold equally many.
        Valid until the next batch."""
        if self._tensors is not None and len(set(self.sizes)) == 1:
            x, t = (part.view(len(self.sizes), self.sizes[0], *part.shape[1:]) for part in self._tensors)
            return self._read(x[:, first : first + count]), t[:, first : first + count]
        return self.read(np.tile(np.arange(first, first + count), (len(self.sizes), 1)))[:2]

    def read(self, index: np.ndarray) -> tuple[Any, Any, np.ndarray | None]:
        """Examples index[k] of the k-th node, where index is (nodes, batch); and which of them could be read where some could not:
        their node's first example stands for those. Valid until the next batch."""
        if self._tensors is not None:
            flat = torch.from_numpy(index + self._starts[:, None]).to(self.device)
            x, t = (torch.index_select(part, 0, flat.flatten()) for part in self._tensors)
            return self._read(x.view(*index.shape, *x.shape[1:])), t.view(*index.shape, *t.shape[1:]), None
        batches = [self._batch(k, chosen) for k, chosen in enumerate(index)]
        x, t = (
            tree_map(lambda *of_nodes: torch.stack(of_nodes), *(batch[part] for batch, _ in batches))
            for part in (0, 1)
        )
        readable = np.stack([good for _, good in batches])
        return move(x, self.device), move(t, self.device), None if readable.all() else readable

    def _batch(self, k: int, chosen: np.ndarray) -> tuple[Any, np.ndarray]:
        """Examples of the k-th node, and which of them could be read."""
        dataset, all_of_them = self.datasets[k], np.ones(len(chosen), dtype=np.bool_)
        if not self.hides_failures:
            return default_collate([dataset[int(i)] for i in chosen]), all_of_them
        first = self._first[k] = self._first.get(k) or default_collate([dataset[0]])
        with suppress(Exception):  # somebody's own data set may raise anything: one by one then
            batch = default_collate([dataset[int(i)] for i in chosen])
            if _kind(batch) == _kind(first):
                return batch, all_of_them
        found = [self._alone(k, int(i)) for i in chosen]
        batch = tree_map(lambda *parts: torch.cat(parts), *(first if one is None else one for one in found))
        return batch, np.array([one is not None for one in found])

    def _alone(self, k: int, i: int) -> Any:
        """One example as a batch; None if it cannot be read, or is not of the kind of the others."""
        try:
            one = default_collate([self.datasets[k][i]])
            if _kind(one) == _kind(self._first[k]):
                return one
            error: object = "it has another shape or type than the others"
        except Exception as reason:  # noqa: BLE001 - as above
            error = reason
        log.warning("example %d of data set %d of those held here teaches nothing: %s", i, k, error)
        return None


def _kind(batch: Any) -> list[tuple[Any, torch.dtype]]:
    """Shapes and types of one example."""
    return [(part.shape[1:], part.dtype) for part in tensors_in(batch)]


def _join(parts: Sequence[Tensor]) -> Tensor:
    """The parts behind each other; no copy when they already lie so in one tensor."""
    shapes = {tuple(part.shape[1:]): k for k, part in reversed(list(enumerate(parts)))}
    if len(shapes) > 1:
        (one, first), (other, second) = sorted(shapes.items(), key=lambda found: found[1])[:2]
        raise UsageError(
            f"data set {second} of those held here has examples (or targets) of shape {other} and data set {first} of shape {one}: "
            "all nodes need the same number of features"
        )
    whole = parts[0]._base
    if (
        whole is not None
        and all(p._base is whole and p.is_contiguous() for p in parts)
        and whole.is_contiguous()
    ):
        ends = [p.storage_offset() + p.numel() for p in parts]
        if [p.storage_offset() for p in parts] == [0, *ends[:-1]] and ends[-1] == whole.numel():
            return whole.view(-1, *parts[0].shape[1:])
    return torch.cat(list(parts))


# Samplers


class Sampler(Frozen, ABC):
    """Which examples a round uses."""

    fixed = frozenset({"data", "batch_size", "rows", "rates", "_source"})

    @abstractmethod
    def batch(self, round_: int) -> tuple[Any, Any, Tensor | None]:
        """Inputs, targets, and for batches of different size a mask (nodes, largest batch)."""


class Cyclic(Sampler):
    """Batches of equal size in a fixed order, round and round: the authors' sampler does not shuffle again between epochs."""

    def __init__(self, data: NodeData, batch_size: int) -> None:
        self.data, self.batch_size = data, batch_size
        small = [(k, n) for k, n in enumerate(data.sizes) if n < batch_size]
        if small:
            k, n = small[0]
            raise UsageError(
                f"node {k} of those held here has {n} examples, fewer than a batch of {batch_size}: "
                "use a smaller batch size, fewer nodes or another split"
            )

    def batch(self, round_: int) -> tuple[Any, Any, Tensor | None]:
        size = self.batch_size
        if len(set(self.data.sizes)) == 1:
            first = round_ * size % self.data.sizes[0]
            if first + size <= self.data.sizes[0]:
                return *self.data.slice(first, size), None
        index = (round_ * size + np.arange(size)) % np.array(self.data.sizes)[:, None]
        return *self.data.read(index)[:2], None


class Poisson(Sampler):
    """Every example joins a round independently with its node's rate: what amplification by sampling needs.

    Args:
        rates: one per node held here. They follow from the *declared* sizes: with batch_size / (actual size), one example
            more would change how often all the others are drawn.
        source: a seed (simulation and tests), or a keystream: who can foretell the batches gains more than was accounted for.
    """

    def __init__(
        self, data: NodeData, rows: Sequence[int], rates: Sequence[float], source: int | Keystream
    ) -> None:
        self.data, self.rows, self.rates = data, rows, tuple(rates)
        self._source = Streams(source, SAMPLING) if isinstance(source, int) else source

    def _joins(self, row: int, round_: int, n: int, q: float) -> np.ndarray:
        if isinstance(self._source, Keystream):
            self._source.refresh()
            return self._source.bernoulli(q, n)
        return self._source.at(row, round_).random(n) < q

    def batch(self, round_: int) -> tuple[Any, Any, Tensor | None]:
        nodes = zip(self.rows, self.data.sizes, self.rates, strict=True)
        chosen = [np.flatnonzero(self._joins(row, round_, n, q)) for row, n, q in nodes]
        index = np.zeros((len(chosen), max(1, *map(len, chosen))), dtype=np.int64)
        mask = torch.zeros(index.shape, dtype=torch.bool)
        for k, c in enumerate(chosen):
            index[k, : len(c)] = c
            mask[k, : len(c)] = True
        x, target, readable = self.data.read(index)
        if readable is not None:
            mask &= torch.from_numpy(readable)
        return x, target, mask.to(self.data.device)
