"""Bounds known before the run: private start values stay private even when they happen to be equal."""

from fractions import Fraction

import pytest
import torch

import dpps
from dpps.errors import UsageError
from dpps.noise import SecureNoise


class Wire(dpps.Stacked):
    def mix(self, weights, *xs):
        self.sent = xs[0].clone()
        return super().mix(weights, *xs)


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
    assert bool((wire.sent / step == (wire.sent / step).round()).all())
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
