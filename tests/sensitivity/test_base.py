"""A sensitivity of one's own is one method; what the base class says of it is cautious."""

import math

import pytest
import torch

import dpps
from dpps.sensitivity import SENSITIVITIES, Sensitivity


class Constant(Sensitivity):
    """As in the module's docstring."""

    def estimate(self, memory, view) -> float:
        return 3.0


def test_ten_lines_are_enough() -> None:
    protocol = dpps.DPPS(dpps.Ring(3), dpps.Laplace(0.5), Constant())
    record = protocol.step(protocol.start(torch.zeros(3, 2)))
    assert record.estimated == 3.0
    assert record.scale == pytest.approx(6.0)
    assert record.epsilon == pytest.approx(0.5)


def test_without_being_told_the_worst_is_assumed() -> None:
    found = Constant()
    assert found.needs_double_stochasticity
    assert not found.base_is_public
    assert found.largest_perturbation(1.0) == math.inf
    assert found.rounding(100, 0.01, 1) == pytest.approx(1.0)
    assert found.rounding(100, 0.01, 2) == pytest.approx(0.1)
    assert "constant" not in SENSITIVITIES
