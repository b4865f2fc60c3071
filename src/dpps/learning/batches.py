"""Each node's own examples, and which of them a round uses."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from dpps.data import Images
from dpps.errors import UsageError
from dpps.keystream import Keystream
from dpps.streams import SAMPLING, Streams


class NodeData:
    """The examples of the nodes held here, one data set per node.

    `TensorDataset`s, and `Images` (as bytes, until a batch is read), are kept as one tensor, so a batch of all nodes is one
    read; any other map-style data set is asked item by item.
    """

    def __init__(self, datasets: Sequence[Dataset[Any]], device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.datasets = list(datasets)
        self.sizes = [len(d) for d in self.datasets]  # type: ignore[arg-type]
        self._starts = np.concatenate([[0], np.cumsum(self.sizes)[:-1]])
        self._tensors: tuple[Tensor, Tensor] | None = None
        self._images: Images | None = None
        self._memory = torch.empty(0)
        images = [d for d in self.datasets if isinstance(d, Images)]
        plain = [d.tensors for d in self.datasets if isinstance(d, TensorDataset) and len(d.tensors) == 2]
        if (
            len(images) == len(self.datasets)
            and len({(d.shape, d.pixels.shape[1:], d.mean, d.deviation) for d in images}) == 1
        ):
            self._images = images[0]
            self._keep([d.pixels for d in images], [d.labels for d in images])
        elif len(plain) == len(self.datasets):
            self._keep([x for x, _ in plain], [t for _, t in plain])

    def _keep(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        self._tensors = _join(inputs).to(self.device), _join(targets).to(self.device)

    def _read(self, x: Tensor) -> Tensor:
        """What a model reads. Images are prepared in memory that the next batch uses again: fresh pages cost more than the work."""
        if self._images is None:
            return x
        size = prod(x.shape[:-3]) * prod(self._images.shape)
        if self._memory.numel() < size:
            self._memory = torch.empty(size, device=x.device)
        return self._images.prepared(x, self._memory)

    def slice(self, first: int, count: int) -> tuple[Any, Any]:
        """Examples first..first+count-1 of every node, without a copy where all nodes hold equally many. Valid until the next batch."""
        if self._tensors is not None and len(set(self.sizes)) == 1:
            x, t = (part.view(len(self.sizes), self.sizes[0], *part.shape[1:]) for part in self._tensors)
            return self._read(x[:, first : first + count]), t[:, first : first + count]
        return self.take(np.tile(np.arange(first, first + count), (len(self.sizes), 1)))

    def take(self, index: np.ndarray) -> tuple[Any, Any]:
        """Examples index[k] of the k-th node; index is (nodes, batch). Valid until the next batch."""
        if self._tensors is not None:
            flat = torch.from_numpy(index + self._starts[:, None]).to(self.device)
            x, t = (torch.index_select(part, 0, flat.flatten()) for part in self._tensors)
            return self._read(x.view(*index.shape, *x.shape[1:])), t.view(*index.shape, *t.shape[1:])
        items = [
            default_collate([d[int(i)] for i in row]) for d, row in zip(self.datasets, index, strict=True)
        ]
        return tuple(torch.stack([item[part] for item in items]).to(self.device) for part in (0, 1))  # type: ignore[return-value]


def _join(parts: Sequence[Tensor]) -> Tensor:
    """The parts behind each other; no copy when they already lie so in one tensor."""
    whole = parts[0]._base
    if (
        whole is not None
        and all(p._base is whole and p.is_contiguous() for p in parts)
        and whole.is_contiguous()
    ):
        ends = [p.storage_offset() + p.numel() for p in parts]
        starts = [p.storage_offset() for p in parts]
        if starts[0] == 0 and starts[1:] == ends[:-1] and ends[-1] == whole.numel():
            return whole.view(-1, *parts[0].shape[1:])
    return torch.cat(list(parts))


class Sampler(ABC):
    """Which examples a round uses."""

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
        return *self.data.take(index), None


class Poisson(Sampler):
    """Every example joins a round independently with probability batch_size / n_i: what amplification by sampling needs.

    Args:
        source: a seed (simulation and tests), or a keystream: who can foretell the batches gains more than was accounted for.
    """

    def __init__(self, data: NodeData, rows: Sequence[int], batch_size: int, source: int | Keystream) -> None:
        self.data, self.rows = data, rows
        self.rates = [min(1.0, batch_size / n) for n in data.sizes]
        self._source = Streams(source, SAMPLING) if isinstance(source, int) else source

    def _joins(self, row: int, round_: int, n: int, q: float) -> np.ndarray:
        if isinstance(self._source, Keystream):
            return self._source.bernoulli(q, n)
        return self._source.at(row, round_).random(n) < q

    def batch(self, round_: int) -> tuple[Any, Any, Tensor | None]:
        chosen = []
        for row, n, q in zip(self.rows, self.data.sizes, self.rates, strict=True):
            chosen.append(np.flatnonzero(self._joins(row, round_, n, q)))
        longest = max(1, *(len(c) for c in chosen))
        index = np.zeros((len(chosen), longest), dtype=np.int64)
        mask = torch.zeros(len(chosen), longest, dtype=torch.bool)
        for k, c in enumerate(chosen):
            index[k, : len(c)] = c
            mask[k, : len(c)] = True
        return *self.data.take(index), mask.to(self.data.device)
