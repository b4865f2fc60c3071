"""Labelled examples as a frozen feature extractor gave them, computed once."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import TensorDataset


class FeatureSet(TensorDataset):
    """Features (n, ...) and labels (n,). Features are kept in half precision, in half the memory; models read float32.

    Args:
        features: of every example.
        labels: int64.
    """

    def __init__(self, features: Tensor, labels: Tensor) -> None:
        super().__init__(features.half(), labels)
        self.features, self.labels = self.tensors

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        return self.features[k].float(), self.labels[k]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one input."""
        return tuple(self.features.shape[1:])

    def part(self, first: int, stop: int) -> "FeatureSet":
        """Examples first..stop-1, without a copy."""
        return FeatureSet(self.features[first:stop], self.labels[first:stop])

    def ordered(self, index: npt.NDArray[np.int64]) -> "FeatureSet":
        """The examples at `index`, in that order, as a copy."""
        chosen = torch.from_numpy(index)
        return FeatureSet(self.features[chosen], self.labels[chosen])

    def inputs(self, index: Tensor | npt.NDArray[np.int64] | slice | None = None) -> Tensor:
        """The features at `index` (all without one) as float32."""
        if isinstance(index, np.ndarray):
            index = torch.from_numpy(index)
        return (self.features if index is None else self.features[index]).float()
