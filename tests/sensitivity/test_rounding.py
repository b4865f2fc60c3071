"""Floating point: rows that are equal on paper differ in their last bits, and the certified bound covers that."""

import pytest
import torch

from dpps.noise import Laplace, Seeded
from dpps.protocol import DPPS
from dpps.sensitivity import Certified, WorstCase
from dpps.topology import Base, Exponential


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sensitivity", [Certified(), WorstCase()], ids=["certified", "worst-case"])
@pytest.mark.parametrize("size", [0.01, 1.0, 300.0])
def test_rows_that_are_equal_on_paper_only_are_covered(dtype, sensitivity, size) -> None:
    """After a synchronisation nobody perturbs: mixing equal rows leaves them different in their last bits, and S was 0."""
    protocol = DPPS(
        Base(3, 1), Laplace(1.0, 1.0), sensitivity, sync_every=4, noise=Seeded(0), track_real=True
    )
    generator = torch.Generator().manual_seed(0)
    state = protocol.start((size * torch.randn(1, 500, generator=generator)).to(dtype).repeat(3, 1))
    differed = 0
    for t in range(40):
        quiet = t % 4 in (0, 1, 2)
        eps = torch.zeros(3, 500) if quiet else 1e-3 * size * torch.randn(3, 500, generator=generator)
        rows = state.s.double()
        record = protocol.step(state, eps)
        if quiet:
            apart = float(torch.cdist(rows, rows, p=1).max())
            differed += apart > 0
            assert record.estimated >= apart
            assert (record.used > 0) == (record.scale > 0)
            assert t % 4 == 0 or record.scale > 0
    assert differed > 5


def test_what_rounding_adds_is_little() -> None:
    def estimates(dtype: torch.dtype) -> list[float]:
        generator = torch.Generator().manual_seed(0)
        protocol = DPPS(Exponential(10), Laplace(5, 1e-3), Certified(), sync_every=5, noise=Seeded(0))
        state = protocol.start(torch.randn(1, 2000, generator=generator).to(dtype).repeat(10, 1))
        found = []
        for _ in range(60):
            eps = torch.randn(10, 2000, generator=generator) / 200
            found.append(protocol.step(state, eps.to(dtype)).estimated)
        return found

    assert estimates(torch.float32) == pytest.approx(estimates(torch.float64), rel=2e-3)
