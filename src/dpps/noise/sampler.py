"""Random integers from a cryptographic keystream, and exact discrete Laplace and Gaussian samples made of them.

Privacy is as good as the noise is secret and as its distribution is the claimed one. Textbook samplers round
real numbers, and the rounding gives inputs away. The samplers here return integers with exactly the claimed
probabilities, given uniform keystream bits.

How they can be exact and quick. A sample is a function of a uniform real number U, of which the first 53 bits
are drawn. Floating point gives an interval that surely contains the result for every U with these bits. If
the interval leaves no choice, that is the sample. Otherwise (about once in 80,000 at a scale of 2^30) more
bits of U are drawn and the result is bounded in multiprecision until there is no choice. So floating point
never decides, it only saves work; all that is asked of it is that numpy's log and exp are within 16 units in
the last place (they are within 4).
"""

import hashlib
import math
import os
import weakref
from collections.abc import Callable
from decimal import ROUND_FLOOR, Context, Decimal, localcontext
from fractions import Fraction

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from dpps.errors import UsageError

Words = NDArray[np.uint64]
Integers = NDArray[np.int64]

LARGEST_SCALE = 2.0**44
"""In grid units. Beyond it 53 bits leave too many samples undecided."""

_BLOCK = 1 << 14  # words at a time: all of a block's arrays stay in the processor's cache
_FIRST = 53  # bits of U that the quick path looks at
_RELATIVE = 2.0**-48  # 16 units in the last place of log or exp, and the roundings around them
_ABSOLUTE = 2.0**-42  # error of the acceptance probability, see _accepted


_ALIVE: "weakref.WeakSet[Keystream]" = weakref.WeakSet()


class Keystream:
    """AES-256 in counter mode over zeros: uniform bits nobody can foretell without the key.

    A forked process takes a fresh key, so that parent and child never share noise. A virtual machine that is copied, or put
    back to a snapshot while it runs, cannot know that it goes on with the same key: so `refresh` is called before every
    message and every batch.

    Args:
        key: 32 bytes, for tests only; None takes them from the operating system.
    """

    def __init__(self, key: bytes | None = None) -> None:
        if key is not None and len(key) != 32:
            raise UsageError(f"a key of {len(key)} bytes: AES-256 needs 32")
        self._zeros = bytes(8 * _BLOCK)
        _ALIVE.add(self)
        self._given = key is not None
        self._start(key)

    def _start(self, key: bytes | None = None) -> None:
        self._process, key = os.getpid(), key or os.urandom(32)
        # two keystreams that never meet: their counters start 2^127 apart
        self._main, self._further = (
            Cipher(algorithms.AES(key), modes.CTR((stream << 127).to_bytes(16, "big"))).encryptor()
            for stream in (0, 1)
        )

    def refresh(self) -> None:
        """Mix fresh bits of the operating system into the key, so that a machine put back to a snapshot goes on with other
        noise, as far as its operating system has other bits. A key that was given stays."""
        self._renew_after_fork()
        if not self._given:
            self._start(hashlib.sha256(self._main.update(bytes(32)) + os.urandom(32)).digest())

    def _renew_after_fork(self) -> None:
        if os.getpid() != self._process:  # forked by something other than Python
            self._start()

    def words(self, count: int) -> Words:
        """`count` uniform 64-bit words."""
        self._renew_after_fork()
        out = np.empty(count, dtype=np.uint64)
        view = out.view(np.uint8).data
        for start in range(0, 8 * count, len(self._zeros)):
            part = view[start : start + len(self._zeros)]
            self._main.update_into(self._zeros[: len(part)], part)
        return out

    def more(self) -> int:
        """64 further bits for a sample that needs them, from a stream of its own."""
        self._renew_after_fork()
        return int.from_bytes(self._further.update(bytes(8)), "little")

    def bernoulli(self, probability: float, size: int) -> NDArray[np.bool_]:
        """True with exactly the given probability: U < p, more bits drawn where 64 do not tell."""
        if not 0 <= probability <= 1:
            raise UsageError(f"probability {probability}: it must lie between 0 and 1")
        if probability == 1:
            return np.ones(size, dtype=np.bool_)
        whole, rest = divmod(Fraction(probability) * (1 << 64), 1)
        drawn = self.words(size)
        out = np.less(drawn, np.uint64(whole))
        for tie in np.flatnonzero(drawn == np.uint64(whole)):
            out[tie] = self._below(rest)
        return out

    def _below(self, probability: Fraction) -> bool:
        """Whether a fresh uniform number is below a rational one."""
        while probability:
            whole, probability = divmod(probability * (1 << 64), 1)
            word = self.more()
            if word != whole:
                return word < whole
        return False

    def discrete_laplace(self, scale: float, size: int) -> Integers:
        """Integers with P(k) = tanh(1/2t) exp(-|k|/t), t = `scale` in grid units.

        G = floor(-t ln U) is geometric: P(G >= k) = P(U <= e^(-k/t)) = r^k with r = e^(-1/t). A fair sign
        makes it two-sided; (-, 0) is drawn again, so that zero does not count twice: P(0) = ((1-r)/2) / (1 -
        (1-r)/2) = (1-r)/(1+r) = tanh(1/2t), and P(±k) = r^k (1-r)/(1+r). ∎

        Samples beyond ±2^62 are cut, which happens with probability at most exp(-2^62/t) <= exp(-2^18) each, even at
        the largest scale t = 2^44, and at most twice as often in `discrete_gaussian`. As a double that is 0: nothing to charge.
        """
        _check_scale(scale)
        out = np.empty(size, dtype=np.int64)
        for start in range(0, size, _BLOCK):
            block = out[start : start + _BLOCK]
            again = self._signed_geometric(scale, block)
            while again.size:
                fresh = np.empty(again.size, dtype=np.int64)
                rejected = self._signed_geometric(scale, fresh)
                block[again] = fresh
                again = again[rejected]
        return out

    def _signed_geometric(self, scale: float, out: Integers) -> NDArray[np.intp]:
        """Fill `out`; return where the result was (-, 0)."""
        drawn = self.words(out.size)
        negative = (drawn & np.uint64(1)).view(np.int64)
        first = drawn >> np.uint64(64 - _FIRST)
        out[:] = self._geometric(scale, first)
        again = np.flatnonzero(out < negative)
        # two's complement: (x ^ -1) + 1 = -x
        out ^= -negative
        out += negative
        return again

    def _geometric(self, scale: float, first: Words) -> Integers:
        """floor(-t ln U) for U in [m, m+1) / 2^53, m = `first`: -t ln U exceeds -t ln((m+1)/2^53) by at most t/m."""
        m = first.astype(np.float64)
        low = np.log((m + 1) * 2.0**-_FIRST)
        low *= -scale
        with np.errstate(divide="ignore"):
            np.divide(scale, m, out=m)
        high = low * (1 + _RELATIVE)
        high += m
        high *= 1 + _RELATIVE
        low *= 1 - _RELATIVE
        np.floor(low, out=low)
        np.floor(high, out=high)
        out = low.astype(np.int64)
        for at in np.flatnonzero(low != high):
            out[at] = exact_geometric(scale, int(first[at]), _FIRST, self.more)
        return out

    def discrete_gaussian(self, sigma: float, size: int) -> Integers:
        """Integers with P(k) ∝ exp(-k²/2σ²), σ = `sigma` in grid units.

        Rejection from the discrete Laplace Y of scale σ (Canonne, Kamath, Steinke 2020): accept with
        probability exp(-(|Y|/σ - 1)²/2); then P(k) ∝ exp(-|k|/σ - k²/2σ² + |k|/σ - 1/2). About three in four
        are accepted. ∎
        """
        _check_scale(sigma)
        out = np.empty(size, dtype=np.int64)
        filled = 0
        while filled < size:
            wanted = min(_BLOCK, int((size - filled) * 1.4) + 16)
            candidates = self.discrete_laplace(sigma, wanted)
            kept = candidates[self._accepted(sigma, candidates)][: size - filled]
            out[filled : filled + kept.size] = kept
            filled += kept.size
        return out

    def _accepted(self, sigma: float, candidates: Integers) -> NDArray[np.bool_]:
        """Whether U < p = exp(-(|k|/σ - 1)²/2), for U in [m, m+1) / 2^53.

        With a = |k|/σ, the exponent's error is below 4 |a-1| a 2⁻⁵³, which moves p by less than 2⁻⁴⁹; exp
        adds 16 units in the last place. So the computed p is within 2⁻⁴² of the true one.
        """
        first = self.words(candidates.size) >> np.uint64(64 - _FIRST)
        exponent = np.abs(candidates) / sigma
        exponent -= 1
        exponent *= exponent
        exponent *= -0.5
        gap = np.exp(exponent, out=exponent)
        gap -= first * 2.0**-_FIRST
        accepted = gap > 0
        for at in np.flatnonzero(np.abs(gap) < 2 * _ABSOLUTE):
            k = abs(int(candidates[at]))
            accepted[at] = exact_acceptance(sigma, k, int(first[at]), _FIRST, self.more)
        return accepted


def _renew_all() -> None:
    """In a forked process: process numbers are reused, so comparing them does not tell a grandchild from its forebear."""
    for keystream in list(_ALIVE):
        keystream._start()


os.register_at_fork(after_in_child=_renew_all)


def discrete_gaussian_slack(sigma: float, coordinates: int, rounds: int) -> float:
    """Total variation distance to pass as ``distance`` when discrete Gaussian noise of `sigma` grid steps is charged as
    continuous noise of variance sigma² - 1/12 (rounding that one to integers gives back the variance 1/12).

    Z has P(k) ∝ exp(-k²/2σ²) on integers; Y = round(X), X normal with variance s² = σ² - 1/12. Adding Y to
    integers is rounding after adding X, so Y costs what X costs, sampled or not. Claim: for σ >= 64 the
    distance of Z and Y is at most 2B + 2ζ with c = 14, ζ = 3 e^(-c²/2) and B = c²/(288 s⁴) + (c²σ²/(4s⁴) +
    1/(2s²))²/8, about 315/σ⁴.

    Proof. Put w = 1/(2s²), z = k/(2s²). Then P(Y=k) = const · exp(-k²/2s²) I(k), I(k) = ∫ cosh(2zu) exp(-wu²)
    du over |u| <= 1/2. On |k| <= cσ: |z| <= 1/8 and w <= 2⁻¹². Taylor with remainder, using ∫u² = 1/12 and
    ∫u⁴ = 1/80: I = 1 + z²/6 - w/12 + E, |E| <= 1.01 z⁴/24 + z²w/40 + 1.01 w²/160, and |ln I - (I-1)| <=
    (I-1)², so |ln I - z²/6 + w/12| <= (z² + w)²/8. Since -k²/2s² + k²/2σ² = -k²/(24 s²σ²) and z²/6 = k²/(24
    s⁴), the rest is k²/(288 s⁴σ²) <= c²/(288 s⁴): the choice of s cancels the leading term. So
    ln(P(Y=k)/P(Z=k)) is a constant plus at most B either way. Both tails beyond cσ are below ζ (P(|Z| >= cσ)
    <= 2e^(-c²/2), and rounding moves X by 1/2), so the constant is at most B - ln(1-ζ) and the ratio at most
    e^(2B)/(1-ζ); half its distance from 1, plus the tails, is below 2B + 2ζ. Fresh noise is independent of
    all before it, so distances add over coordinates and rounds. ∎
    """
    if not sigma >= 64:
        raise UsageError(
            f"discrete Gaussian noise of {sigma} grid steps is too coarse: use a grid of sigma/64 or finer"
        )
    c, s2 = 14.0, sigma * sigma - 1 / 12
    b = c * c / (288 * s2 * s2) + (c * c * sigma * sigma / (4 * s2 * s2) + 1 / (2 * s2)) ** 2 / 8
    return min(1.0, coordinates * rounds * (2 * b + 6 * math.exp(-c * c / 2)))


def exact_geometric(scale: float, first: int, bits: int, more: Callable[[], int]) -> int:
    """floor(-t ln U) for the U that starts with the `bits` bits of `first`; `more` supplies 64 bits at a time."""
    while True:
        with localcontext(Context(prec=40 + bits * 2 // 3)) as context:  # twice the digits of U, and 40 more
            unit, t = Decimal(2) ** bits, Decimal(scale)
            low = -t * (Decimal(first + 1) / unit).ln()
            high = -t * (Decimal(first) / unit).ln() if first else Decimal(2) ** 80
            doubt = Decimal(10) ** (20 - context.prec)  # far more than the roundings of values below 2^50
            bottom = max(0, int((low - doubt).to_integral_value(ROUND_FLOOR)))
            top = int((high + doubt).to_integral_value(ROUND_FLOOR))
        if bottom == top or bottom >= 1 << 62:
            return min(bottom, 1 << 62)
        first, bits = first << 64 | more(), bits + 64


def exact_acceptance(sigma: float, k: int, first: int, bits: int, more: Callable[[], int]) -> bool:
    """Whether U < exp(-(k/σ - 1)²/2) for the U that starts with the `bits` bits of `first`."""
    while True:
        with localcontext(Context(prec=40 + bits * 2 // 3)) as context:  # twice the digits of U, and 40 more
            unit = Decimal(2) ** bits
            probability = (-((Decimal(k) / Decimal(sigma) - 1) ** 2) / 2).exp()
            doubt = Decimal(10) ** (20 - context.prec)
            if Decimal(first + 1) / unit <= probability - doubt:
                return True
            if Decimal(first) / unit >= min(probability + doubt, Decimal(1)):
                return False
        if k == sigma:  # probability 1 exactly
            return True
        first, bits = first << 64 | more(), bits + 64


def _check_scale(scale: float) -> None:
    if not 0 < scale <= LARGEST_SCALE:
        raise UsageError(
            f"noise of {scale} grid units: must be positive and at most 2^44; choose another grid"
        )
