"""The instruments: many networks at once are what each is alone, and twins have less noise."""

import pytest
import torch

from dpps.audit import Joined, Weakened, Wiretap, weakened
from dpps.errors import RunError
from dpps.noise import Keystream, Laplace, Outgoing, SecureNoise, Seeded
from dpps.protocol import DPPS
from dpps.sensitivity import Certified, Paper, WorstCase
from dpps.topology import Exponential, Ring
from dpps.transport import Stacked


def test_certified_broadcasts_the_same_scalars_whatever_the_noise_and_paper_does_not() -> None:
    rows = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]).repeat(3, 1)

    def two_rounds(sensitivity) -> None:
        protocol = DPPS(Exponential(2), Laplace(0.5), sensitivity, noise=Seeded(1), fabric=Wiretap(2, 3))
        state = protocol.start(torch.zeros(6, 2))
        protocol.step(state, rows)
        protocol.step(state, rows)

    two_rounds(Certified())
    for leaking in (Paper(0.78, 0.55), WorstCase()):
        with pytest.raises(RunError, match="copies=1"):
            two_rounds(leaking)


def test_networks_side_by_side_are_what_they_are_alone() -> None:
    weights = Ring(3).weights(0)
    x, a = torch.randn(12, 5), torch.ones(12, 1)
    together = Wiretap(3, 4).mix(weights, x, a)
    for k in range(4):
        part = slice(3 * k, 3 * k + 3)
        alone = Stacked(3).mix(weights, x[part], a[part])
        assert all(torch.equal(t[part], o) for t, o in zip(together, alone, strict=True))


def test_the_twin_has_two_thirds_of_the_noise() -> None:
    def noise(source) -> torch.Tensor:
        s = torch.zeros(1, 4, dtype=torch.float64)
        out = Outgoing(s, s, s.clone(), [0], 0, base_is_public=True)
        source.release(Laplace(1.0), 3.0, out)
        return out.half

    assert torch.allclose(noise(weakened(Seeded)(7)) * 1.5, noise(Seeded(7)), rtol=1e-12)
    assert not Weakened(SecureNoise()).private


def test_joined_rows_are_one_long_row() -> None:
    key = bytes(range(32))

    def outgoing(rows: int) -> Outgoing:
        x = torch.arange(6.0).view(rows, -1)
        return Outgoing(x, x / 7, x + x / 7, range(rows), 0, base_is_public=True)

    joined, long = outgoing(3), outgoing(1)
    norms = Joined(Keystream(key)).release(Laplace(1.0), 2.0, joined)
    SecureNoise(Keystream(key)).release(Laplace(1.0), 2.0, long)
    assert torch.equal(joined.half.view(1, -1), long.half)
    assert norms.isnan().all()
