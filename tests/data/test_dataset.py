"""Images as bytes and features in half precision, and as a model reads them."""

import numpy as np
import pytest
import torch

from dpps.data import FeatureSet, Images
from dpps.errors import UsageError

MANY = np.random.default_rng(2).integers(0, 256, (30, 28, 28), np.uint8)
PIXELS = torch.tensor([0, 51, 255], dtype=torch.uint8).view(3, 1, 1, 1).repeat(1, 1, 2, 2)


def test_bytes_are_scaled_and_repeated_over_channels():
    images = Images(PIXELS, torch.arange(3), mean=(0.2, 0.2, 0.2), deviation=(2.0, 2.0, 2.0))
    assert images.shape == (3, 2, 2)
    x, label = images[2]
    assert x.shape == (3, 2, 2)
    torch.testing.assert_close(x, torch.full((3, 2, 2), 0.4))
    assert int(label) == 2
    assert images.inputs(np.array([[0], [1]])).shape == (2, 1, 3, 2, 2)


def test_parts_share_memory_and_orders_copy():
    images = Images(PIXELS.clone(), torch.arange(3))
    part, turned = images.part(1, 3), images.ordered(np.array([2, 0, 1]))
    images.pixels[1] = 7
    assert int(part.pixels[0, 0, 0, 0]) == 7
    assert turned.labels.tolist() == [2, 0, 1]
    assert int(turned.pixels[2, 0, 0, 0]) == 51


def test_one_label_for_every_image():
    with pytest.raises(UsageError, match=r"3 images.*2 labels"):
        Images(PIXELS, torch.arange(2))


def test_inputs_are_scaled_and_picked():
    images = Images(
        torch.from_numpy(MANY[:, None].copy()), torch.from_numpy((np.arange(30) % 10).astype(np.int64))
    )
    whole = images.inputs()
    assert whole.dtype == torch.float32
    np.testing.assert_allclose(whole.numpy(), MANY[:, None] / 255, rtol=1e-6)
    index = np.array([[3, 1], [7, 7]])
    assert torch.equal(images.inputs(index), whole[torch.from_numpy(index)])
    assert torch.equal(images.inputs(slice(2, 5)), whole[2:5])
    assert images.inputs(torch.tensor([4])).shape == (1, *images.shape) == (1, 1, 28, 28)
    assert images.pixels.dtype == torch.uint8, "the bytes themselves are left alone"


def test_colours_need_no_mean():
    pixels = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8)
    images = Images(pixels, torch.zeros(6, dtype=torch.int64))
    assert images.shape == (3, 8, 8)
    assert torch.equal(images.inputs(), pixels / 255)
    assert torch.equal(images[4][0], pixels[4] / 255)


def test_features_are_kept_in_half_and_read_in_float32():
    x = torch.arange(24.0).view(4, 3, 2) / 8
    data = FeatureSet(x, torch.arange(4))
    assert data.features.dtype == torch.float16
    assert data.shape == (3, 2)
    one, label = data[2]
    assert torch.equal(one, x[2])
    assert (one.dtype, int(label)) == (torch.float32, 2)
    assert torch.equal(data.inputs(np.array([[0, 3]])), x[[0, 3]][None])


def test_parts_and_orders():
    data = FeatureSet(torch.arange(4.0)[:, None], torch.arange(4))
    assert data.part(1, 3).labels.tolist() == [1, 2]
    assert data.ordered(np.array([3, 0])).inputs().flatten().tolist() == [3.0, 0.0]
