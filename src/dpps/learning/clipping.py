"""Two numbers that tell whether a run goes well: how many examples were clipped, and how large updates are compared with their noise."""

import math

import torch
from torch import Tensor

RARE, ALWAYS = 0.01, 0.99
"""Outside of these shares a clip is worth a word."""

HOPELESS = 0.05
"""All updates over their noise, below which little is learned: with scattering and a linear model on mnist-mini 0.02 gave 21 %,
0.045 38 %, 0.16 76 %. (The noise of many parameters is long, but short in the few directions that updates take.)"""

OWN_EYES = "(computed from data without noise: for this node's own eyes, not to be passed on)"
"""Said with every number that no guarantee covers."""


class ClipCount:
    """Counts examples whose gradient was longer than the clip. Nothing of it is noised: it is for the node's own eyes."""

    def __init__(self) -> None:
        self._clipped = self._seen = torch.zeros((), dtype=torch.int64)

    def add(self, shares: Tensor, drawn: Tensor) -> None:
        """Of every node, the share of a batch that was clipped, and how many examples were drawn."""
        self._clipped = self._clipped + (shares * drawn).round().sum().long().cpu()
        self._seen = self._seen + drawn.sum().cpu()

    def take(self) -> tuple[int, int]:
        """How many were clipped, and of how many, since this was last asked."""
        found = int(self._clipped), int(self._seen)
        self._clipped = self._seen = torch.zeros((), dtype=torch.int64)
        return found


def advice(clip: float, clipped: int, seen: int) -> str | None:
    """What to do about a clip that clips almost nothing or almost everything; None where it is neither."""
    if not seen or RARE <= clipped / seen <= ALWAYS:
        return None
    share = f"{100 * clipped / seen:.3g} % of the examples were clipped at {clip:g}"
    if clipped / seen < RARE:
        return f"{share}: noise is added for gradients that long, so a smaller clip gives the same updates with less noise {OWN_EYES}"
    return (
        f"{share}: every one counts with its direction alone, and only rate x clip matters; where that is too short a step, a larger "
        f"learning rate or a larger clip learns more {OWN_EYES}"
    )


def hopeless(update_to_noise: float, nodes: int, rounds: int) -> str | None:
    """A warning where noise drowns even the sum of all updates of all nodes; None where it does not.

    Over T rounds and N nodes, updates that agree add up to T N of one, and independent noise to the root of that.
    """
    whole = update_to_noise * math.sqrt(nodes * rounds)
    if whole >= HOPELESS:
        return None
    return (
        f"an update is {update_to_noise:.2g} of its noise, and even all updates of {nodes} nodes over "
        f"{rounds} rounds together are {whole:.2g} "
        "of theirs: this run will hardly learn; use larger batches, fewer shared parameters (a linear model), more "
        f"data or a larger epsilon {OWN_EYES}"
    )
