"""What the models compute: the paper's perceptrons, ResNet-18 and ViT as torchvision has them, and two small ones."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpps import models
from dpps.learning import Partition, is_chain
from dpps.models import MLP, MLPResidual, ResNet18, ViT
from tests.support.models import Shapes, count, randomise, shapes, small, tiny_vit

# Perceptrons


def test_mlp_has_the_papers_layers() -> None:
    expected = {
        "layer1.weight": (10, 784),
        "layer1.bias": (10,),
        "layer2.weight": (784, 10),
        "layer2.bias": (784,),
        "layer3.weight": (10, 784),
        "layer3.bias": (10,),
    }
    assert shapes(MLP()) == shapes(MLPResidual(1)) == shapes(MLPResidual(2)) == expected


def test_mlp_is_tanh_after_every_layer() -> None:
    model, x = small("mlp")
    p = dict(model.named_parameters())
    h = x.reshape(2, -1)
    for k in (1, 2, 3):
        h = torch.tanh(h @ p[f"layer{k}.weight"].T + p[f"layer{k}.bias"])
    torch.testing.assert_close(model(x), h)


@pytest.mark.parametrize("residual", [1, 2])
def test_residual_mlp_follows_the_reference(residual: int) -> None:
    model, images = small(f"residual-{residual}")
    p = dict(model.named_parameters())
    x = images.reshape(2, -1)

    def layer(k: int, z: Tensor) -> Tensor:
        return torch.tanh(z @ p[f"layer{k}.weight"].T + p[f"layer{k}.bias"])

    h = layer(1, x)
    expected = h + layer(3, layer(2, h)) if residual == 1 else layer(3, x + layer(2, h))
    torch.testing.assert_close(model(images), expected)


# ResNet-18


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
    assert shapes(ResNet18(norm=norm)) == resnet_shapes(10)


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


# Vision transformer


def vit_shapes() -> Shapes:
    expected: Shapes = {
        "class_token": (1, 1, 128),
        "conv_proj.weight": (128, 3, 4, 4),
        "conv_proj.bias": (128,),
    }
    expected["encoder.pos_embedding"] = (1, 65, 128)
    for k in range(4):
        at = f"encoder.layers.encoder_layer_{k}"
        for norm in ("ln_1", "ln_2"):
            expected[f"{at}.{norm}.weight"] = expected[f"{at}.{norm}.bias"] = (128,)
        expected[f"{at}.self_attention.in_proj_weight"] = (384, 128)
        expected[f"{at}.self_attention.in_proj_bias"] = (384,)
        expected[f"{at}.self_attention.out_proj.weight"] = (128, 128)
        expected[f"{at}.self_attention.out_proj.bias"] = (128,)
        expected[f"{at}.mlp.0.weight"], expected[f"{at}.mlp.0.bias"] = (1024, 128), (1024,)
        expected[f"{at}.mlp.3.weight"], expected[f"{at}.mlp.3.bias"] = (128, 1024), (128,)
    expected |= {"encoder.ln.weight": (128,), "encoder.ln.bias": (128,)}
    return expected | {"heads.head.weight": (10, 128), "heads.head.bias": (10,)}


def test_vit_has_torchvisions_parameters() -> None:
    assert shapes(ViT()) == vit_shapes()


def test_vit_equals_torchs_own_transformer_layers() -> None:
    model, x = small("vit")
    assert isinstance(model, ViT)
    p = dict(model.named_parameters())
    patches = functional.conv2d(x, p["conv_proj.weight"], p["conv_proj.bias"], stride=4).reshape(2, 8, 4).mT
    tokens = torch.cat([p["class_token"].expand(2, 1, 8), patches], dim=1) + p["encoder.pos_embedding"]
    theirs = {
        "ln_1": "norm1",
        "ln_2": "norm2",
        "self_attention": "self_attn",
        "mlp.0": "linear1",
        "mlp.3": "linear2",
    }
    for layer in model.encoder.layers:
        torchs = nn.TransformerEncoderLayer(
            8, 2, 16, 0.1, "gelu", layer_norm_eps=1e-6, batch_first=True, norm_first=True
        )
        state = layer.state_dict()
        for ours, name in theirs.items():
            state = {k.replace(f"{ours}.", f"{name}."): v for k, v in state.items()}
        torchs.load_state_dict(state)
        torchs.train(False)
        tokens = torchs(tokens)
    first = functional.layer_norm(tokens[:, 0], (8,), p["encoder.ln.weight"], p["encoder.ln.bias"], eps=1e-6)
    torch.testing.assert_close(model(x), first @ p["heads.head.weight"].T + p["heads.head.bias"])


def test_dropout_is_active_in_training_only() -> None:
    model, x = small("vit")
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))
    still = randomise(tiny_vit(dropout=0)).train()
    assert torch.equal(still(x), model.eval()(x))


def test_every_dropout_is_used_once() -> None:
    model, x = small("vit")
    used: list[nn.Module] = []
    dropouts = [m for m in model.modules() if isinstance(m, nn.Dropout)]
    for module in dropouts:
        module.register_forward_hook(lambda module, _inputs, _output: used.append(module))
    model(x)
    # after the embedding; after attention and both linear maps of each layer
    assert len(dropouts) == 1 + 2 * 3
    assert used == dropouts


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


# Small models


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
