"""Models by name: what is built, which part is shared, how parameters start, and bad requests."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpps.errors import UsageError
from dpps.models import (
    MLP,
    MLPResidual,
    ResNet18,
    ViT,
    build,
    shared_prefixes,
)
from tests.support.models import (
    count,
    shapes,
)


@pytest.mark.parametrize(
    ("name", "shared", "size"),
    [
        ("mlp", "1", 7850),
        ("mlp", "2", 7850 + 8624),
        ("mlp-residual", "all", 24_324),
        ("resnet18", "1", 157_504),
        ("resnet18", "2", 157_504 + 525_568),
        ("resnet18", "all", 11_181_642),
        ("resnet18", "conv1,bn1", 9_536),
        ("vit", "1", 128 + 128 * 48 + 128),
        ("vit", "2", 1_335_690 - 1290),
        ("vit", "all", 1_335_690),
    ],
)
def test_shared_part_has_the_papers_size(name: str, shared: str, size: int) -> None:
    model, prefixes = build(name, shared, (1, 28, 28) if name.startswith("mlp") else (3, 32, 32), 10)
    assert count(model, prefixes) == size


def test_initialisation_follows_torchvision() -> None:
    torch.manual_seed(0)
    resnet, vit = ResNet18(), ViT()
    conv = resnet.get_parameter("layer4.0.conv1.weight")  # fan-in 256 * 9, fan-out 512 * 9
    assert conv.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)
    assert torch.all(resnet.get_parameter("layer4.1.bn2.weight") == 1)
    assert torch.all(resnet.get_parameter("layer4.1.bn2.bias") == 0)
    for name in ("heads.head.weight", "heads.head.bias", "class_token", "conv_proj.bias"):
        assert torch.all(vit.get_parameter(name) == 0), name
    at = "encoder.layers.encoder_layer_0"
    assert torch.all(vit.get_parameter(f"{at}.self_attention.in_proj_bias") == 0)
    assert torch.all(vit.get_parameter(f"{at}.self_attention.out_proj.bias") == 0)
    deviations = {
        "encoder.pos_embedding": 0.02,
        "conv_proj.weight": 48**-0.5,
        f"{at}.mlp.0.weight": (2 / (128 + 1024)) ** 0.5,
        f"{at}.mlp.0.bias": 1e-6,
        f"{at}.self_attention.in_proj_weight": (2 / (128 + 384)) ** 0.5,
        f"{at}.self_attention.out_proj.weight": (1 / (3 * 128)) ** 0.5,
    }
    for name, deviation in deviations.items():
        assert vit.get_parameter(name).std().item() == pytest.approx(deviation, rel=0.1), name


@pytest.mark.parametrize("name", ["mlp", "mlp-residual", "vit"])
def test_torchs_seed_decides_the_start(name: str) -> None:
    def start(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(build(name, "1", (1, 8, 8), 3)[0].parameters())

    assert torch.equal(start(1), start(1))
    assert not torch.equal(start(1), start(2))


# Models by name


def test_build_fits_the_data() -> None:
    assert shapes(build("mlp", "1", (3, 32, 32), 7)[0]) == shapes(MLP((3072, 10, 3072, 7)))
    assert shapes(build("mlp", "1", (30,), 2)[0]) == shapes(MLP((30, 10, 30, 2)))
    assert build("resnet18", "1", (1, 28, 28), 10)[0](torch.rand(2, 1, 28, 28)).shape == (2, 10)
    assert build("vit", "1", (1, 28, 28), 10)[0](torch.rand(2, 1, 28, 28)).shape == (2, 10)
    assert build("mlp-residual", "1", (3, 4, 4), 5)[0](torch.rand(2, 3, 4, 4)).shape == (2, 5)
    assert not list(build("resnet18", "1", (3, 32, 32), 10, norm="group")[0].buffers())


@pytest.mark.parametrize(
    ("shared", "residual"),
    [("1", 1), ("2", 2), ("all", 2), ("layer1", 1), ("layer1.weight", 1), ("layer1,layer2", 2)],
)
def test_residual_connection_follows_the_shared_part(shared: str, residual: int) -> None:
    model, _ = build("mlp-residual", shared, (4,), 2)
    assert isinstance(model, MLPResidual)
    assert model.residual == residual


def test_shared_accepts_prefixes() -> None:
    assert shared_prefixes("resnet18", "conv1, bn1") == ("conv1", "bn1")
    assert shared_prefixes("resnet18", "layer1.0.conv1") == ("layer1.0.conv1",)
    assert shared_prefixes("vit", "encoder.pos_embedding") == ("encoder.pos_embedding",)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build("resnet", "1", (3, 32, 32), 10), r"model 'resnet': .*'resnet18'"),
        (
            lambda: build("mlp", "3", (4,), 10),
            r"mlp '3': .*1, 2, all, layer1",
        ),
        (lambda: build("mlp", "", (4,), 10), r"mlp ''"),
        (lambda: build("mlp", "layer1,", (4,), 10), r"mlp ''"),
        (lambda: build("resnet18", "conv1,bn", (3, 8, 8), 10), r"'bn': .*'bn1'"),
        (lambda: build("mlp", "1", (4,), 0), r"0 classes: .*1"),
        (lambda: build("mlp", "1", (), 10), r"shape \(\)"),
        (lambda: build("mlp", "1", (3, 0), 10), r"shape \(3, 0\)"),
        (
            lambda: build("resnet18", "1", (30,), 10),
            r"resnet18 .*\(30,\): .*mlp",
        ),
        (lambda: build("vit", "1", (28, 28), 10), r"vit .*\(28, 28\)"),
        (lambda: build("vit", "1", (3, 30, 30), 10), r"vit .* 4.*30x30"),
        (lambda: build("vit", "1", (3, 32, 28), 10), r"vit .*32x28"),
        (
            lambda: build("resnet18", "1", (3, 32, 32), 10, norm="layer"),
            r"norm 'layer': .*batch",
        ),
        (lambda: ViT(image=30), r"patch 4 .* 30"),
        (lambda: ViT(heads=3), r"heads 3 .* 128"),
        (lambda: MLP((4,)), r"\(4,\).*two sizes"),
        (lambda: MLP((4, 0)), r"\(4, 0\).* 1"),
        (lambda: MLPResidual(3), r"residual 3: .*1 .*2"),
    ],
)
def test_bad_requests_name_value_and_remedy(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
