"""Shared and local parameters as two flat vectors, and back."""

import pytest
import torch
from torch import nn

from dpps.errors import UsageError
from dpps.learning import Partition


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model[2].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize("shared", [["0"], ["0.weight"], "all", [], lambda name: name.endswith("weight")])
def test_vectors_hold_the_model_and_give_it_back(shared) -> None:
    model = _model()
    partition = Partition(model, shared)
    s, l = partition.initial()
    assert (len(s), len(l)) == (partition.shared_size, partition.local_size)
    assert len(s) + len(l) == 3 * 4 + 4 + 4 * 2  # the frozen bias stays with the node
    named = partition.views(s, l)
    assert all(torch.equal(named[name], p) for name, p in model.named_parameters() if p.requires_grad)


def test_names_that_there_are_not_are_refused_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match=r"'1'.*0\.weight, 0\.bias, 2\.weight"):
        Partition(_model(), ["1"])
    with pytest.raises(UsageError, match="Tanh"):
        Partition(nn.Tanh(), "all")


def test_parameters_without_a_shape_or_of_complex_numbers_are_refused() -> None:
    with pytest.raises(UsageError, match=r"0\.weight.*shape"):
        Partition(nn.Sequential(nn.LazyLinear(3)), "all")
    model = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(UsageError, match=r"weight.*complex64.*torch\.complex"):
        Partition(model, "all")


def test_pairs_of_numbers_can_be_read_as_complex_ones_wherever_they_lie() -> None:
    model = nn.ParameterList([torch.randn(3), torch.randn(4, 2)])
    partition = Partition(model, "all")
    rows = partition.initial()[0].repeat(2, 1)
    for row in rows:
        assert torch.equal(torch.view_as_complex(partition.views(row, None)["1"]).real, model[1][:, 0])
