"""Labelled images as bytes, features computed of them, and a named data set: its two parts, its classes, and whom to cite."""

from dataclasses import dataclass, replace
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, TensorDataset

from dpps.errors import UsageError


@dataclass(frozen=True, eq=False)
class Images(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A torch data set of labelled images, kept as bytes; `inputs` turns them into what a model reads.

    `pixels` is a uint8 tensor (n, channels, height, width) and `labels` an int64 tensor (n,). Images of one
    channel are repeated to as many channels as `mean` and `deviation` have.
    """

    pixels: torch.Tensor
    labels: torch.Tensor
    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if len(self.pixels) != len(self.labels):
            raise UsageError(f"{len(self.pixels)} images but {len(self.labels)} labels: give one label each")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.prepared(self.pixels[k]), self.labels[k]

    def part(self, first: int, stop: int) -> "Images":
        """Images first..stop-1, without a copy."""
        return self.ordered(slice(first, stop))

    def ordered(self, index: npt.NDArray[np.int64] | slice) -> "Images":
        """The images at `index`, in that order; as a copy, unless it is a slice."""
        return replace(self, pixels=self.pixels[index], labels=self.labels[index])

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of one input."""
        channels, height, width = self.pixels.shape[1:]
        return max(channels, len(self.mean)), height, width

    def inputs(self, index: torch.Tensor | npt.NDArray[np.int64] | slice | None = None) -> torch.Tensor:
        """The images at `index` (all without one) as float32: scaled to [0, 1], then (x - mean) / deviation.

        An index of any shape is allowed: (nodes, batch) gives (nodes, batch, channels, height, width).
        """
        return self.prepared(self.pixels if index is None else self.pixels[index])

    def prepared(self, pixels: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        """These bytes (..., channels, height, width), on any device, as a model reads them;
        at the beginning of `memory`, if given."""
        shape = (*pixels.shape[:-3], *self.shape)
        if memory is None:
            memory = torch.empty(prod(shape), device=pixels.device)
        scaled = memory[: prod(shape)].view(shape).copy_(pixels.expand(shape)).div_(255)
        if any(self.mean):
            scaled.sub_(scaled.new_tensor(self.mean)[:, None, None])
        if set(self.deviation) != {1.0}:
            scaled.div_(scaled.new_tensor(self.deviation)[:, None, None])
        return scaled


class FeatureSet(TensorDataset):
    """Features (n, ...) and labels (n,). Features are kept in half precision, in half the memory; models read float32."""

    def __init__(self, features: torch.Tensor, labels: torch.Tensor) -> None:
        super().__init__(features.half(), labels)
        self.features, self.labels = self.tensors

    def __getitem__(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.features[k].float(), self.labels[k]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one input."""
        return tuple(self.features.shape[1:])

    def part(self, first: int, stop: int) -> "FeatureSet":
        """Examples first..stop-1, without a copy."""
        return self.ordered(slice(first, stop))

    def ordered(self, index: npt.NDArray[np.int64] | slice) -> "FeatureSet":
        """The examples at `index`, in that order; as a copy, unless it is a slice."""
        return FeatureSet(self.features[index], self.labels[index])

    def inputs(self, index: torch.Tensor | npt.NDArray[np.int64] | slice | None = None) -> torch.Tensor:
        """The features at `index` (all without one) as float32."""
        return (self.features if index is None else self.features[index]).float()


@dataclass(frozen=True, eq=False)
class DataSet:
    """A named data set: its training and test images (or their features), the number of classes, and whom to cite."""

    name: str
    train: Images | FeatureSet
    test: Images | FeatureSet
    classes: int
    citation: str
