"""Noise for messages that really leave: whole numbers on a grid, from a keystream keyed by the operating system.

Textbook noise in floating point gives values away: which doubles can come out depends on what went in. Here everything private
is a whole number of grid steps before noise is added, the noise is a whole number with exactly the claimed distribution, and
only their sum is turned back into floating point, which is post-processing.
"""

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dpps.errors import RunError
from dpps.noise.keystream import Keystream
from dpps.noise.mechanisms import Mechanism
from dpps.noise.source import NoiseSource, Outgoing

if TYPE_CHECKING:
    from dpps.noise.pair_keys import PairKeys
    from dpps.noise.pairs import Partners

STEPS = 2.0**30
"""The noise scale is at least this many grid steps."""

_LARGEST = 2.0**53  # beyond it, a double does not hold every whole number


class SecureNoise(NoiseSource):
    """Discrete Laplace or Gaussian noise from AES-256 in counter mode; nobody else can know it.

    In the units contribution and record only the perturbation is private (the row before it follows from earlier messages):
    it is rounded toward zero to whole steps, noised, and added to the row. In node-swap the whole row is rounded.

    Args:
        keystream: where the bits come from; by default one with a fresh key of the operating system.
        pair_keys: what the nodes here share with their partners, for noise that cancels between processes.
        finer: factor on the step of the grid, at most 1.
    """

    private = True

    def __init__(
        self,
        keystream: Keystream | None = None,
        pair_keys: "PairKeys | None" = None,
        *,
        finer: float = 1.0,
    ) -> None:
        self.keystream = keystream or Keystream()
        self.pair_keys = pair_keys
        self._finer = finer

    def for_local_part(self) -> NoiseSource:
        return self  # a keystream never gives the same bits twice

    def with_partners(self, partners: "Partners") -> NoiseSource:
        from dpps.noise.pairs import SecurePairs

        return SecurePairs(partners, self.pair_keys, self.keystream)

    def grid(self, scale: float) -> float:
        """The step: the power of two with `scale` between STEPS and 2 STEPS steps, or more where it is to be finer."""
        return 0.0 if scale == 0 else power_of_two_below(scale * self._finer / STEPS)

    def discreteness(self, step: float) -> float:
        """Discrete noise of t >= STEPS steps costs what continuous noise does at a sensitivity larger by 1/(4t) steps.

        For Laplace noise see `discrete_laplace_epsilon`; for Gaussian noise the variance loses 1/12 step squared, a smaller
        relative amount (`discrete_gaussian_multiplier`).
        """
        return step / (4 * STEPS)

    def distance(self, mechanism: Mechanism, dimension: int, rounds: int) -> float:
        return mechanism.sampler_distance(STEPS, dimension, rounds)

    def release(self, mechanism: Mechanism, scale: float, out: Outgoing) -> Tensor:
        norms = torch.zeros(len(out.nodes), dtype=torch.float64)
        if scale == 0:
            return norms
        step = out.step or self.grid(scale)
        self.keystream.refresh()
        for k in range(len(out.nodes)):  # row by row: integers need eight bytes each
            hidden = (out.perturbation if out.base_is_public else out.half)[k].double().cpu().numpy()
            noise = mechanism.draw_whole(self.keystream, scale / step, hidden.size)
            whole = whole_steps(hidden, step, toward_zero=out.base_is_public) + noise
            message = torch.from_numpy(whole.astype(np.float64) * step)
            if out.base_is_public:
                message += out.s[k].double().cpu()
            out.half[k] = message.to(out.half)
            norms[k] = float(np.abs(noise).sum(dtype=np.float64)) * step
        return norms


def power_of_two_below(value: float) -> float:
    """The largest power of two that is at most `value`; exact, so that all machines find the same."""
    return math.ldexp(0.5, math.frexp(value)[1])


def whole_steps(values: np.ndarray, step: float, toward_zero: bool) -> np.ndarray:
    """Values as whole numbers of steps."""
    steps = np.trunc(values / step) if toward_zero else np.rint(values / step)
    if np.abs(steps).max(initial=0.0) >= _LARGEST:
        raise RunError(
            f"a value of {np.abs(values).max():.3g} does not fit the noise grid of {step:.3g}: the noise is "
            "too small against the "
            "values to be safe; use a smaller epsilon or smaller values"
        )
    return steps.astype(np.int64)
