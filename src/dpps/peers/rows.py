"""Rows as members send them: their bytes, what an honest one can be, and how far a single member may pull."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dpps.peers.frames import Claim, FrameError, Share

TAIL = 41.0  # see dpps.transport.base
_SLACK = 2.0


class Rows:
    r"""What all rows of a run have in common.

    Updates and noise are scaled by a member's own a, so $y_i = s_i / a_i$ moves by at most the clip and its
    noise, and mixing makes it a convex combination of others': while everybody is honest, $\|s_i\| \le a_i (\|s_0\| + R)$
    at all times, but for a chance of $10^{-12}$, with R what clip, rates and noise can add up to in the whole plan (:mod:`dpps.transport.base`).
    All of it is in the contract: no member's word, not even about its round, makes a row longer.

    Rows up to $B = 2 a (\|s_0\| + R)$ count as they are. One that is longer counts as if it were just so long, so the parameters of
    an honest member, whatever a liar sends, stay within $B + a R < 2 B$: what is longer than 2 B no honest member has, and gets its sender refused.

    Args:
        row: a row as all start with.
        common: whether all do; otherwise nothing is known of a row's length.
    """

    def __init__(self, row: Tensor, common: bool) -> None:
        self.width, self.dtype, self.device = row.numel(), row.dtype, row.device
        self.size = self.width * row.element_size()
        self._start = float(torch.linalg.vector_norm(row.double())) if common else math.inf
        self._reach = math.inf
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

    def bound(self, reach: float) -> None:
        """How far parameters can get from the start in the whole plan; infinite: not known."""
        self._reach = reach

    def longest(self, a: float) -> float:
        """The longest row with this a that counts as it is."""
        most = self._start + self._reach
        return _SLACK * a * most if math.isfinite(most) else math.inf

    def checked(self, share: Share) -> Tensor:
        """The row of a share, not longer than `longest`.

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
        most = self.longest(share.claim.a)
        if norm > _SLACK * most:
            raise FrameError(
                f"{where} of norm {norm:.4g}: clip, rates and noise make at most {_SLACK * most:.4g} possible"
            )
        return row if norm <= most else row * (most / norm)

    def clipped(self, row: Tensor, a: float, most: float) -> Tensor:
        """Clipped gossip: a row whose y is farther than `most` from one's own counts as if it were just so far away."""
        if a <= 0:
            return row
        apart = row / a - self._own
        norm = float(torch.linalg.vector_norm(apart))
        if not math.isfinite(norm):  # a so small that its direction is lost
            return a * self._own
        return row if norm <= most else a * (self._own + apart * (most / norm))

    def follow(self, y: Tensor) -> None:
        """One's own parameters, from which others' are measured."""
        self._own = y.detach().double().cpu()

    def saw(self, node: int, row: Tensor, claim: Claim) -> None:
        """What a neighbour's parameters were when it last told."""
        if claim.a > 0:
            self._seen[node] = claim.round, (row / claim.a).to(self.dtype)

    def middle(self, rows: Sequence[Tensor], most: float) -> tuple[Tensor, float]:
        """What several members say of the same row (a = 1): its median, coordinate by coordinate, so that one among three or more
        moves it no farther than the others are apart; and how far (L2, relative to its norm) the farthest of them is from it.

        Args:
            rows: what they say, at least one.
            most: those that are farther than this from one's own row count as if they were just so far away; 0: no limit.
        """
        told = [self.clipped(row.double(), 1.0, most) if most > 0 else row.double() for row in rows]
        ordered = torch.stack(told).sort(0).values
        found = (ordered[(len(told) - 1) // 2] + ordered[len(told) // 2]) / 2
        norm = float(torch.linalg.vector_norm(found))
        if norm > (longest := self.longest(1.0)):
            found, norm = found * (longest / norm), longest
        far = max(float(torch.linalg.vector_norm(row - found)) for row in told)
        return self.narrow(found), far / norm if norm else far

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
