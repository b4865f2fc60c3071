"""Remark 1 by hand, and what it refuses."""

import pytest
import torch

import dpps
from dpps.errors import UsageError
from dpps.sensitivity import Oracle, Paper, real_sensitivity


def test_the_recursion_of_remark_1_by_hand() -> None:
    paper = Paper(c_prime=0.8, decay=0.5)
    protocol = dpps.DPPS(dpps.Complete(2), dpps.Laplace(1.0), paper, noise=dpps.noise.source.Seeded(0))
    state = protocol.start(torch.zeros(2, 3))
    eps = torch.tensor([[1.0, 0.0, 0.0], [0.0, -2.0, 1.0]])
    first = protocol.step(state, eps)
    assert first.estimated == pytest.approx(2 * 0.8 * 3)
    carried = state.memory["carried"]
    second = protocol.step(state, eps)
    assert second.estimated == pytest.approx(float((carried + 1.6 * torch.tensor([1.0, 3.0])).max()))
    assert float(carried.min()) > 0.5 * first.estimated  # the noise of round 0 is in it
    assert paper.growth(dpps.Laplace(1.0), 3) == pytest.approx(0.5 * (1 + 1.6 * 3))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0.0, 0.5), "c_prime is 0.0"),
        ((1.0, 1.0), "decay is 1.0"),
        ((1.0, 0.5, "other"), "recursion is 'other'"),
    ],
)
def test_constants_that_make_no_sense_are_refused(arguments, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Paper(*arguments)


def test_the_oracle_is_the_largest_distance() -> None:
    rows = torch.tensor([[0.0, 0.0], [3.0, 4.0], [1.0, 1.0]])
    assert real_sensitivity(rows, 1) == pytest.approx(7.0)
    assert real_sensitivity(rows, 2) == pytest.approx(5.0)
    protocol = dpps.DPPS(dpps.Ring(3), dpps.Laplace(1.0), Oracle(), track_real=True)
    record = protocol.step(protocol.start(rows))
    assert record.estimated == record.real == pytest.approx(7.0)
