"""Chains of linear layers: the gradients of autograd, and what is no chain."""

from itertools import pairwise
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import nn

import dpps
from dpps.learning import Chained, Chains, Loop, OneByOne, Partition, is_chain


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
        with mock.patch("dpps.learning.gradients.chain._BLOCK", data.draw(st.integers(1, 100))):
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


NODES, BATCH = 3, 5


def inputs(partition):
    torch.manual_seed(1)
    s, l = partition.initial()
    rows = (part + 0.5 * torch.randn(NODES, len(part)) for part in (s, l))
    mask = torch.tensor([[True] * BATCH, [True, False] * 2 + [True], [False] * BATCH])
    return *rows, torch.randn(NODES, BATCH, 6), torch.randint(0, 3, (NODES, BATCH)), mask


@pytest.mark.parametrize("shared", ["all", ["layer1"], []])
@pytest.mark.parametrize("clip", [0.1, 1e6])
def test_the_same_as_one_example_after_the_other(shared, clip):
    partition = Partition(dpps.models.MLP((6, 4, 5, 3)), shared)
    given = inputs(partition)
    found, expected = (kind(partition, F.cross_entropy, clip).sums(*given) for kind in (Chains, OneByOne))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.clipped, expected.clipped)
    assert not found[1][2].any()  # a node without examples adds nothing
    assert not found[2][2].any()
