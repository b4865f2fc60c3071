"""Other tensors in a model's places: as torch's own functional call, and everything is back afterwards."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

from dpps.learning import swapped


def tied():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.BatchNorm1d(2), nn.Linear(3, 5, bias=False))
    model[3].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (tied, torch.tensor([[1, 2], [0, 4]])),
        (lambda: nn.Sequential(*[nn.Linear(4, 4)] * 2), torch.rand(3, 4)),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)), torch.rand(3, 4)),
        (lambda: nn.LSTM(4, 3), torch.rand(3, 2, 4)),
    ],
    ids=["tied, with buffers", "one module twice", "weight norm", "LSTM"],
)
def test_it_is_a_functional_call(make, x):
    torch.manual_seed(0)
    model = make()
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    others = {n: torch.rand_like(t) if t.is_floating_point() else t.clone() for n, t in own.items()}
    expected = functional_call(copy.deepcopy(model), {n: t.clone() for n, t in others.items()}, (x,))
    with swapped(model, others):
        found = model(x)
    first = [part[0] if isinstance(part, tuple) else part for part in (found, expected)]
    torch.testing.assert_close(*first)
    after = dict(model.named_parameters()) | dict(model.named_buffers())
    assert all(after[name] is tensor for name, tensor in own.items())


def test_a_model_has_its_own_again_when_it_fails():
    model = nn.Linear(2, 2)
    own = model.weight
    with pytest.raises(RuntimeError), swapped(model, {"weight": torch.rand(2, 3)}):
        model(torch.rand(1, 2))
    assert model.weight is own
