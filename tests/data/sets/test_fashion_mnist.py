"""Fashion-MNIST: the files of MNIST, read as three channels."""

import numpy as np
import torch

from dpps.data import DATA_SETS, IDX, Images


def test_it_has_the_files_of_mnist_with_hashes_of_its_own() -> None:
    recipe, mnist = DATA_SETS["fashion-mnist"], DATA_SETS["mnist"]
    assert recipe.layouts == (IDX,)
    assert [source.file for source in recipe.sources] == [source.file for source in mnist.sources]
    assert not {source.hash for source in recipe.sources} & {source.hash for source in mnist.sources}


def test_grey_images_have_three_channels_from_0_to_1() -> None:
    recipe = DATA_SETS["fashion-mnist"]
    pixels = torch.from_numpy(np.array([[[[0, 255], [51, 102]]]], np.uint8))
    images = Images(pixels, torch.tensor([3]), recipe.mean, recipe.deviation)
    assert images.shape == (3, 2, 2)
    torch.testing.assert_close(images.inputs()[0], torch.tensor([[0.0, 1.0], [0.2, 0.4]]).expand(3, 2, 2))
