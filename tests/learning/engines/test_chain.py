"""Chains of linear layers: the gradients of autograd, and what is no chain."""

from itertools import pairwise
from unittest import mock

import hypothesis.strategies as st
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import nn

import dpps
from dpps.learning import Chained, Loop, Partition, is_chain


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_chains_of_any_form_get_the_gradients_of_autograd(data):
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    widths = data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=5))
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in pairwise(widths):
        activation = data.draw(st.sampled_from([nn.Tanh, nn.ReLU, nn.Identity, None]))
        layers += [nn.Linear(a, b, bias=data.draw(st.booleans()))] + ([activation()] if activation else [])
    model = nn.Sequential(*layers).double()
    names = [name for name, _ in model.named_parameters()]
    chosen = set(data.draw(st.lists(st.sampled_from(names), unique=True)))
    partition, n, batch = Partition(model, lambda name: name in chosen), data.draw(st.integers(1, 7)), 3
    assert is_chain(partition, 3)
    s, l = (part.double() for part in partition.initial())
    y, local = s + torch.randn(n, len(s)), l + torch.randn(n, len(l))
    x = torch.randn(n, batch, 1, widths[0]).double()
    loss, target = F.mse_loss, torch.randn(n, batch, widths[-1]).double()
    if data.draw(st.booleans()):
        loss, target = F.cross_entropy, torch.randint(0, widths[-1], (n, batch))
    chained, plain = (kind(partition, loss, range(n)) for kind in (Chained, Loop))
    for _ in range(3):  # memory is used again
        with mock.patch("dpps.learning.engines.chain._BLOCK", data.draw(st.integers(1, 100))):
            ours = chained.step(y, local, x, target, lambda g, rows: local[rows] - 0.01 * g, 0)  # noqa: B023
        theirs = plain.step(y, local, x, target, lambda g, rows: local[rows] - 0.01 * g, 0)  # noqa: B023
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8, check_dtype=False)
        y, local = y - 0.01 * ours[2], ours[1]


def test_what_is_no_chain():
    linear = nn.Linear(6, 3)
    assert is_chain(Partition(nn.Sequential(linear), ["0"]), 2)
    assert not is_chain(Partition(nn.Sequential(linear), ["0"]), 3)  # acts on the last axis of an image
    assert not is_chain(Partition(nn.Sequential(linear, nn.Softmax(1)), ["0"]), 2)
    assert not is_chain(Partition(nn.Sequential(nn.Tanh(), linear), ["1"]), 2)
    assert not is_chain(Partition(nn.Sequential(linear, nn.Tanh(), nn.Tanh()), ["0"]), 2)
    assert not is_chain(Partition(dpps.models.MLPResidual(1, 6, 3), ["layer1"]), 2)
    frozen = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    frozen[0].weight.requires_grad_(False)
    assert not is_chain(Partition(frozen, ["1"]), 2)
    heard = nn.Sequential(nn.Linear(6, 3))
    heard[0].register_forward_hook(lambda *_: None)
    assert not is_chain(Partition(heard, ["0"]), 2)
    patched = nn.Sequential(nn.Linear(6, 3))
    patched[0].forward = lambda x: x[:, :3]
    assert not is_chain(Partition(patched, ["0"]), 2)


def test_a_chain_shows_its_activations_as_they_are():
    torch.manual_seed(0)
    model = dpps.models.MLP((6, 4, 9, 3))
    partition = Partition(model, ["layer1"])
    chained, (s, l) = Chained(partition, F.cross_entropy, range(2)), partition.initial()
    x = torch.randn(2, 7, 6)
    chain = chained.chain
    chain.forward(chain.layers(s.repeat(2, 1), l.repeat(2, 1)), x)
    seen = chain.unfolded()
    assert [tuple(v.shape) for v in seen] == [(2, 7, 6), (2, 7, 4), (2, 7, 9), (2, 7, 3)]
    # something was folded
    assert any(torch.is_nonzero((a != b).any()) for a, b in zip(seen, chain.inputs, strict=True))
    h = x
    for layer, v in zip((model.layer1, model.layer2, model.layer3), seen[1:], strict=True):
        h = torch.tanh(layer(h))
        torch.testing.assert_close(v, h.detach(), rtol=1e-5, atol=1e-6)
