"""Noise for messages that really leave: whole numbers on a grid, from a keystream keyed by the operating system.

Textbook noise in floating point gives values away: which doubles can come out depends on what went in. Here everything private
is a whole number of grid steps before noise is added, the noise is a whole number with exactly the claimed distribution, and
only their sum is turned back into floating point, which is post-processing.
"""

import math

import numpy as np
import torch
from torch import Tensor

from dpps.errors import RunError, UsageError
from dpps.keystream import Keystream, gaussian_slack, laplace_slack
from dpps.mechanisms import Mechanism
from dpps.noise import NoiseSource, Outgoing
from dpps.privacy.accountant import discrete_gaussian_slack

STEPS = 2.0**30
"""The noise scale is between this many and twice this many grid steps."""

_LARGEST = 2.0**53  # beyond it, a double does not hold every whole number


class SecureNoise(NoiseSource):
    """Discrete Laplace or Gaussian noise from AES-256 in counter mode; nobody else can know it.

    In the units contribution and record only the perturbation is private (the row before it follows from earlier messages):
    it is rounded toward zero to whole steps, noised, and added to the row. In node-swap the whole row is rounded.
    """

    private = True

    def __init__(self, keystream: Keystream | None = None) -> None:
        self.keystream = keystream or Keystream()

    def for_local_part(self) -> NoiseSource:
        return self  # a keystream never gives the same bits twice

    def grid(self, scale: float) -> float:
        """The step: the power of two with `scale` between STEPS and 2 STEPS steps."""
        return 0.0 if scale == 0 else 2.0 ** math.floor(math.log2(scale / STEPS))

    def discreteness(self, scale: float) -> float:
        """Discrete noise of t steps costs what continuous noise does at a sensitivity larger by 1/(4t) steps.

        For Laplace noise see `discrete_laplace_epsilon`; for Gaussian noise the variance loses 1/12 step squared, a smaller
        relative amount (`discrete_gaussian_multiplier`).
        """
        return self.grid(scale) / (4 * STEPS)

    def distance(self, mechanism: Mechanism, dimension: int, rounds: int) -> float:
        if mechanism.name == "gaussian":
            return gaussian_slack(dimension * rounds) + discrete_gaussian_slack(STEPS, dimension, rounds)
        return laplace_slack(dimension * rounds)

    def release(self, mechanism: Mechanism, scale: float, out: Outgoing) -> Tensor:
        norms = torch.zeros(len(out.nodes), dtype=torch.float64)
        if scale == 0:
            return norms
        if mechanism.name not in ("laplace", "gaussian"):
            raise UsageError(f"secure noise knows laplace and gaussian, not {mechanism.name!r}")
        step = self.grid(scale)
        for k in range(len(out.nodes)):  # row by row: integers need eight bytes each
            hidden = (out.perturbation if out.base_is_public else out.half)[k].double().cpu().numpy()
            noise = self._draw(mechanism, scale / step, hidden.size)
            whole = _whole(hidden, step, toward_zero=out.base_is_public) + noise
            message = torch.from_numpy(whole.astype(np.float64) * step)
            if out.base_is_public:
                message += out.s[k].double().cpu()
            out.half[k] = message.to(out.half)
            norms[k] = float(np.abs(noise).sum(dtype=np.float64)) * step
        return norms

    def _draw(self, mechanism: Mechanism, steps: float, size: int) -> np.ndarray:
        if mechanism.name == "laplace":
            return self.keystream.discrete_laplace(steps, size)
        return self.keystream.discrete_gaussian(steps, size)


def _whole(values: np.ndarray, step: float, toward_zero: bool) -> np.ndarray:
    steps = np.trunc(values / step) if toward_zero else np.rint(values / step)
    if np.abs(steps).max(initial=0.0) >= _LARGEST:
        raise RunError(
            f"a value of {np.abs(values).max():.3g} does not fit the noise grid of {step:.3g}: the noise is too small against the "
            "values to be safe; use a smaller epsilon or smaller values"
        )
    return steps.astype(np.int64)
