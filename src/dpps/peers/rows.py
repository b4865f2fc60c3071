"""Rows as members send them: their bytes, what an honest one can be, and how far a single member may pull."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpps.peers.frames import FrameError, Share

_TAIL = 41.0  # see dpps.transport.base
_SLACK = 2.0
"""Members are some rounds apart, and rates may grow: rows twice as long as possible are still let pass."""


class Rows:
    r"""What all rows of a run have in common.

    Updates and noise are scaled by a member's own a, so $y_i = s_i / a_i$ moves by at most the clip and its
    noise, and mixing makes it a convex combination of others': after r rounds an honest row has $\|s_i\| \le a_i (\|s_0\| + r \Delta + \sqrt{r} \sigma (\sqrt d + 41))$,
    but for a chance of $10^{-12}$ (:mod:`dpps.transport.base`).

    Args:
        row: a row as all start with.
        common: whether all do; otherwise nothing is known of a row's length.
    """

    def __init__(self, row: Tensor, common: bool) -> None:
        self.width, self.dtype, self.device = row.numel(), row.dtype, row.device
        self.size = self.width * row.element_size()
        self._start = float(torch.linalg.vector_norm(row.double())) if common else math.inf
        self._step = self._deviation = math.inf  # not known before the first round
        self._own = row.double().cpu()
        self._seen: dict[int, tuple[int, Tensor]] = {}

    def zero(self) -> Tensor:
        """A row of nothing, as wide as sums of rows need it."""
        return torch.zeros(self.width, dtype=torch.float64)

    def narrow(self, row: Tensor) -> Tensor:
        """A sum as the protocol has it."""
        return row.to(self.device, self.dtype)

    def encode(self, row: Tensor) -> bytes:
        """The bytes of a row."""
        return row.detach().to("cpu", self.dtype).contiguous().view(torch.uint8).numpy().tobytes()

    def grow(self, step: float, deviation: float) -> None:
        """What a round adds to rows at most."""
        known = math.isfinite(self._step + self._deviation)
        self._step = max(self._step, step) if known else step
        self._deviation = max(self._deviation, deviation) if known else deviation

    def longest(self, a: float, round_: int) -> float:
        """The longest row with this a that is accepted in a round."""
        if not math.isfinite(self._start + self._step + self._deviation):
            return math.inf
        noise = math.sqrt(round_ + 2) * self._deviation * (math.sqrt(self.width) + _TAIL)
        return _SLACK * a * (self._start + (round_ + 2) * self._step + noise)

    def checked(self, share: Share) -> Tensor:
        """The row of a share.

        Raises:
            FrameError: no honest member can have it.
        """
        if len(share.row) != self.size:
            raise FrameError(f"a row of {len(share.row)} bytes: rows have {self.size}")
        row = torch.frombuffer(bytearray(share.row), dtype=self.dtype).double()
        norm = float(torch.linalg.vector_norm(row))
        where = f"a row of round {share.claim.round}"
        if not math.isfinite(norm):
            raise FrameError(f"{where} that holds NaN or infinity")
        most = self.longest(share.a, share.claim.round)
        if norm > most:
            raise FrameError(
                f"{where} of norm {norm:.4g}: clip, rates and noise make at most {most:.4g} possible"
            )
        return row

    def clipped(self, row: Tensor, a: float, most: float) -> Tensor:
        """Clipped gossip: a row whose y is farther than `most` from one's own counts as if it were just so far away."""
        if a <= 0:
            return row
        apart = row / a - self._own
        norm = float(torch.linalg.vector_norm(apart))
        return row if norm <= most else a * (self._own + apart * (most / norm))

    def follow(self, y: Tensor) -> None:
        """One's own parameters, from which others' are measured."""
        self._own = y.detach().double().cpu()

    def saw(self, node: int, row: Tensor, share: Share) -> None:
        """What a neighbour's parameters were when it last told."""
        if share.a > 0:
            self._seen[node] = share.claim.round, (row / share.a).to(self.dtype)

    def told(self, nodes: Sequence[int], since: int) -> bool:
        """Whether each of these has told since that round."""
        return all(node in self._seen and self._seen[node][0] >= since for node in nodes)

    def apart(self, mean: Tensor, since: int) -> float | None:
        """How far neighbours were from `mean` when they last told, relative to its norm; None: none has told since that round."""
        told = [y for round_, y in self._seen.values() if round_ >= since]
        if not told:
            return None
        here = mean.double().cpu()
        norm = float(torch.linalg.vector_norm(here))
        far = max(float(torch.linalg.vector_norm(y.double() - here)) for y in told)
        return far / norm if norm else far

    def meta(self) -> dict[str, Any]:
        """For the disk."""
        known = math.isfinite(self._step + self._deviation)
        return {"step": self._step if known else None, "deviation": self._deviation if known else None}

    def load(self, meta: dict[str, Any]) -> None:
        """What `meta` gave."""
        self._step = math.inf if meta["step"] is None else meta["step"]
        self._deviation = math.inf if meta["deviation"] is None else meta["deviation"]
