"""The vision transformer: torchvision's parameters, the values of torch's own layers, and dropout."""

import torch
from torch import nn
from torch.nn import functional

from dpps.models import (
    ViT,
)
from tests.support.models import Shapes, randomise, shapes, small, tiny_vit


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
