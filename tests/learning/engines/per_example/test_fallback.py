"""The general way: any function, for every example by itself."""

import logging

import torch

from dpps.learning import General
from tests.support.rules import (
    check_rule,
    randn,
)

WEIGHT = {("1", -1)}


def test_a_function_without_a_rule():
    check_rule(General("w"), torch.logaddexp, [randn(3, 4), randn(4)], WEIGHT, {"0": 0})
    check_rule(General("w"), torch.matmul, [randn(4, 3, 2), randn(2, 5)], WEIGHT, {"0": 1}, (1,))


def test_several_results():
    def both(x, w):
        return x * w, x + w.sum()

    check_rule(General("w"), both, [randn(3, 4), randn(4)], WEIGHT, {"0": 0}, (0, 0))


def test_what_vmap_cannot_run_goes_one_example_after_the_other_with_one_notice(caplog):
    def looks_at_values(x, w):
        return torch.stack([row * w if float(row.sum()) > 0 else row - w for row in x])

    with caplog.at_level(logging.WARNING):
        check_rule(General("head.weight (in it)"), looks_at_values, [randn(3, 4), randn(4)], WEIGHT, {"0": 0})
    (record,) = caplog.records
    assert "head.weight (in it)" in record.message
