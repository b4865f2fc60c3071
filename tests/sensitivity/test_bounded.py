"""Bounds known before the run: clips that hold, distances that cover them, and start values that stay private."""

from fractions import Fraction

import pytest
import torch

import dpps
from dpps.errors import UsageError
from dpps.noise import SecureNoise
from tests.support.protocol import Wire


@pytest.mark.parametrize("others", [0.123456789, 0.2])
def test_equal_private_start_values_are_rounded_to_the_grid_like_different_ones(others):
    """Without that the residue of a message modulo the step tells for certain whether all nodes hold the same value."""
    wire = Wire(3)
    bound = dpps.Bounded(distance=0, clip=0, start_distance=1.0)
    protocol = dpps.DPPS(dpps.Ring(3), dpps.Laplace(1.0), bound, noise=SecureNoise(), fabric=wire)
    values = torch.tensor([[0.123456789], [others], [others]], dtype=torch.float64)
    state = protocol.start(values)
    assert not state.config.common_start
    record = protocol.step(state)
    step = SecureNoise().grid(record.estimated)
    assert bool((wire.sent[0] / step == (wire.sent[0] / step).round()).all())
    assert record.used >= record.estimated + step


def test_a_start_cannot_be_public_and_private_at_once():
    bound = dpps.Bounded(distance=0, clip=0, start_distance=1.0)
    protocol = dpps.DPPS(dpps.Ring(3), dpps.Laplace(1.0), bound)
    with pytest.raises(UsageError, match="leave common_start out"):
        protocol.start(torch.zeros(3, 1), common_start=True)
    assert not protocol.start(torch.zeros(3, 1), common_start=False).config.common_start
    bare = dpps.DPPS(dpps.Ring(3), dpps.Laplace(1.0), dpps.Bounded(2e-3, clip=1e-3))
    with pytest.raises(UsageError, match=r"common_start.*start_distance"):
        bare.start(torch.tensor([[0.0], [0.0], [1.0]]), common_start=True)
    public = dpps.DPPS(dpps.Ring(3), dpps.Laplace(1.0), dpps.Bounded(2.0, clip=1.0))
    assert public.start(torch.zeros(3, 1)).config.common_start


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_norm_that_was_rounded_down_to_the_clip_is_not_above_it(dtype):
    """Computed in exact arithmetic. Of rows whose norm is the clip in float64, every other one is longer."""
    rows = torch.randn(40, 30, dtype=dtype, generator=torch.Generator().manual_seed(0))
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    for row, norm in zip(rows, norms, strict=True):
        admitted, _ = dpps.Bounded(clip=float(norm)).admit(row[None], norm[None], 1.0)
        exact = sum(Fraction(value) ** 2 for value in admitted[0].double().tolist())
        assert exact <= Fraction(float(norm)) ** 2


def test_the_clip_holds_in_half_precision_too():
    rows = torch.randn(20, 3000).half()
    bound = dpps.Bounded(2.0, clip=1.0)
    admitted, _ = bound.admit(rows, rows.double().abs().sum(1), 1.0)
    assert float(admitted.double().abs().sum(1).max()) <= 1.0


# `Bounded` never states an epsilon over an update that it did not clip


def moved(bound: dpps.Sensitivity, update: float) -> float:
    """How far one node's update of this length moves the rows of the whole network, without noise getting in the way."""
    protocol = dpps.DPPS(dpps.Ring(3), dpps.Gaussian(5.0), bound, noise=dpps.Seeded(0))
    rows = []
    for length in (update, -update):
        state = protocol.start(torch.zeros(3, 4, dtype=torch.float64))
        protocol.step(state, torch.tensor([[length, 0, 0, 0], [0] * 4, [0] * 4], dtype=torch.float64))
        rows.append(state.s.sum(0))
    return float(torch.linalg.vector_norm(rows[0] - rows[1]))


@pytest.mark.parametrize("update", [0.3, 1.0, 2000.0])
def test_replacing_an_update_moves_the_rows_by_at_most_the_distance_charged_for(update: float) -> None:
    bound = dpps.Bounded(clip=1.0)
    assert bound.distance == 2.0
    assert moved(bound, update) <= bound.distance


def test_without_a_clip_it_is_refused() -> None:
    with pytest.raises(UsageError, match="clip"):
        dpps.Bounded(1.0)
    with pytest.raises(UsageError, match="clip"):
        dpps.Bounded(distance=1.0, start_distance=3.0)


@pytest.mark.parametrize(("distance", "clip"), [(1.0, 1.0), (0.0, 1.0), (1.999999, 1.0), (0.0, 1e-9)])
def test_a_distance_that_two_updates_can_exceed_is_refused(distance: float, clip: float) -> None:
    with pytest.raises(UsageError, match=f"distance is {distance}"):
        dpps.Bounded(distance=distance, clip=clip)


def test_a_larger_distance_is_charged_for() -> None:
    """Two nodes of one owner move by more than one does: sqrt(2) times as far in the L2 norm."""
    bound = dpps.Bounded(clip=1.0, distance=3.0)
    protocol = dpps.DPPS(dpps.Ring(3), dpps.Gaussian(5.0), bound, noise=dpps.Seeded(0))
    assert protocol.step(protocol.start(torch.zeros(3, 2))).used == 3.0


def test_only_the_start_values_are_private() -> None:
    bound = dpps.Bounded(clip=0, start_distance=1)
    assert bound == dpps.Bounded(distance=0, clip=0, start_distance=1)
    protocol = dpps.DPPS(dpps.Ring(3), dpps.Laplace(1.0), bound, noise=dpps.Seeded(0))
    state = protocol.start(torch.tensor([[0.0], [0.5], [1.0]]))
    used = [protocol.step(state, torch.ones(3, 1)).used for _ in range(3)]
    assert used == [1.0, 0.0, 0.0]


def test_the_form_without_a_clip_is_no_public_name() -> None:
    assert "Unclipped" not in dpps.__all__
    assert not hasattr(dpps, "Unclipped")
