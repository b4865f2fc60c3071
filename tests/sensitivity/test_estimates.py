"""Remark 1 by hand, the real distance, a sensitivity of one's own, and what rounding costs."""

import math

import pytest
import torch

import dpps
from dpps.sensitivity import SENSITIVITIES, Oracle, Paper, Sensitivity, Unclipped, real_sensitivity


def test_the_recursion_of_remark_1_by_hand() -> None:
    paper = Paper(c_prime=0.8, decay=0.5)
    protocol = dpps.DPPS(dpps.Complete(2), dpps.Laplace(1.0), paper, noise=dpps.Seeded(0))
    state = protocol.start(torch.zeros(2, 3))
    eps = torch.tensor([[1.0, 0.0, 0.0], [0.0, -2.0, 1.0]])
    first = protocol.step(state, eps)
    assert first.estimated == pytest.approx(2 * 0.8 * 3)
    carried = state.memory["carried"]
    second = protocol.step(state, eps)
    assert second.estimated == pytest.approx(float((carried + 1.6 * torch.tensor([1.0, 3.0])).max()))
    assert float(carried.min()) > 0.5 * first.estimated  # the noise of round 0 is in it
    assert paper.growth(dpps.Laplace(1.0), 3) == pytest.approx(0.5 * (1 + 1.6 * 3))


def test_the_oracle_is_the_largest_distance() -> None:
    rows = torch.tensor([[0.0, 0.0], [3.0, 4.0], [1.0, 1.0]])
    assert real_sensitivity(rows, 1) == pytest.approx(7.0)
    assert real_sensitivity(rows, 2) == pytest.approx(5.0)
    protocol = dpps.DPPS(dpps.Ring(3), dpps.Laplace(1.0), Oracle(), watch={"real": Oracle()})
    record = protocol.step(protocol.start(rows))
    assert record.estimated == record.real == pytest.approx(7.0)


def test_rounding_is_charged_where_it_costs():
    """Node-swap: every coordinate; record: every coordinate of a sum; contribution: rounding toward zero is free."""
    d, step = 100, 0.5
    assert dpps.Paper(1, 0.5).rounding(d, step, 1) == d * step
    assert Unclipped(1.0).rounding(d, step, 2) == math.sqrt(d) * step
    assert dpps.Bounded(1.0, clip=0.5).rounding(d, step, 1) == 0


# A sensitivity of one's own is one method; what the base class says of it is cautious


class Constant(Sensitivity):
    """As in the module's docstring."""

    def estimate(self, memory, view) -> float:
        return 3.0


def test_without_being_told_the_worst_is_assumed() -> None:
    found = Constant()
    assert not found.base_is_public
    assert found.largest_perturbation(1.0) == math.inf
    assert found.rounding(100, 0.01, 1) == pytest.approx(1.0)
    assert found.rounding(100, 0.01, 2) == pytest.approx(0.1)
    assert "constant" not in SENSITIVITIES
