"""The paper's MLP and its residual form."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from dpps.models import (
    MLP,
    MLPResidual,
    shared_prefixes,
)
from tests.support.models import count, shapes, small


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


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 6), min_size=2, max_size=5), st.data())
def test_mlp_of_any_size_is_a_chain(sizes: list[int], data: st.DataObject) -> None:
    model = MLP(sizes)
    cut = data.draw(st.integers(0, len(sizes) - 1))
    x = torch.rand(2, sizes[0])
    assert model(x).shape == (2, sizes[-1])
    assert torch.equal(model.run(model.run(x, 0, cut), cut), model(x))
