"""Rules are found by the names of torch's functions."""

import pytest
import torch

from dpps.learning import Explicit, Rule, register, rule_for
from dpps.learning.engines.per_example.rules import base
from tests.support.rules import check_rule, randn


class Shift(Rule):
    functions = ("shifted", "moved_by")
    arguments = ("input", "shift")

    def gradients(self, call, back):
        return {("shift", -1): Explicit(call.output(back[0]))}


def test_a_rule_is_known_by_all_its_functions_and_a_later_one_takes_its_place(monkeypatch):
    monkeypatch.setattr(base, "_RULES", dict(base._RULES))
    assert rule_for("shifted") is None
    first, second = Shift(), Shift()
    register(first)
    assert rule_for("shifted") is rule_for("moved_by") is first
    register(second)
    assert rule_for("shifted") is second


def test_a_rule_of_ones_own_needs_only_its_gradients():
    check_rule(Shift(), torch.add, [randn(3, 4), randn(4)], {("shift", -1)}, {"input": 0})


@pytest.mark.parametrize("name", ["linear", "conv2d", "embedding", "layer_norm", "lstm", "add", "expand"])
def test_all_families_are_loaded(name):
    assert name in rule_for(name).functions
