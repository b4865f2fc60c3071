"""Softmax regression and the small CNN."""

import pytest
import torch

from dpps import models
from dpps.errors import UsageError
from dpps.learning import Partition, is_chain


def test_linear_starts_at_zero_and_takes_the_quick_path() -> None:
    model, prefixes = models.build("linear", "all", (81, 7, 7), 10)
    assert prefixes == ("layer1",)
    assert sum(p.numel() for p in model.parameters()) == 3969 * 10 + 10
    assert not model(torch.rand(3, 81, 7, 7)).any()
    assert is_chain(Partition(model, prefixes), 4)


def test_cnn_has_about_26_000_parameters() -> None:
    model, prefixes = models.build("cnn", "all", (1, 28, 28), 10)
    assert sum(p.numel() for p in model.parameters()) == 26_010
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == set(prefixes)
    assert model(torch.rand(2, 1, 28, 28)).shape == (2, 10)


@pytest.mark.parametrize(("height", "width"), [(14, 14), (15, 33), (32, 32)])
def test_cnn_fits_images_of_many_sizes(height: int, width: int) -> None:
    model, _ = models.build("cnn", "2", (3, height, width), 4)
    assert model(torch.rand(2, 3, height, width)).shape == (2, 4)


def test_cnn_refuses_what_is_too_small() -> None:
    with pytest.raises(UsageError, match=r"14 x 14.*13 x 28"):
        models.build("cnn", "all", (1, 13, 28), 10)
    with pytest.raises(UsageError, match=r"cnn .*\(30,\)"):
        models.build("cnn", "all", (30,), 10)
