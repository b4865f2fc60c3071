"""ResNet-18: torchvision's parameters, the same values, and convolutions of few pixels."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional

from dpps.models import (
    Conv,
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


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.sampled_from([1, 3, 7]), st.integers(1, 2))
def test_convolution_of_small_images(rows: int, columns: int, kernel: int, stride: int) -> None:
    conv, plain = (
        kind(3, 4, kernel, stride, padding=kernel // 2, bias=False).double() for kind in (Conv, nn.Conv2d)
    )
    x = torch.rand(2, 3, rows, columns, dtype=torch.float64)
    direction = torch.rand_like(plain(x))

    def gradients(module: nn.Module) -> Any:
        return grad(
            lambda w, x: (functional_call(module, {"weight": w}, x) * direction).sum(), argnums=(0, 1)
        )(plain.weight, x)

    torch.testing.assert_close(functional_call(conv, {"weight": plain.weight}, x), plain(x))
    torch.testing.assert_close(gradients(conv), gradients(plain))
