"""Features in half the memory, read in float32."""

import numpy as np
import torch

from dpps.data import FeatureSet


def test_features_are_kept_in_half_and_read_in_float32() -> None:
    x = torch.arange(24.0).view(4, 3, 2) / 8
    data = FeatureSet(x, torch.arange(4))
    assert data.features.dtype == torch.float16
    assert data.shape == (3, 2)
    one, label = data[2]
    assert torch.equal(one, x[2])
    assert (one.dtype, int(label)) == (torch.float32, 2)
    assert torch.equal(data.inputs(np.array([[0, 3]])), x[[0, 3]][None])


def test_parts_and_orders() -> None:
    data = FeatureSet(torch.arange(4.0)[:, None], torch.arange(4))
    assert data.part(1, 3).labels.tolist() == [1, 2]
    assert data.ordered(np.array([3, 0])).inputs().flatten().tolist() == [3.0, 0.0]
