"""ResNet-18: torchvision's parameters and the same values."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpps.models import (
    ResNet18,
)
from tests.support.models import Shapes, count, randomise, shapes


def resnet_shapes(classes: int, channels: int = 3) -> Shapes:
    expected: Shapes = {"conv1.weight": (64, channels, 7, 7), "bn1.weight": (64,), "bn1.bias": (64,)}
    before = 64
    for layer, width in enumerate((64, 128, 256, 512), start=1):
        for block in (0, 1):
            at, inputs = f"layer{layer}.{block}", before if block == 0 else width
            expected[f"{at}.conv1.weight"] = (width, inputs, 3, 3)
            expected[f"{at}.conv2.weight"] = (width, width, 3, 3)
            norms = [f"{at}.bn1", f"{at}.bn2"]
            if block == 0 and layer > 1:
                expected[f"{at}.downsample.0.weight"] = (width, inputs, 1, 1)
                norms.append(f"{at}.downsample.1")
            for norm in norms:
                expected[f"{norm}.weight"] = expected[f"{norm}.bias"] = (width,)
        before = width
    return expected | {"fc.weight": (classes, 512), "fc.bias": (classes,)}


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_resnet18_has_torchvisions_parameters(norm: str) -> None:
    model = ResNet18(norm=norm)
    assert shapes(model) == resnet_shapes(10)
    assert count(model) == 11_181_642


def test_resnet18_sizes() -> None:
    assert count(ResNet18(classes=1000)) == 11_689_512
    assert shapes(ResNet18(7, channels=1)) == resnet_shapes(7, channels=1)
    statistics = {n for n, _ in ResNet18().named_buffers()}
    assert len(statistics) == 20 * 3
    assert {"bn1.running_mean", "bn1.running_var", "layer4.0.downsample.1.num_batches_tracked"} <= statistics
    assert not list(ResNet18(norm="group").buffers())


def resnet_reference(t: dict[str, Tensor], x: Tensor) -> Tensor:
    """ResNet-18 in evaluation mode, from its state dict alone."""

    def norm(at: str, z: Tensor) -> Tensor:
        mean, var = t[f"{at}.running_mean"], t[f"{at}.running_var"]
        scale = t[f"{at}.weight"] / torch.sqrt(var + 1e-5)
        return (z - mean[:, None, None]) * scale[:, None, None] + t[f"{at}.bias"][:, None, None]

    x = functional.conv2d(x, t["conv1.weight"], stride=2, padding=3)
    x = functional.max_pool2d(norm("bn1", x).clamp(min=0), 3, 2, 1)
    for layer in (1, 2, 3, 4):
        for block in (0, 1):
            at, stride = f"layer{layer}.{block}", 2 if layer > 1 and block == 0 else 1
            h = functional.conv2d(x, t[f"{at}.conv1.weight"], stride=stride, padding=1)
            h = functional.conv2d(norm(f"{at}.bn1", h).clamp(min=0), t[f"{at}.conv2.weight"], padding=1)
            if stride == 2:
                x = norm(f"{at}.downsample.1", functional.conv2d(x, t[f"{at}.downsample.0.weight"], stride=2))
            x = (norm(f"{at}.bn2", h) + x).clamp(min=0)
    return functional.adaptive_avg_pool2d(x, 1).flatten(1) @ t["fc.weight"].T + t["fc.bias"]


def test_resnet18_computes_what_its_state_dict_says() -> None:
    model = ResNet18(3).double()
    randomise(model).eval()
    x = torch.rand(2, 3, 40, 40, dtype=torch.float64)
    torch.testing.assert_close(model(x), resnet_reference(model.state_dict(), x))


def test_group_norm_keeps_examples_apart_and_batch_norm_does_not() -> None:
    x = torch.rand(2, 3, 16, 16)
    other = torch.cat([x[:1], x[1:] * 2 - 1])
    for norm, apart in (("group", True), ("batch", False)):
        model = ResNet18(3, norm=norm).train()
        assert torch.allclose(model(x)[0], model(other)[0], atol=1e-5) == apart


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_every_layer_is_torchs_own(norm: str) -> None:
    """The record unit has rules for torch's functions; a convolution in pieces went past them at seven times the cost."""
    leaves = [m for m in ResNet18(norm=norm).modules() if next(m.children(), None) is None]
    expected = {nn.Conv2d, nn.BatchNorm2d if norm == "batch" else nn.GroupNorm, nn.Linear}
    assert {type(m) for m in leaves} == expected
