"""Images as bytes, and as a model reads them."""

import numpy as np
import pytest
import torch

from dpps.data import Images
from dpps.errors import UsageError

PIXELS = torch.tensor([0, 51, 255], dtype=torch.uint8).view(3, 1, 1, 1).repeat(1, 1, 2, 2)


def test_bytes_are_scaled_and_repeated_over_channels() -> None:
    images = Images(PIXELS, torch.arange(3), mean=(0.2, 0.2, 0.2), deviation=(2.0, 2.0, 2.0))
    assert images.shape == (3, 2, 2)
    x, label = images[2]
    assert x.shape == (3, 2, 2)
    torch.testing.assert_close(x, torch.full((3, 2, 2), 0.4))
    assert int(label) == 2
    assert images.inputs(np.array([[0], [1]])).shape == (2, 1, 3, 2, 2)


def test_parts_share_memory_and_orders_copy() -> None:
    images = Images(PIXELS.clone(), torch.arange(3))
    part, turned = images.part(1, 3), images.ordered(np.array([2, 0, 1]))
    images.pixels[1] = 7
    assert int(part.pixels[0, 0, 0, 0]) == 7
    assert turned.labels.tolist() == [2, 0, 1]
    assert int(turned.pixels[2, 0, 0, 0]) == 51


def test_one_label_for_every_image() -> None:
    with pytest.raises(UsageError, match=r"3 images.*2 labels"):
        Images(PIXELS, torch.arange(2))
