"""The noise of a message: what it is calibrated to covers the very grid that the message lies on."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpps
from dpps.noise import STEPS, SecureNoise, calibrate


def grid_of(values: torch.Tensor) -> float:
    """The largest power of two that divides all of these numbers."""
    fractions = values.double().numpy().ravel()
    smallest = 2.0**-300
    exponents = [math.frexp(v)[1] - 53 for v in fractions if v]
    unit = max(smallest, 2.0 ** min(exponents))
    whole = [int(v / unit) for v in fractions if v]
    return unit * math.gcd(*whole)


class Wire(dpps.Stacked):
    """Keeps the messages."""

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes)
        self.sent: list[torch.Tensor] = []

    def mix(self, weights, *xs):
        self.sent.append(xs[0].clone())
        return super().mix(weights, *xs)


@pytest.mark.parametrize("ratio", [1e3, 1e8, 1e9, 1e10, 1e13])
def test_the_surcharge_covers_the_grid_that_messages_lie_on(ratio):
    """Also where rounding costs more than the estimate itself, d / epsilon above 5e8: 11,000,000 parameters at 1/720 say."""
    d, wire = 1000, Wire(3)
    protocol = dpps.DPPS(
        dpps.Ring(3), dpps.Laplace(d / ratio), dpps.Certified(), noise=SecureNoise(), fabric=wire
    )
    state = protocol.start(torch.zeros(3, d, dtype=torch.float64))
    eps = torch.zeros(3, d, dtype=torch.float64)
    eps[0, 0] = 1.0
    record = protocol.step(state, eps)
    step = grid_of(wire.sent[0])
    assert record.used >= record.estimated + d * step
    assert record.scale / step >= STEPS
    assert record.epsilon == pytest.approx(d / ratio)


def test_the_grid_is_fixed_before_the_surcharge_and_the_scale_after_it():
    mechanism, noise = dpps.Laplace(1.0), SecureNoise()
    level = calibrate(mechanism, noise, 2.0, lambda step: 5e9 * step)
    assert level.step == noise.grid(2.0)
    assert level.sensitivity >= 2.0 + 5e9 * level.step
    assert level.scale == mechanism.scale(level.sensitivity)
    assert noise.grid(level.scale) > level.step  # chosen again, it would be coarser than what was charged
    seeded = calibrate(mechanism, dpps.Seeded(0), 2.0, lambda step: 5e9 * step, rate=0.5)
    assert (seeded.sensitivity, seeded.scale, seeded.step) == (2.0, 1.0, 0.0)


@pytest.mark.parametrize("lr_local", [0.11, 1.0, 1.9])
def test_shared_and_local_part_together_are_covered_on_their_two_grids(lr_local, monkeypatch):
    """One example's share can lie in both parts at any angle, and rounding moves every coordinate by a step more."""
    released = []
    monkeypatch.setattr(
        SecureNoise,
        "release",
        lambda self, mechanism, scale, out: released.append((scale, out)) or torch.zeros(len(out.nodes)),
    )
    model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 2))
    multiplier, clip, batch = 3e4, 1.0, 4
    learner = dpps.Run(
        dpps.PartPSP(model, ["0"], lr_shared=1.0, lr_local=lr_local, batch_size=batch),
        [TensorDataset(torch.randn(8, 40), torch.randint(0, 2, (8,)))] * 2,
        topology=dpps.Ring(2),
        privacy=dpps.Record(noise_multiplier=multiplier, clip=clip),
        noise=SecureNoise(),
    ).start(epochs=1)
    learner.step()
    (local_scale, local), (shared_scale, shared) = released
    worst = 0.0
    for angle in np.linspace(0, math.pi / 2, 91):
        moved = [
            rate * clip / batch * part + math.sqrt(out.half.shape[1]) * out.step
            for rate, part, out in ((1.0, math.cos(angle), shared), (lr_local, math.sin(angle), local))
        ]
        worst = max(worst, math.hypot(moved[0] / shared_scale, moved[1] / local_scale))
    assert worst <= 1 / multiplier
