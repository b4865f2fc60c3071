"""Where a weight comes from, and whether it has the same numbers as the parameter behind it."""

import pytest
import torch

from dpps.learning import Origin, Weights


@pytest.fixture
def leaves():
    return {name: torch.ones(2, 3, requires_grad=True) for name in ("a", "b")}


def test_parameters_are_known_by_identity_and_not_by_value(leaves):
    weights = Weights(leaves)
    assert leaves["a"] in weights
    assert torch.ones(2, 3, requires_grad=True) not in weights
    assert weights.origin(leaves["b"]) == Origin(frozenset({"b"}), same_numbers=True)


def test_another_shape_of_one_parameter_has_its_numbers(leaves):
    weights = Weights(leaves)
    turned = leaves["a"].t()
    weights.add("t", turned, [leaves["a"]])
    assert weights.origin(turned) == Origin(frozenset({"a"}), same_numbers=True)


def test_what_is_computed_of_parameters_has_other_numbers_and_so_has_its_shape(leaves):
    weights = Weights(leaves)
    total, twice = leaves["a"] + leaves["b"], 2 * leaves["a"]
    weights.add("add", total, [leaves["a"], leaves["b"]])
    weights.add("mul", twice, [leaves["a"]])
    turned = total.t()
    weights.add("t", turned, [total])
    assert weights.origin(twice) == Origin(frozenset({"a"}), same_numbers=False)
    assert weights.origin(turned) == Origin(frozenset({"a", "b"}), same_numbers=False)


def test_what_needs_no_gradient_is_no_weight(leaves):
    weights = Weights(leaves)
    detached = leaves["a"].detach()
    weights.add("detach", detached, [leaves["a"]])
    assert detached not in weights
