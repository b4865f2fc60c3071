"""The models: names, shapes, stages, vectorisation and weight files."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional

from dpps.errors import UsageError
from dpps.models import (
    MLP,
    SHARED,
    MLPResidual,
    ResNet18,
    Staged,
    ViT,
    build,
    call_stages,
    load_weights,
    run_stages,
    shared_prefixes,
    stage_parameters,
)
from dpps.models.resnet import Conv

Shapes = dict[str, tuple[int, ...]]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These models are too small to gain from threads, which only get in each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def shapes(model: nn.Module) -> Shapes:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def count(model: nn.Module, prefixes: tuple[str, ...] = ()) -> int:
    named = model.named_parameters()
    return sum(
        p.numel() for n, p in named if not prefixes or any(f"{n}.".startswith(f"{k}.") for k in prefixes)
    )


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random values everywhere, so that no zero hides a missing term; vectors are positive (variances)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]:
            value = torch.rand(tensor.shape, generator=generator)
            matrix = tensor.dim() > 1
            tensor.copy_((value - 0.5) * 4 * tensor[0].numel() ** -0.5 if matrix else value + 0.1)
    return model


def tiny_vit(dropout: float = 0.1) -> ViT:
    return ViT(image=8, patch=4, layers=2, heads=2, width=8, mlp=16, dropout=dropout, classes=3)


def sequential() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3))


# A model and the shape of one example. Evaluation mode: dropout has its own test.
SMALL: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: MLP((12, 5, 12, 3)), (3, 2, 2)),
    "residual-1": (lambda: MLPResidual(1, 12, 3), (3, 2, 2)),
    "residual-2": (lambda: MLPResidual(2, 12, 3), (3, 2, 2)),
    "vit": (tiny_vit, (3, 8, 8)),
    "sequential": (sequential, (3, 2, 2)),
    "resnet-batch": (lambda: ResNet18(3), (3, 16, 16)),
    "resnet-group": (lambda: ResNet18(3, norm="group"), (3, 16, 16)),
}


def small(kind: str, batch: int = 2) -> tuple[nn.Module, Tensor]:
    make, shape = SMALL[kind]
    generator = torch.Generator().manual_seed(1)
    return randomise(make()).eval(), torch.rand((batch, *shape), generator=generator)


def stages_of(model: nn.Module) -> list[set[str]]:
    stages = stage_parameters(model)
    assert stages is not None
    return stages


# Parameters: names, shapes, counts


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
    assert count(MLP(), shared_prefixes("mlp", "1")) == 7850


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


def test_vit_has_torchvisions_parameters() -> None:
    assert shapes(ViT()) == vit_shapes()


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


# Values: against the formula, or against another implementation


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
    assert (
        len(dropouts) == 1 + 2 * 3
    )  # after the embedding; after attention and both linear maps of each layer
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


@pytest.mark.parametrize("name", ["mlp", "mlp-residual", "vit"])
def test_torchs_seed_decides_the_start(name: str) -> None:
    def start(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(build(name, "1", (1, 8, 8), 3)[0].parameters())

    assert torch.equal(start(1), start(1))
    assert not torch.equal(start(1), start(2))


# Stages


@pytest.mark.parametrize("kind", SMALL)
def test_stages_split_parameters_and_forward_pass(kind: str) -> None:
    model, x = small(kind)
    stages = stages_of(model)
    names = [name for stage in stages for name in stage]
    assert sorted(names) == sorted(n for n, _ in model.named_parameters())
    whole, before = model(x), x.clone()
    for cut in range(len(stages) + 1):
        assert torch.equal(run_stages(model, run_stages(model, x, 0, cut), cut), whole)
    assert torch.equal(x, before)


@pytest.mark.parametrize("kind", SMALL)
def test_a_stage_depends_on_its_own_parameters_only(kind: str) -> None:
    model, x = small(kind)
    for k, stage in enumerate(stages_of(model)):
        moved = {n: p.detach() + 0.5 * (n not in stage) for n, p in model.named_parameters()}
        handed = run_stages(model, x, 0, k)
        for ours, expected in zip(
            flat(call_stages(model, moved, handed, k, k + 1)),
            flat(run_stages(model, handed, k, k + 1)),
            strict=True,
        ):
            assert torch.equal(ours, expected)


def flat(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 6), min_size=2, max_size=5), st.data())
def test_mlp_of_any_size_is_a_chain(sizes: list[int], data: st.DataObject) -> None:
    model = MLP(sizes)
    cut = data.draw(st.integers(0, len(sizes) - 1))
    x = torch.rand(2, sizes[0])
    assert model(x).shape == (2, sizes[-1])
    assert torch.equal(model.run(model.run(x, 0, cut), cut), model(x))


@pytest.mark.parametrize(("name", "shared"), [(n, s) for n in SHARED for s in SHARED[n]])
def test_named_shared_parts_are_prefixes_of_the_stages(name: str, shared: str) -> None:
    model, prefixes = build(name, shared, (3, 32, 32), 10)
    stages = stages_of(model)
    owned = {n for n, _ in model.named_parameters() if any(f"{n}.".startswith(f"{k}.") for k in prefixes)}
    assert owned in [set().union(*stages[: k + 1]) for k in range(len(stages))]


def test_models_without_separate_stages_are_recognised() -> None:
    class Own(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            total: Tensor = self[0](x) + self[1](x)
            return total

    shared = nn.Linear(3, 3)
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    for model in (
        nn.Linear(3, 3),
        nn.Sequential(shared, nn.Tanh(), shared),
        tied,
        Own(shared, nn.Linear(3, 3)),
    ):
        assert stage_parameters(model) is None
    assert stage_parameters(nn.Sequential()) == []
    with pytest.raises(TypeError, match="Linear has no stages"):
        run_stages(nn.Linear(3, 3), torch.rand(1, 3))
    with pytest.raises(TypeError, match="Own has no stages"):
        run_stages(Own(shared, nn.Linear(3, 3)), torch.rand(1, 3))


def test_stage_names_that_miss_a_parameter_are_refused() -> None:
    class Forgetful(Staged):
        stage_names = (("a",),)

        def __init__(self) -> None:
            super().__init__()
            self.a, self.ab = nn.Linear(2, 2), nn.Linear(2, 2)

        def stage(self, k: int, x: Any) -> Any:
            return self.ab(self.a(x))

    with pytest.raises(UsageError, match=r"Forgetful .* wrong for ab.weight, ab.bias"):
        stage_parameters(Forgetful())


# Vectorisation


def stacked(model: nn.Module, nodes: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        n: p.detach()
        + 0.1 * p.detach().std(correction=0) * torch.randn((nodes, *p.shape), generator=generator)
        for n, p in model.named_parameters()
    }


@pytest.mark.parametrize("kind", SMALL)
def test_vmap_over_nodes_equals_a_loop(kind: str) -> None:
    model, x = small(kind, batch=6)
    model.double()
    parameters, batches = stacked(model, 3), x.double().reshape(3, 2, *x.shape[1:])
    labels = torch.tensor([[0, 1], [2, 0], [1, 1]])

    def in_halves(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(call_stages(model, p, call_stages(model, p, x, 0, 1), 1), y)

    def whole(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(model, p, (x,)), y)

    vectorised = torch.vmap(grad(in_halves))(parameters, batches, labels)
    for node in range(3):
        expected = grad(whole)({n: p[node] for n, p in parameters.items()}, batches[node], labels[node])
        for name, gradient in expected.items():
            torch.testing.assert_close(vectorised[name][node], gradient)
            assert gradient.abs().max() > 0, name


def test_vmap_with_dropout_differs_between_nodes() -> None:
    model, x = small("vit")
    model.train()
    same = {n: p.detach().expand(2, *p.shape) for n, p in model.named_parameters()}
    out = torch.vmap(lambda p: call_stages(model, p, x), randomness="different")(same)
    assert not torch.equal(out[0], out[1])


def test_call_stages_leaves_the_model_and_uses_buffers() -> None:
    model, x = small("resnet-batch")
    expected, before = model(x), {n: t.clone() for n, t in model.state_dict().items()}
    shifted = call_stages(model, {"bn1.running_mean": before["bn1.running_mean"] + 1}, x)
    assert not torch.allclose(shifted, expected)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


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
        (lambda: build("resnet", "1", (3, 32, 32), 10), r"unknown model 'resnet': .*did you mean 'resnet18'"),
        (
            lambda: build("mlp", "3", (4,), 10),
            r"unknown shared part of mlp '3': choose one of 1, 2, all, layer1",
        ),
        (lambda: build("mlp", "", (4,), 10), r"unknown shared part of mlp ''"),
        (lambda: build("mlp", "layer1,", (4,), 10), r"unknown shared part of mlp ''"),
        (lambda: build("resnet18", "conv1,bn", (3, 8, 8), 10), r"'bn': .*did you mean 'bn1'"),
        (lambda: build("mlp", "1", (4,), 0), r"0 classes: a model needs at least 1"),
        (lambda: build("mlp", "1", (), 10), r"shape \(\) are empty"),
        (lambda: build("mlp", "1", (3, 0), 10), r"shape \(3, 0\) are empty"),
        (
            lambda: build("resnet18", "1", (30,), 10),
            r"resnet18 needs images of shape .* not \(30,\): use mlp",
        ),
        (lambda: build("vit", "1", (28, 28), 10), r"vit needs images of shape"),
        (lambda: build("vit", "1", (3, 30, 30), 10), r"multiple of 4, not 30x30"),
        (lambda: build("vit", "1", (3, 32, 28), 10), r"square images .* not 32x28"),
        (
            lambda: build("resnet18", "1", (3, 32, 32), 10, norm="layer"),
            r"unknown norm 'layer': choose one of batch",
        ),
        (lambda: ViT(image=30), r"patch 4 does not divide the image size 30"),
        (lambda: ViT(heads=3), r"heads 3 does not divide the width 128"),
        (lambda: MLP((4,)), r"at least two sizes"),
        (lambda: MLP((4, 0)), r"each at least 1"),
        (lambda: MLPResidual(3), r"residual 3: choose 1 .* or 2"),
    ],
)
def test_bad_requests_name_value_and_remedy(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


# Weight files


def save(state: dict[str, Tensor], file: Path) -> Path:
    if file.suffix == ".safetensors":
        save_file(state, file)
    else:
        torch.save(state, file)
    return file


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("kind", ["mlp", "vit", "resnet-batch"])
def test_weights_round_trip(kind: str, suffix: str, tmp_path: Path) -> None:
    source, x = small(kind)
    target = SMALL[kind][0]().eval()
    assert not torch.equal(target(x), source(x))
    assert load_weights(target, save(source.state_dict(), tmp_path / f"w{suffix}")) == []
    assert torch.equal(target(x), source(x))
    assert all(p.requires_grad for p in target.parameters())


def test_another_head_is_left_fresh_and_reported(tmp_path: Path) -> None:
    source = randomise(ResNet18(classes=5))
    file = save(source.state_dict(), tmp_path / "imagenet.pth")
    target = ResNet18(classes=3)
    head = target.fc.weight.clone()
    assert load_weights(target, str(file)) == ["fc.weight", "fc.bias"]
    assert torch.equal(target.fc.weight, head)
    assert all(
        torch.equal(t, source.state_dict()[n]) for n, t in target.state_dict().items() if "fc" not in n
    )


def test_a_head_is_never_loaded_by_half(tmp_path: Path) -> None:
    state = tiny_vit().state_dict()
    state["heads.head.weight"], state["heads.head.bias"] = torch.ones(3, 9), torch.ones(3)
    target = tiny_vit()
    assert load_weights(target, save(state, tmp_path / "w.pt")) == ["heads.head.weight", "heads.head.bias"]
    assert torch.all(target.get_parameter("heads.head.bias") == 0)


def test_only_the_batch_counter_may_be_missing(tmp_path: Path) -> None:
    state = {n: t for n, t in ResNet18().state_dict().items() if not n.endswith("num_batches_tracked")}
    file = save(state, tmp_path / "old.pth")
    assert len(state) == 102
    assert load_weights(ResNet18(), file) == []
    del state["bn1.running_mean"]
    with pytest.raises(UsageError, match=r"bn1.running_mean 64 is missing from the file: give a file"):
        load_weights(ResNet18(), save(state, file))


def test_misfits_are_listed_and_nothing_is_copied(tmp_path: Path) -> None:
    state = {n: t + 1 for n, t in MLP((4, 3, 2)).state_dict().items()}
    state["layer2.weight"] = torch.zeros(2, 5)
    state["extra"] = torch.tensor(1.0)
    del state["layer1.bias"]
    model = MLP((4, 3, 2))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(UsageError) as caught:
        load_weights(model, save(state, tmp_path / "w.pt"))
    assert "does not fit MLP" in str(caught.value)
    assert "layer1.bias 3 is missing from the file" in str(caught.value)
    assert "extra scalar is not in the model" in str(caught.value)
    assert "layer2.weight is 2x5 in the file and 2x3 in the model" in str(caught.value)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_a_long_list_of_misfits_is_cut(tmp_path: Path) -> None:
    file = save(tiny_vit().state_dict(), tmp_path / "vit.pt")
    with pytest.raises(UsageError) as caught:
        load_weights(MLP((4, 3, 2)), file)
    message = str(caught.value)
    misfits = 4 + len(tiny_vit().state_dict())
    assert message.count("is missing from the file") + message.count("is not in the model") == 8
    assert f"and {misfits - 8} more" in message
    assert "\n" not in message


class NotTensors:
    """Something a weights-only reader must not construct."""


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("text.pt", b"hello", "no readable torch file"),
        ("empty.pt", b"", "no readable torch file"),
        ("zip.pt", b"PK\x03\x04junk", "no readable torch file"),
        ("text.safetensors", b"hellohellohello", "no readable safetensors file"),
        ("empty.safetensors", b"", "no readable safetensors file"),
        ("list.pt", [1, 2], "holds no state dict"),
        ("nested.pt", {"state_dict": {"layer1.bias": torch.zeros(1)}}, "holds no state dict"),
        ("none.pt", {}, "holds no state dict"),
        ("numbers.pt", {1: torch.zeros(1)}, "holds no state dict"),
        ("object.pt", NotTensors(), "no readable torch file of tensors"),
    ],
)
def test_files_that_are_no_state_dict(name: str, content: object, message: str, tmp_path: Path) -> None:
    file = tmp_path / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(UsageError, match=message) as caught:
        load_weights(MLP((4, 3, 2)), file)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file = save(MLP((4, 3, 2)).state_dict(), tmp_path / "w.pt")
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(UsageError, match="no readable torch file"):
        load_weights(MLP((4, 3, 2)), file)


def test_a_missing_file_or_a_directory_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.pt", tmp_path):
        with pytest.raises(UsageError, match="does not exist"):
            load_weights(MLP((4, 3, 2)), path)


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
