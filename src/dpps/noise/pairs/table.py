"""Exact discrete Gaussian noise of a few to a few thousand steps, by looking it up: what pairs of partners draw.

A sample is the k with F(k-1) <= U < F(k) for a uniform real number U, F the distribution function.
Sixteen bits of U nearly always decide, then a table answers; otherwise 64 more bits are compared with F,
and where these tie with it, 192 further ones. So the
table only saves work, and both partners, who have the same bits, get the same numbers on any machine: F comes from whole-number
arithmetic, and no floating point decides.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from decimal import Decimal, localcontext
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dpps.errors import UsageError

Stream = Callable[[int, int], bytes]
"""So many bytes of the stream with that number (0, 1 or 2): always the same ones for the same noise."""

FEWEST, MOST = 2.0, 2.0**15
"""Standard deviations in steps that a table is made for."""

_CUT = 14  # standard deviations beyond which nothing is drawn
_BITS, _GUARD = 256, 384  # of F, and of the arithmetic behind it
_UNDECIDED = np.int32(-(1 << 31))


class GaussianTable:
    """Whole numbers with P(k) proportional to exp(-k^2 / 2 deviation^2); made once for a standard deviation, by `gaussian_table`."""

    def __init__(self, deviation: float) -> None:
        if not FEWEST <= deviation <= MOST:
            raise UsageError(
                f"pair noise of {deviation:g} steps: a table holds {FEWEST:g} to {MOST:g}; use another mean_variance or graph"
            )
        self.last = math.ceil(_CUT * deviation)
        self._exact = _distribution(deviation, self.last)
        self._short = np.array([f >> (_BITS - 64) for f in self._exact], dtype=np.uint64)
        first = np.arange(1 << 16, dtype=np.uint64) << np.uint64(48)
        below = np.searchsorted(self._short, first, side="left")
        within = np.searchsorted(self._short, first + np.uint64((1 << 48) - 1), side="right")
        self._guide = np.where(below == within, below - self.last, _UNDECIDED).astype(np.int32)

    def draw(self, stream: Stream, size: int) -> NDArray[np.int32]:
        """`size` independent samples, a function of the stream's bytes."""
        first = np.frombuffer(stream(0, 2 * size), dtype="<u2")
        out: NDArray[np.int32] = self._guide[first]
        open_ = np.flatnonzero(out == _UNDECIDED)
        if open_.size:
            out[open_] = self._decide(first[open_], stream)
        return out

    def _decide(self, first: NDArray[np.uint16], stream: Stream) -> NDArray[np.int32]:
        more = np.frombuffer(stream(1, 8 * first.size), dtype="<u8")
        value = (first.astype(np.uint64) << np.uint64(48)) | (more >> np.uint64(16))
        place = np.searchsorted(self._short, value, side="right")
        ties = np.flatnonzero(self._short[np.maximum(place, 1) - 1] == value)
        if ties.size:
            rest = stream(2, 24 * ties.size)
            for k, tie in enumerate(ties):
                low = int.from_bytes(rest[24 * k : 24 * k + 24], "little")
                place[tie] = bisect_right(self._exact, (int(value[tie]) << (_BITS - 64)) | low)
        return (place - self.last).astype(np.int32)


@lru_cache(maxsize=64)
def gaussian_table(deviation: float) -> GaussianTable:
    """The table of a standard deviation in steps."""
    return GaussianTable(deviation)


def table_slack(samples: int) -> float:
    """Distance of so many samples from true discrete Gaussian noise: tails beyond 14 standard deviations, and F rounded to 256 bits.

    P(|Z| > 14 standard deviations) <= 2 exp(-14^2/2) for a discrete Gaussian (Canonne, Kamath, Steinke 2020, Proposition 25); a table has
    fewer than 2^20 values, each off by less than 2^-255.
    """
    return samples * (2 * math.exp(-_CUT * _CUT / 2) + 2.0**-235)


def _distribution(deviation: float, last: int) -> list[int]:
    """floor(2^256 P(Z <= k)) for k = -last .. last - 1.

    The weights follow from w(k+1) = w(k) a(k), a(k+1) = a(k) q^2, a(0) = q = exp(-1/2 deviation^2), in numbers of 384 bits:
    each step is off by 2^-384, after k of them by less than k^2 of it.
    """
    with localcontext() as context:
        context.prec = 140
        q = (Decimal(-1) / (2 * Decimal(deviation) ** 2)).exp()
        ratio = int(q * (1 << _GUARD))
    square = ratio * ratio >> _GUARD
    weights = [1 << _GUARD]
    for _ in range(last):
        weights.append(weights[-1] * ratio >> _GUARD)
        ratio = ratio * square >> _GUARD
    total = 2 * sum(weights) - weights[0]
    found, so_far = [], 0
    for k in range(-last, last):
        so_far += weights[abs(k)]
        found.append((so_far << _BITS) // total)
    return found
