"""Noise that cancels: partners draw the same noise, one adds it and the other subtracts it (docs/cancelling-noise.md).

`SecurePairs` is for messages that really leave: whole numbers on a grid from keys that only the two partners have.
`SeededPairs` draws the same joint distribution of all nodes directly, for simulation. Both take the noise scale of a message
without partners and split it as the partner graph says, so a round costs the same with and without partners.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpps.errors import RunError, UsageError
from dpps.noise.mechanisms import Gaussian, Mechanism
from dpps.noise.pairs.graph import Partners, Present
from dpps.noise.pairs.keys import PairKeys, RoundStream
from dpps.noise.sampler import Keystream
from dpps.noise.source import (
    PAIRS,
    Draw,
    NoiseLevel,
    Outgoing,
    SecureNoise,
    Seeded,
    Streams,
    power_of_two_below,
)

# Pair noise: exact discrete Gaussian noise of a few to a few thousand steps, from a table.
#
# A sample is the k with F(k-1) <= U < F(k) for a uniform real number U, F the distribution function. Sixteen bits of U nearly
# always decide, and a table answers; otherwise 64 more bits are compared with F, and where these tie with it, 192 further
# ones. So the table only saves work, and both partners, who have the same bits, get the same numbers on any machine: F comes
# from whole-number arithmetic, and no floating point decides.

Stream = Callable[[int, int], bytes]
"""Given a stream's number (0, 1 or 2) and a count, that many bytes of it: always the same for the same noise."""

FEWEST, MOST = 2.0, 2.0**15
"""Standard deviations in steps that a table is made for."""

_CUT = 14  # standard deviations beyond which nothing is drawn
_BITS, _GUARD = 256, 384  # of F, and of the arithmetic behind it
_UNDECIDED = np.int32(-(1 << 31))


class GaussianTable:
    """Whole numbers with P(k) proportional to exp(-k^2 / 2 deviation^2); `gaussian_table` caches it."""

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
        undecided = np.flatnonzero(out == _UNDECIDED)
        if undecided.size:
            more = np.frombuffer(stream(1, 8 * undecided.size), dtype="<u8")
            value = (first[undecided].astype(np.uint64) << np.uint64(48)) | (more >> np.uint64(16))
            place = np.searchsorted(self._short, value, side="right")
            ties = np.flatnonzero(self._short[np.maximum(place, 1) - 1] == value)
            rest = stream(2, 24 * ties.size) if ties.size else b""
            for k, tie in enumerate(ties):
                low = int.from_bytes(rest[24 * k : 24 * k + 24], "little")
                place[tie] = bisect_right(self._exact, (int(value[tie]) << (_BITS - 64)) | low)
            out[undecided] = place - self.last
        return out


gaussian_table = lru_cache(maxsize=64)(GaussianTable)
"""The table of a standard deviation in steps."""


def table_slack(samples: int) -> float:
    """Distance of that many samples from true discrete Gaussian noise.

    Tails are cut beyond 14 standard deviations: P(|Z| > 14 sd) <= 2 exp(-14^2/2) for a discrete Gaussian (Canonne, Kamath,
    Steinke 2020, Proposition 25). F is rounded to 256 bits: a table has fewer than 2^20 values, each off by less than 2^-255.
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


# Which noise the next message of a member carries when members come and go: a state machine without input or output.
#
# A member's noise of a round is its own independent noise and its half of the noise of every pair. Three rules make the pair
# noise cancel without anybody waiting for anybody (docs/cancelling-noise.md proves that they cost no privacy):
#
# - every round's noise enters exactly one message: that of the round or, if the member missed it, its next message;
# - a pair's noise of the rounds that a lost partner can never have released is taken back, once, in the next message;
# - with that partner nothing is shared in later rounds.
#
# `to_json` must survive a crash: it is written together with the message, so both exist or neither does.


@dataclass(frozen=True)
class Part:
    """Noise of one round in a message: whether the independent noise of that round is in it, and (partner, sign) of the pair
    noise. A pair's first node adds it and the second subtracts it; taking back reverses the sign."""

    round: int
    own: bool
    pairs: tuple[tuple[int, int], ...]


class PairRounds:
    """The noise that the node `own` has given out, and what it still owes.

    Noise is taken back of at most `absentees` lost partners, for which the noise is calibrated (`Pairs`).

    Attributes:
        done: every round before this one has its noise in a message.
        lost: for each partner that was removed, the last round that is shared with it.
    """

    def __init__(self, own: int, partners: Sequence[int], absentees: int = 0) -> None:
        self.own, self.partners, self.absentees = own, tuple(partners), absentees
        self.done = 0
        self.lost: dict[int, int] = {}
        self._to_take_back: list[int] = []

    def lose(self, partner: int, last: int) -> bool:
        """Remove a partner that has released nothing after the round `last`, and never will. Returns whether its noise is
        taken back: not of more partners than `absentees`, and never twice."""
        if partner not in self.partners or partner in self.lost or len(self.lost) >= self.absentees:
            return False
        self.lost[partner] = max(last, -1)
        self._to_take_back.append(partner)
        return True

    def owes(self, round_: int) -> bool:
        """Whether a message at the end of this round would carry noise."""
        return self.done <= round_ or any(self.lost[each] + 1 < self.done for each in self._to_take_back)

    def message(self, round_: int) -> list[Part]:
        """Give out the noise of a round's message: its own, that of all missed rounds, and what is taken back. RunError: the
        noise of this round was given out before."""
        if round_ < self.done:
            raise RunError(
                f"the pair noise of round {round_} was given out before and must never be under two messages: nothing was sent; "
                "open the run anew, it goes on from what is on disk"
            )
        return self.last_message(round_)

    def last_message(self, round_: int) -> list[Part]:
        """What is owed after the last round, even if nothing was missed."""
        taken_back = [
            Part(earlier, False, ((partner, -self._sign(partner)),))
            for partner in self._to_take_back
            for earlier in range(self.lost[partner] + 1, self.done)
        ]
        due = []
        for each in range(self.done, round_ + 1):
            shared = (partner for partner in self.partners if self.lost.get(partner, each) >= each)
            due.append(Part(each, True, tuple((partner, self._sign(partner)) for partner in shared)))
        self._to_take_back, self.done = [], max(self.done, round_ + 1)
        return taken_back + due

    def _sign(self, partner: int) -> int:
        return 1 if self.own < partner else -1

    def to_json(self) -> dict[str, Any]:
        """For the disk, in the same write as the message."""
        lost = [[partner, last] for partner, last in self.lost.items()]
        return {"done": self.done, "lost": lost, "to_take_back": list(self._to_take_back)}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `to_json` gave."""
        self.done = saved["done"]
        self.lost = dict(saved["lost"])
        self._to_take_back = list(saved["to_take_back"])


# The sources

SMOOTH = 4.0
"""Pair noise lies on the coarsest grid on which its sum with the independent noise is still Gaussian: see `lattice_slack`."""

_PIECE = 1 << 20  # numbers drawn at a time
_FINER = 1 + 1 / 64  # pair noise of four steps or more is rounded up by a sixteenth of a step


class SecurePairs(SecureNoise):
    """Secure noise, part of it shared with partners; without `pair_keys` all nodes must be in this process."""

    def __init__(
        self, partners: Partners, pair_keys: PairKeys | None = None, keystream: Keystream | None = None
    ) -> None:
        super().__init__(keystream, pair_keys or PairKeys.alone(partners.nodes))
        self.partners = partners

    def for_local_part(self) -> SecureNoise:
        """Local parameters never meet in a sum, so nothing would cancel. But what rounding adds is shared between both parts
        (`Unclipped.rounding`), so their grids must be equally fine relative to their shares."""
        return SecureNoise(self.keystream, finer=self.partners.shares().independent)

    def grid(self, scale: float) -> float:
        # the smallest share of independent noise that any round can have: fewer nodes only need more of it
        return super().grid(scale * self.partners.shares().independent)

    def distance(self, mechanism: Mechanism, dimension: int, rounds: int) -> float:
        """Of all nodes' messages together, because together they are what hides a node."""
        alone = super().distance(mechanism, dimension * self.partners.nodes, rounds)
        pairs = len(self.partners.among())
        return alone + rounds * dimension * (lattice_slack(SMOOTH, pairs) + table_slack(pairs))

    def standard_deviation(self, mechanism: Mechanism, scale: float, present: Present = None) -> float:
        return scale * self.partners.message_deviation(present) * _FINER

    def _draws(self, mechanism: Mechanism, scale: float, step: float, out: Outgoing) -> Draw:
        _check(mechanism)
        own, (shared, coarse) = self.partners.shares(out.present).independent, self.shared(scale, out)

        def draw(k: int, size: int) -> tuple[np.ndarray, float]:
            noise = mechanism.draw_whole(self.keystream, scale * own / step, size)
            noise += shared[k].astype(np.int64) * round(coarse / step)
            return noise, step

        return draw

    def shared(self, scale: float, out: Outgoing) -> tuple[NDArray[np.int32], float]:
        """The pair noise that each row here adds, in whole steps, and the step."""
        assert self.pair_keys is not None
        if self.pair_keys.together and len(out.nodes) < len(_everybody(self.partners, out)):
            raise UsageError(
                "some nodes are in other processes and there are no keys to share with them, so the noise would not cancel: "
                "give SecureNoise(pair_keys=PairKeys(...)), as dpps train does"
            )
        self.pair_keys.claim(out.round)
        rows = {node: k for k, node in enumerate(out.nodes)}
        total = np.zeros((len(out.nodes), out.half.shape[1]), dtype=np.int32)
        step, deviation = self.lattice(scale, out.present)
        for i, j in self.partners.among(out.present).tolist():
            if deviation == 0 or (i not in rows and j not in rows):
                continue
            noise = self.of_pair(i, j, out.round, deviation, total.shape[1])
            if i in rows:
                total[rows[i]] += noise
            if j in rows:
                total[rows[j]] -= noise
        return total, step

    def of_pair(self, i: int, j: int, round_: int, deviation: float, size: int) -> NDArray[np.int32]:
        """The noise that the first of two partners adds in a round and the second subtracts, in steps of the lattice."""
        assert self.pair_keys is not None
        return gaussian_table(deviation).draw(RoundStream(self.pair_keys.key(i, j), round_), size)

    def lattice(self, scale: float, present: Present = None) -> tuple[float, float]:
        """The step of the pair noise, a power of two times the grid's, and its standard deviation in steps, rounded up."""
        split = self.partners.shares(present)
        if split.pair == 0:
            return self.grid(scale), 0.0
        largest = self.partners.largest_eigenvalue(present)
        smooth = scale / math.sqrt(largest / split.independent**2 + 1 / split.pair**2)
        step = power_of_two_below(smooth / SMOOTH)
        if step < self.grid(scale):
            raise RunError(
                f"pair noise of {scale * split.pair:.3g} is finer than the noise grid: use a smaller partner graph"
            )
        return step, math.ceil(16 * scale * split.pair / step) / 16


class MemberNoise(SecureNoise):
    """The secure noise of one node whose partners come and go. `pairs` is the source that knows them, None before
    `with_partners`."""

    def __init__(self, pair_keys: PairKeys, node: int) -> None:
        super().__init__(pair_keys=pair_keys)
        self.node = node
        self.pairs: MemberPairs | None = None

    def with_partners(self, partners: Partners) -> "MemberPairs":
        """Always the same source: one place must know what was given out."""
        if self.pairs is None:
            assert self.pair_keys is not None
            self.pairs = MemberPairs(partners, self.pair_keys, self.node, self.keystream)
        if self.pairs.partners != partners:
            raise UsageError("a member's noise has one set of partners: make a new source")
        return self.pairs


class MemberPairs(SecurePairs):
    """Secure noise of one node in a process of its own, whose partners come and go.

    Attributes:
        rounds: which noise was given out.
        levels: the noise of a round, by its number; set before the first message.
        planned: how many rounds there are.
    """

    def __init__(
        self, partners: Partners, pair_keys: PairKeys, node: int, keystream: Keystream | None = None
    ) -> None:
        super().__init__(partners, pair_keys, keystream)
        pairs = (pair for pair in partners.among().tolist() if node in pair)
        self.node = node
        self.rounds = PairRounds(node, [j if i == node else i for i, j in pairs], partners.absentees)
        self.levels: Callable[[int], NoiseLevel] | None = None
        self.planned = 0

    def distance(self, mechanism: Mechanism, dimension: int, rounds: int) -> float:
        """Of all planned rounds: the proof counts missed ones, too."""
        return super().distance(mechanism, dimension, max(rounds, self.planned))

    def _draws(self, mechanism: Mechanism, scale: float, step: float, out: Outgoing) -> Draw:
        """The noise of a round, and that of the rounds that were missed before it."""
        _check(mechanism)
        if list(out.nodes) != [self.node] or out.present is not None or not out.base_is_public:
            raise UsageError(
                f"rows of nodes {list(out.nodes)}: a member releases the row of node {self.node} alone, in every round, in the unit record "
                "or contribution with a public start"
            )
        assert self.pair_keys is not None
        self.pair_keys.claim(out.round)
        parts, known = self.rounds.message(out.round), {out.round: NoiseLevel(0.0, scale, step)}
        return lambda _, size: self.drawn(mechanism, parts, size, known)

    def last_message(self, mechanism: Mechanism, last: int, size: int) -> Tensor | None:
        """All noise that is owed up to the round `last`, without an update; None if nothing is owed."""
        if not self.rounds.owes(last):
            return None
        self.keystream.refresh()
        noise, finest = self.drawn(mechanism, self.rounds.last_message(last), size, {})
        return torch.from_numpy(noise.astype(np.float64) * finest)

    def drawn(
        self, mechanism: Mechanism, parts: Sequence[Part], size: int, known: Mapping[int, NoiseLevel]
    ) -> tuple[NDArray[np.int64], float]:
        """The sum of these parts in whole steps, and the step. Steps are powers of two: each is a multiple of the finest."""
        levels = {part.round: known.get(part.round) or self._level(part.round) for part in parts}
        finest = min(level.step for level in levels.values())
        total = np.zeros(size, dtype=np.int64)
        for part in parts:
            level = levels[part.round]
            if part.own:
                steps = level.scale * self.partners.shares().independent / level.step
                own = mechanism.draw_whole(self.keystream, steps, size)
                total += own * round(level.step / finest)
            total += self.in_steps(part, level.scale, size, finest)
        return total, finest

    def in_steps(self, part: Part, scale: float, size: int, step: float) -> NDArray[np.int64]:
        """The pair noise of a part in whole steps of this size."""
        total = np.zeros(size, dtype=np.int64)
        coarse, deviation = self.lattice(scale)
        if deviation:
            for partner, sign in part.pairs:
                i, j = sorted((self.node, partner))
                total += sign * self.of_pair(i, j, part.round, deviation, size).astype(np.int64)
        return total * round(coarse / step)

    def _level(self, round_: int) -> NoiseLevel:
        if self.levels is None:
            raise UsageError("the noise of missed rounds is not known: set levels before the first message")
        return self.levels(round_)


class SeededPairs(Seeded):
    """Seeded noise with the joint distribution that partners make: for simulation.

    Complete graph: sigma^2 I + tau^2 (n I - J) is a^2 (I - J/n) + sigma^2 J/n with a^2 = sigma^2 + n tau^2, so n independent
    draws g_i suffice: a (g_i - mean) + sigma mean. Any other graph: the square root of its covariance times n draws.
    """

    def __init__(self, partners: Partners, seed: int | None = None) -> None:
        super().__init__(seed)
        self.partners = partners
        self._pair_streams = Streams(self.seed, PAIRS)
        self._root: tuple[bytes, Tensor] | None = None

    def standard_deviation(self, mechanism: Mechanism, scale: float, present: Present = None) -> float:
        return scale * self.partners.message_deviation(present)

    def release(self, mechanism: Mechanism, scale: float, out: Outgoing) -> Tensor:
        if scale == 0:
            return torch.zeros(len(out.nodes), dtype=torch.float64)
        _check(mechanism)
        before = out.half.clone() if out.norms else None
        (self._complete if self.partners.edges is None else self._sparse)(mechanism, scale, out)
        if before is None:
            return torch.zeros(len(out.nodes), dtype=torch.float64)
        return (out.half - before).abs().sum(1).to("cpu", torch.float64)

    def _complete(self, mechanism: Mechanism, scale: float, out: Outgoing) -> None:
        everybody, split = _everybody(self.partners, out), self.partners.shares(out.present)
        around = math.sqrt(split.independent**2 + len(everybody) * split.pair**2)
        # the row of every node; beyond the last one: it is not here
        places = np.full(self.partners.nodes, len(out.nodes))
        places[list(out.nodes)] = np.arange(len(out.nodes))
        places = places[everybody]
        total = torch.zeros(out.half.shape[1], dtype=torch.float64)
        for rows, columns, unit in self._unit_noise(mechanism, everybody.tolist(), out):
            total[columns] += unit.sum(0)
            mine, target = places[rows], out.half[:, columns]
            held = mine < len(out.nodes)
            if held.all() and (np.diff(mine) == 1).all():
                target[mine[0] : mine[-1] + 1].add_(unit.to(target), alpha=scale * around)
            else:
                at = torch.from_numpy(mine[held]).to(target.device)
                target.index_add_(0, at, unit[torch.from_numpy(held)].to(target), alpha=scale * around)
        out.half.add_((total * (scale * (split.independent - around) / len(everybody))).to(out.half))

    def _sparse(self, mechanism: Mechanism, scale: float, out: Outgoing) -> None:
        everybody = _everybody(self.partners, out)
        root = self._square_root(everybody, out).to(out.half)
        here = torch.from_numpy(np.searchsorted(everybody, out.nodes)).to(out.half.device)
        width = max(1, _PIECE // len(everybody))
        for number, first in enumerate(range(0, out.half.shape[1], width)):
            target = out.half[:, first : first + width]
            kind = np.float64 if out.half.dtype == torch.float64 else np.float32
            unit = np.empty((len(everybody), target.shape[1]), dtype=kind)
            mechanism.draw(self._pair_streams.at(number, out.round), unit)
            noise = torch.mm(root, torch.from_numpy(unit).to(out.half.device))
            target.add_(noise if len(here) == len(everybody) else noise[here], alpha=scale)

    def _square_root(self, everybody: NDArray[np.int64], out: Outgoing) -> Tensor:
        """Of sigma^2 I + tau^2 L among the nodes of this round; kept for the next."""
        if self._root is None or self._root[0] != everybody.tobytes():
            split = self.partners.shares(out.present)
            covariance = np.zeros((self.partners.nodes, self.partners.nodes))
            first, second = self.partners.among(out.present).T
            covariance[first, second] = covariance[second, first] = -(split.pair**2)
            covariance = covariance[np.ix_(everybody, everybody)]
            np.fill_diagonal(covariance, split.independent**2 - covariance.sum(1))
            values, vectors = np.linalg.eigh(covariance)
            root = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
            self._root = everybody.tobytes(), torch.from_numpy(root)
        return self._root[1]


def lattice_slack(smooth: float, pairs: int) -> float:
    """Distance of (independent Gaussian + pair noise on a lattice) from the Gaussian of the same covariance, per coordinate.

    Let X be normal with covariance sigma^2 I, n discrete Gaussian of standard deviation tau on Z^E (E = `pairs`), B the
    incidence matrix of the pairs. The density of X + B n at v is proportional to exp(-v' Sigma^-1 v / 2) times the sum over n
    of exp(-(n-m)' Q (n-m) / 2), with Q = I/tau^2 + B'B/sigma^2 and m depending on v. By Poisson summation that sum is constant
    up to a factor 1 + theta, |theta| <= sum over k != 0 of exp(-2 pi^2 k' Q^-1 k) <= (1 + 2 sum_j exp(-2 pi^2 s^2 j^2))^E - 1,
    where s^2 = 1/(1/tau^2 + lambda_max/sigma^2) (s = `smooth`, in steps of the lattice) is at most the least eigenvalue of
    Q^-1. A density within a factor 1 +- theta of another is within 2 theta of it. (For sums in one dimension: Kairouz, Liu,
    Steinke 2021, Theorem 1.)
    """
    return 2 * math.expm1(pairs * (2.02 * math.exp(-2 * math.pi**2 * smooth**2)))


def _check(mechanism: Mechanism) -> None:
    if not isinstance(mechanism, Gaussian):
        raise UsageError(
            f"noise that cancels is Gaussian, and this is {mechanism}: sums of other noise have no known "
            "cost; use the Gaussian mechanism"
        )


def _everybody(partners: Partners, out: Outgoing) -> NDArray[np.int64]:
    return np.arange(partners.nodes) if out.present is None else np.flatnonzero(out.present)
