"""Chains of linear layers: norms from what goes in and comes back, for all nodes at once."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpps
from dpps.learning import Chains, OneByOne, Partition

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


def test_an_example_that_is_not_finite_counts_as_zero():
    partition = Partition(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), "all")
    y, l, x, target, mask = inputs(partition)
    way = Chains(partition, F.cross_entropy, 0.1)
    without = mask.clone()
    without[0, 2] = False
    expected = [part.clone() for part in way.sums(y, l, x, target, without)[1:]]
    x[0, 2] = float("nan")
    for a, b in zip(way.sums(y, l, x, target, mask)[1:], expected, strict=True):
        torch.testing.assert_close(a, b)
