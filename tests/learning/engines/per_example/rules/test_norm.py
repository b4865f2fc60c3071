"""Scales and shifts of normalisations within an example."""

import pytest
import torch

from dpps.learning import GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from tests.support.rules import check_rule, make_call, randn

SCALE, BOTH = {("weight", -1)}, {("weight", -1), ("bias", -1)}


@pytest.mark.parametrize(
    ("shape", "normalised", "dim"), [((3, 4), [4], 0), ((3, 5, 2, 4), [2, 4], 0), ((5, 3, 4), [4], 1)]
)
def test_layer_norm(shape, normalised, dim):
    arguments = [randn(*shape), normalised, randn(*normalised), randn(*normalised), 1e-5]
    check_rule(LayerNorm(), torch.layer_norm, arguments, BOTH, {"input": dim}, (dim,))


def test_rms_norm():
    check_rule(RMSNorm(), torch.rms_norm, [randn(3, 5, 4), [4], randn(4), 1e-5], SCALE, {"input": 0})


@pytest.mark.parametrize("behind", [(5, 2), ()])
def test_group_norm(behind):
    check_rule(
        GroupNorm(), torch.group_norm, [randn(3, 6, *behind), 3, randn(6), randn(6)], BOTH, {"input": 0}
    )


def instance_norm(mean=None, use_input=True):
    deviation = None if mean is None else torch.ones_like(mean)
    return [randn(3, 4, 5), randn(4), randn(4), mean, deviation, use_input, 0.1, 1e-5, False]


def test_instance_norm():
    check_rule(InstanceNorm(), torch.instance_norm, instance_norm(), BOTH, {"input": 0})


@pytest.mark.parametrize("arguments", [instance_norm(randn(4)), instance_norm(randn(4), use_input=False)])
def test_running_statistics_are_not_within_an_example(arguments):
    assert not InstanceNorm().suits(
        make_call(InstanceNorm(), torch.instance_norm, arguments, BOTH, {"input": 0})
    )


def test_layer_norm_over_the_examples_is_no_normalisation_within_one():
    call = make_call(
        LayerNorm(), torch.layer_norm, [randn(5, 3), [3], randn(3), randn(3)], BOTH, {"input": 1}, (1,)
    )
    assert not LayerNorm().suits(call)
