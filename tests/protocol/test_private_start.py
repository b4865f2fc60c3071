"""Private start rows reach the noise grid as they are: rounding to float32 on the way would move them further than is charged for."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import dpps
from dpps.noise import Keystream, SecureNoise, power_of_two_below

FAR = 2.0**19
"""Here neighbouring float32 numbers are 1/16 apart."""
COORDINATES, CLIP, START = 1000, 40.0, 0.5
STEP = power_of_two_below((2 * CLIP + START) / 2**30)


@dataclass(frozen=True)
class Known(dpps.Laplace):
    """Noise that takes the rows back to zero, where float32 shows what was put on the grid."""

    def draw_whole(self, keystream: Keystream, steps: float, size: int) -> np.ndarray:
        return np.full(size, -round(FAR / STEP), dtype=np.int64)


class Wire(dpps.Stacked):
    def mix(self, weights, *xs):  # type: ignore[no-untyped-def]
        self.sent = xs[0].clone()
        return super().mix(weights, *xs)


def sent(update: float, away: bool) -> tuple[torch.Tensor, float]:
    """The first message of a node that adds this to every coordinate, and what was charged for."""
    topology = dpps.Ring(3).with_dropouts({1: [2]}) if away else dpps.Ring(3)
    wire, bound = Wire(3), dpps.Bounded(clip=CLIP, start_distance=START)
    protocol = dpps.DPPS(topology, Known(1.0), bound, noise=SecureNoise(), fabric=wire)
    state = protocol.start(torch.full((3, COORDINATES), FAR), common_start=False)
    record = protocol.step(state, torch.full((3, COORDINATES), update))
    assert wire.sent.dtype == torch.float32
    assert record.used is not None
    return wire.sent[0].double(), record.used


@pytest.mark.parametrize("away", [False, True])
def test_two_updates_are_no_further_apart_than_was_charged(away: bool) -> None:
    (one, charged), (other, _) = sent(0.04, away), sent(-0.04, away)
    assert 79.9 < float((one - other).abs().sum()) <= charged


def test_seeded_noise_is_added_to_the_same_rows() -> None:
    """Float32 messages of rows far from zero: the update survives up to the rounding of the message itself."""
    bound = dpps.Bounded(clip=CLIP, start_distance=START)
    protocol = dpps.DPPS(dpps.Ring(3), dpps.Laplace(1e9), bound, noise=dpps.Seeded(0))
    state = protocol.start(torch.full((3, 4), FAR), common_start=False)
    protocol.step(state, torch.full((3, 4), 1.0))
    torch.testing.assert_close(state.s, torch.full((3, 4), FAR + 1.0), rtol=0, atol=1e-6)
