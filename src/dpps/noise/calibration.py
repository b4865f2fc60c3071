"""How much noise a message gets: one calculation for messages and for local parameters."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from dpps.noise.mechanisms import Mechanism
from dpps.noise.source import NoiseSource


@dataclass(frozen=True)
class NoiseLevel:
    """The noise of one message: its scale, what it was calibrated to, and the grid that the message lies on."""

    sensitivity: float
    """What was estimated, and what rounding and noise on a grid add to it."""
    scale: float
    step: float
    """0: no grid."""


def calibrate(
    mechanism: Mechanism,
    noise: NoiseSource,
    sensitivity: float,
    rounding: Callable[[float], float],
    *,
    rate: float = 1.0,
) -> NoiseLevel:
    """The noise for a message of this sensitivity.

    The grid is fixed first and stays as it is: what rounding to it adds raises the scale, and a grid chosen again for the
    raised scale could be coarser than the one that was charged for. The scale can only grow, so the noise has at least as
    many steps as the source asks for.

    Args:
        mechanism: which noise.
        noise: where it comes from; it has the grid.
        sensitivity: how far two messages can be apart before they are rounded.
        rounding: what rounding a message to whole steps of this size adds to that.
        rate: factor on the noise.
    """
    step = noise.grid(mechanism.scale(sensitivity) * rate)
    extra = noise.discreteness(step) + rounding(step) if step else 0.0
    used = math.nextafter(sensitivity + extra, math.inf) if extra else sensitivity  # rounded up, never down
    return NoiseLevel(used, mechanism.scale(used) * rate, step)
