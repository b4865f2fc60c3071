"""Attacks on noise that cancels: an observer of all messages who also has the secrets of some nodes.

The networks of `dpps.audit.epsilon` have one more kind of member here: colluders. Their data and their own noise are
theirs to tell, and the observer computes the pair noise that they share with honest nodes from their keys and subtracts
it. What is left of the honest rows is scored by the exact likelihood ratio of the covariance that the proof names. The
coalition is placed where it learns most about node 0, whose input tells the worlds apart.

Whether the noise really cancels shows in the network's mean, not in single messages: `audit_mean`.
"""

import hashlib
import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, product
from typing import Any, Literal

import networkx
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import chi2
from torch import Tensor
from torch.utils.data import TensorDataset

from dpps.audit.epsilon import (
    CLAIM,
    DELTA,
    SABOTAGE,
    SAMPLING,
    WIDTH,
    Case,
    NoiseFor,
    Scores,
    Weakened,
    Wiretap,
    beside,
    calibration,
    linear_run,
    solved,
)
from dpps.learning import PartPSP
from dpps.noise import (
    Gaussian,
    IdentityKey,
    Keystream,
    Mechanism,
    MemberPairs,
    NoiseLevel,
    NoiseSource,
    Outgoing,
    PairKeys,
    PairRounds,
    Partners,
    SecureNoise,
    SecurePairs,
    Seeded,
    SeededPairs,
    Shares,
)
from dpps.noise.pairs import Part
from dpps.privacy import Contribution, Pairs, Record
from dpps.protocol import DPPS
from dpps.sensitivity import Unclipped
from dpps.topology import Exponential

Matrix = NDArray[np.float64]
Present = NDArray[np.bool_] | None
"""Which nodes take part in a round; None: everybody."""
Suspicion = Literal["nothing", "no pair noise", "key used twice"]
Source = Callable[[Partners], SecurePairs]


def known_noise(
    source: SecurePairs,
    coalition: Collection[int],
    scale: float,
    round_: int,
    size: int,
    present: Present = None,
) -> Matrix:
    """The noise in the rows of honest nodes that they share with members of the coalition, (nodes, size)."""
    known, partners = np.zeros((source.partners.nodes, size)), source.partners
    if partners.shares(present).pair == 0:
        return known
    step, deviation = source.lattice(scale, present)
    for i, j in partners.among(present).tolist():
        if (i in coalition) != (j in coalition):
            shared = source.of_pair(i, j, round_, deviation, size) * step
            known[i] += shared
            known[j] -= shared
    known[list(coalition)] = 0
    return known


def unknown_covariance(partners: Partners, honest: Sequence[int], present: Present = None) -> Matrix:
    """Covariance of the honest nodes' noise, without what they share with others; a message without partners has variance 1."""
    shares, (first, second) = partners.shares(present), partners.among(present).T
    sign = np.equal.outer(honest, first) * 1.0 - np.equal.outer(honest, second)
    sign = sign[:, np.isin(first, honest) & np.isin(second, honest)]
    covariance: Matrix = shares.independent**2 * np.eye(len(honest)) + shares.pair**2 * sign @ sign.T
    return covariance


@lru_cache(maxsize=32)
def worst_coalition(partners: Partners, colluders: int) -> tuple[int, ...]:
    """Where so many colluders learn most about node 0."""

    def known(coalition: tuple[int, ...]) -> float:
        honest = [k for k in range(partners.nodes) if k not in coalition]
        return float(np.linalg.inv(unknown_covariance(partners, honest))[0, 0])

    return max(combinations(range(1, partners.nodes), colluders), key=known)


def log_ratio(covariance: Matrix, shift: Matrix, seen: Matrix) -> Scores:
    """ln of the density of noise around `shift` over that around -shift, halved, at every column of `seen`."""
    return np.asarray(shift @ np.linalg.solve(covariance, seen))


# Sabotage, which must be found


class NoPairNoise(SecurePairs):
    """The independent noise is as small as if there were pair noise, and there is none."""

    def shared(self, scale: float, out: Outgoing) -> tuple[NDArray[np.int32], float]:
        whole, step = super().shared(scale, out)
        return np.zeros_like(whole), step


class ReusedKey(SecurePairs):
    """Every round has the pair noise of round 0."""

    def shared(self, scale: float, out: Outgoing) -> tuple[NDArray[np.int32], float]:
        assert self.pair_keys is not None
        self.pair_keys._next = 0
        return super().shared(scale, replace(out, round=0))


class WrongSign(SecurePairs):
    """Both partners add what they share."""

    def shared(self, scale: float, out: Outgoing) -> tuple[NDArray[np.int32], float]:
        whole, step = super().shared(scale, out)
        deviation = self.lattice(scale)[1]
        for k, node in enumerate(out.nodes):
            earlier = [i for i in out.nodes if i < node]
            whole[k] += 2 * sum(self.of_pair(i, node, out.round, deviation, whole.shape[1]) for i in earlier)
        return whole, step


class AsIfAllWereThere(Partners):
    """The noise of a round is split as if nobody were away."""

    def shares(self, present: Present = None) -> Shares:
        return super().shares(None)


# A coalition of colluders


class SideBySide(NoiseSource):
    """One source for many networks: their rows are the columns of one network, whose noise is independent per coordinate.

    `make` gives a secure source its partners, so that twins can be made.
    """

    def __init__(self, inner: NoiseSource, make: Source = SecurePairs) -> None:
        self.inner, self.part = _unwrapped(inner)
        self._make = make

    def grid(self, scale: float) -> float:
        return self.inner.grid(scale)

    def discreteness(self, step: float) -> float:
        return self.inner.discreteness(step)

    def with_partners(self, partners: Partners) -> NoiseSource:
        self.inner = _with_partners(self.inner, partners, self._make)
        return self

    def release(self, mechanism: Mechanism, scale: float, out: Outgoing) -> Tensor:
        assert isinstance(self.inner, (SecurePairs, SeededPairs))
        nodes = self.inner.partners.nodes
        s, perturbation, half = (beside(x, nodes) for x in (out.s, out.perturbation, out.half))
        one = replace(out, s=s, perturbation=perturbation, half=half, nodes=range(nodes))
        self.inner.release(mechanism, self.part * scale, one)
        width = out.half.shape[1]
        out.half.copy_(beside(half.view(-1, width), len(out.half) // nodes).view(out.half.shape))
        return torch.full((len(out.nodes),), math.nan, dtype=torch.float64)


def _unwrapped(source: NoiseSource) -> tuple[NoiseSource, float]:
    """The source behind a weakened one, and how much of the noise that should be there it has."""
    return (source.source, SABOTAGE) if isinstance(source, Weakened) else (source, 1.0)


def _with_partners(source: NoiseSource, partners: Partners, make: Source = SecurePairs) -> NoiseSource:
    return make(partners) if isinstance(source, SecureNoise) else source.with_partners(partners)


@dataclass(frozen=True)
class WorldByWorld(Case):
    """A case whose two worlds are run one after the other."""

    def scores(self, copies: int, noise: NoiseFor, seed: int) -> tuple[Scores, Scores]:
        zero, one = (np.round(self._world(copies, noise(seed + w), seed + w, 1 - 2 * w), 9) for w in (0, 1))
        return zero, one

    @abstractmethod
    def _world(self, copies: int, source: NoiseSource, seed: int, sign: int) -> Scores:
        """The scores of world 0 (sign 1) or of world 1 (sign -1)."""


@dataclass(frozen=True)
class PairsCase(WorldByWorld):
    """A unit with partners against a coalition; both rounds' inputs are as far apart as allowed, in opposite directions."""

    unit: Contribution | Record
    nodes: int = 5
    known: int = 1
    """How many nodes really collude."""
    make: Source = SecurePairs
    suspicion: Suspicion = "nothing"

    def _world(self, copies: int, source: NoiseSource, seed: int, sign: int) -> Scores:
        beside, wire = SideBySide(source, self.make), Wiretap(self.nodes, copies)
        scales, start = self._send(wire, beside, seed, copies, sign), torch.zeros(self.nodes * copies, WIDTH)
        partners = self.unit.trust.partners(self.nodes)
        assert partners is not None
        keys = isinstance(beside.inner, SecurePairs)  # seeded noise is drawn without keys to tell
        coalition = worst_coalition(partners, self.known) if keys else ()
        honest = [k for k in range(self.nodes) if k not in coalition]
        rounds = []
        for t, (fresh, scale) in enumerate(zip(wire.fresh(start), scales, strict=True)):
            rows = fresh.reshape(copies, self.nodes).T
            if isinstance(beside.inner, SecurePairs) and not isinstance(beside.inner, NoPairNoise):
                at = 0 if isinstance(beside.inner, ReusedKey) else t
                shared = known_noise(beside.inner, coalition, beside.part * scale, at, copies * WIDTH)
                rows = rows - shared[:, ::WIDTH]
            rounds.append(rows[honest] / scale)
        return self._score(partners, honest, rounds, scales)

    def _score(
        self, partners: Partners, honest: list[int], rounds: list[Matrix], scales: list[float]
    ) -> Scores:
        """By the exact likelihood ratio, if the suspicion is right."""
        covariance, first, clip = unknown_covariance(partners, honest), np.eye(len(honest))[0], self.unit.clip
        if isinstance(self.unit, Record):
            total: Scores = np.zeros(rounds[0].shape[1])
            for rows, scale in zip(rounds, scales, strict=True):
                shift = clip / scale * first
                half = log_ratio(covariance, shift, shift[:, None]) / 2
                total += np.log1p(SAMPLING * np.expm1(log_ratio(covariance, shift, rows) - half))
            return total
        own = partners.shares().independent ** 2 * np.eye(len(honest))
        shared = np.zeros_like(own) if self.suspicion == "no pair noise" else covariance - own
        repeats = np.ones((2, 2)) if self.suspicion == "key used twice" else np.eye(2)
        # between +clip, -clip and -clip, +clip
        shifts = np.concatenate([first * 2 * clip / scales[0], -first * 2 * clip / scales[1]])
        return log_ratio(np.kron(np.eye(2), own) + np.kron(repeats, shared), shifts, np.concatenate(rounds))

    def _send(self, wire: Wiretap, noise: NoiseSource, seed: int, copies: int, sign: int) -> list[float]:
        """Two rounds of the shipped code; the scales of their noise."""
        if isinstance(self.unit, Record):  # as in `RecordCase`: in world 0 node 0 has an example more
            there, gone = torch.zeros(2, 2, WIDTH)
            there[0, 0] = -100 * self.unit.clip * (sign > 0)
            data = [TensorDataset(x, torch.ones(2)) for x in (there, *[gone] * (self.nodes - 1))] * copies
            unit = solved(self.unit, 2, SAMPLING, self.nodes)
            run = linear_run(PartPSP, data, unit, wire, noise, seed).start(epochs=1)
            return [run.step().scale for _ in range(2)]
        made, topology = calibration(self.unit, 2, SAMPLING, self.nodes), Exponential(self.nodes)
        source = made.source(noise)
        protocol = DPPS(topology, made.mechanism, made.sensitivity, noise=source, fabric=wire)
        rows = torch.zeros(self.nodes * copies, WIDTH)
        state = protocol.start(rows)
        rows[:: self.nodes, 0] = 10 * self.unit.clip * sign  # far above the clip
        return [protocol.step(state, change).scale for change in (rows, -rows)]


# Rounds from which nodes are away: fewer nodes hide each other less

_NODES, _COLLUDER = 5, 4
_AWAY = {0: [2, 3], 1: [1, 2, 3]}  # in round 1 one honest node is left with the colluder


@dataclass(frozen=True)
class AwayCase(WorldByWorld):
    """Unit contribution, five nodes, everybody everybody's partner, one colluder; two are away in round 0 and three in round 1.

    One network, whose rows have a coordinate for every trial: noise is independent per coordinate. The protocol would
    clip rows as a whole; here each coordinate moves as far as the noise is calibrated to.
    """

    unit: Contribution
    partners: Callable[[int, None, int], Partners] = Partners

    def _world(self, copies: int, source: NoiseSource, seed: int, sign: int) -> Scores:
        mechanism, clip = calibration(self.unit, 2, SAMPLING, _NODES).mechanism, self.unit.clip
        inner, part = _unwrapped(source)
        inner = _with_partners(inner, self.partners(_NODES, None, 1))
        noise = inner if part == 1 else Weakened(inner)
        wire, topology = Wiretap(_NODES), Exponential(_NODES).with_dropouts(_AWAY)
        protocol = DPPS(topology, mechanism, Unclipped(2 * clip), noise=noise, fabric=wire)
        rows = torch.zeros(_NODES, copies)
        state = protocol.start(rows)
        rows[0] = sign * clip
        total = np.zeros(copies)
        for t in range(2):
            before, present = state.s.clone(), topology.present(t)
            assert present is not None
            scale = protocol.step(state, rows).scale
            fresh, here = (wire.messages[-1] - before).double().numpy(), np.flatnonzero(present).tolist()
            if isinstance(inner, SecurePairs):  # seeded noise is drawn without keys to tell
                fresh -= known_noise(inner, [_COLLUDER], part * scale, t, copies, present)
                here.remove(_COLLUDER)
            shift = 2 * clip / scale * np.eye(len(here))[0]  # node 0 is never away
            covariance = unknown_covariance(Partners(_NODES, None, 1), here, present)  # the promised one
            total += log_ratio(covariance, shift, fresh[here] / scale)
        return total


# Attacks on noise that cancels between members that come and go: one is away and makes up for it, one is lost and expelled.
#
# Five members, one colluder, one lost. The observer sees all messages, has the colluder's keys, and knows which noise the code puts
# into which message. So it scores by the exact likelihood ratio of what is really sent, also by a twin. Each twin breaks one premise of the
# proof (docs/cancelling-noise.md) and must be found out.

_LOST = 3


@dataclass(frozen=True)
class Schedule:
    """Who misses which rounds, and when the lost member is expelled: chosen so that a twin shows most.

    Attributes:
        away: by member, the rounds that it misses; the lost one never comes back.
        rounds: how many there are.
        last: the last round that the lost member has released.
        expelled: the round from which on the others know.
        victim: whose updates tell the worlds apart.
        updates: the two rounds that they are in, as many as the noise is calibrated for.
    """

    away: Mapping[int, tuple[int, ...]]
    rounds: int
    last: int
    expelled: int
    victim: int
    updates: tuple[int, int]


_STAYS = Schedule({0: (1,), 1: (1,), 2: (0, 1), _LOST: (2, 3, 4)}, 5, 1, 2, 2, (3, 4))
_IS_LOST = Schedule({0: (0, 3), 1: (3,), 2: (3,), _LOST: (2, 3, 4)}, 5, 1, 2, _LOST, (0, 1))
_MAKES_UP = Schedule({0: (0,), 1: (2, 4), 2: (0, 4), _LOST: (4, 5)}, 6, 3, 4, 0, (4, 5))
_COUNTS = Schedule({1: (1,), 2: (0, 1), _LOST: (0, 1, 3, 4)}, 5, 2, 4, 2, (3, 4))
_REPEATS = Schedule({0: (3,), 1: (0,), 2: (2, 4), _LOST: (3, 4, 5)}, 6, 2, 4, 0, (1, 5))


class WithoutOwnNoise(PairRounds):
    """A missed round is made up for with pair noise alone."""

    def message(self, round_: int) -> list[Part]:
        return [replace(part, own=part.own and part.round == round_) for part in super().message(round_)]


class TakesBackReleased(PairRounds):
    """Noise is taken back of rounds that the lost member has released."""

    def lose(self, partner: int, last: int) -> bool:
        return super().lose(partner, -1)


class Repeats(PairRounds):
    """The pair noise of every round is that of the first: what a repeated round, or an older copy of a folder, would send."""

    def message(self, round_: int) -> list[Part]:
        return [replace(part, round=0) for part in super().message(round_)]


@dataclass(frozen=True)
class MemberCase(WorldByWorld):
    """Unit contribution; all noise that the proof needs is there, or not.

    A row has a coordinate for every trial, each of which moves as far as the noise is calibrated to.
    """

    unit: Contribution
    schedule: Schedule = _STAYS
    rounds: type[PairRounds] = PairRounds
    aware: int = 1
    """Of how many lost members the calibration knows."""

    def _world(self, copies: int, source: NoiseSource, seed: int, sign: int) -> Scores:
        inner, part = _unwrapped(source)
        mechanism, clip = calibration(self.unit, 2, SAMPLING, _NODES).mechanism, self.unit.clip
        scale, week = mechanism.scale(2 * clip), self.schedule
        partners = Partners(_NODES, None, 1, absentees=self.aware)
        members = _members(
            partners, self.rounds, part * scale, inner.seed if isinstance(inner, Seeded) else None
        )
        made, told, shifts = [], [], []
        for r, (node, member) in product(range(week.rounds), enumerate(members)):
            if r in week.away.get(node, ()):
                continue
            if r >= week.expelled:
                member.rounds.lose(_LOST, week.last)
            moves = node == week.victim and r in week.updates
            update = torch.full((1, copies), sign * clip * moves, dtype=torch.float64)
            zero, half = torch.zeros_like(update), torch.zeros_like(update)
            member.release(mechanism, part * scale, Outgoing(zero, update, half, [node], r, True, False))
            if node != _COLLUDER:
                made.append((node, member.parts))
                told.append(half[0].numpy() - _known(member, part * scale, copies))
                shifts.append(2 * clip * moves)
        covariance = _covariance(partners, made) * scale**2
        return log_ratio(covariance, np.array(shifts), np.stack(told))


class Noting(MemberPairs):
    """Remembers which noise it put into its last message."""

    parts: Sequence[Part] = ()

    def drawn(
        self, mechanism: Mechanism, parts: Sequence[Part], size: int, known: Mapping[int, NoiseLevel]
    ) -> tuple[NDArray[np.int64], float]:
        self.parts = parts
        return super().drawn(mechanism, parts, size, known)


def _members(
    partners: Partners, rounds: type[PairRounds], scale: float, seed: int | None
) -> Iterator[Noting]:
    """Five members, with keys of their own or of a seed."""

    def key(node: int, what: str) -> bytes | None:
        return None if seed is None else hashlib.sha256(f"{seed} {node} {what}".encode()).digest()

    identities = [IdentityKey(key(node, "pairs")) for node in range(_NODES)]
    publics = [identity.public for identity in identities]
    for node, identity in enumerate(identities):
        keys, own = PairKeys(identity, publics, "audit", bytes(16)), Keystream(key(node, "own"))
        member = Noting(partners, keys, node, own)
        member.rounds = rounds(node, member.rounds.partners, 1)
        level = NoiseLevel(0.0, scale, member.grid(scale))
        member.levels = dict.fromkeys(range(10), level).__getitem__
        yield member


def _known(member: Noting, scale: float, size: int) -> Matrix:
    """The noise in a member's last message that the colluder knows."""
    step, total = member.grid(scale), np.zeros(size)
    for part in member.parts:
        pairs = tuple(pair for pair in part.pairs if pair[0] == _COLLUDER)
        total += member.in_steps(replace(part, pairs=pairs), scale, size, step) * step
    return total


def _covariance(partners: Partners, made: Sequence[tuple[int, Sequence[Part]]]) -> Matrix:
    """Of the noise in these messages that nobody but their senders and honest partners know, per unit of scale."""
    shares, messages = partners.shares(), []
    for number, (node, parts) in enumerate(made):
        noise: Counter[tuple[int, ...]] = Counter()  # how much of each independent draw the message has
        for k, part in enumerate(parts):
            noise[number, k] = part.own * shares.independent  # type: ignore[assignment]
            for other, sign in part.pairs:
                if other != _COLLUDER:
                    noise[min(node, other), max(node, other), part.round] += sign * shares.pair  # type: ignore[assignment]
        messages.append(noise)
    draws = set().union(*messages)
    amounts = np.array([[noise[draw] for draw in draws] for noise in messages], dtype=np.float64)
    covariance: Matrix = amounts @ amounts.T
    return covariance


def member_cases() -> tuple[Case, ...]:
    """The claim for a member that stays and for the one that is lost, and what must be found out."""
    unit = Contribution(1.0, CLAIM, DELTA, "gaussian", trust=Pairs(1, absentees=1))
    leak: dict[str, Any] = {"secure_only": True, "leak_trials": 100_000}
    without: dict[str, Any] = leak | {"schedule": _MAKES_UP, "rounds": WithoutOwnNoise}
    released: dict[str, Any] = leak | {"schedule": _IS_LOST, "rounds": TakesBackReleased}
    unaware: dict[str, Any] = leak | {"schedule": _COUNTS, "aware": 0}
    repeated: dict[str, Any] = leak | {"schedule": _REPEATS, "rounds": Repeats}
    return (
        MemberCase(unit, "pairs, 1 colluder, 1 lost"),
        MemberCase(unit, "pairs, 1 colluder, of the lost one", schedule=_IS_LOST),
        MemberCase(unit, "pairs, missed rounds without own noise", **without),
        MemberCase(unit, "pairs, a released round taken back", **released),
        MemberCase(unit, "pairs, 1 lost, calibrated for none", **unaware),
        MemberCase(unit, "pairs, a repeated round", **repeated),
    )


def pair_cases() -> tuple[Case, ...]:
    """Every unit with partners, announced absences, members that come and go, and what must be found out."""
    pairs, sparse = Pairs(1), Pairs(1, graph=networkx.circulant_graph(6, [1, 2]))
    unit = Contribution(1.0, CLAIM, DELTA, "gaussian", trust=pairs)
    record, one = Record(CLAIM, DELTA, trust=pairs), "pairs, 1 colluder"
    leak: dict[str, Any] = {"secure_only": True, "leak_trials": 20_000}  # keys go wrong where there are keys
    without: dict[str, Any] = leak | {"make": NoPairNoise, "suspicion": "no pair noise"}
    twice: dict[str, Any] = leak | {"make": ReusedKey, "suspicion": "key used twice"}
    two: dict[str, Any] = leak | {"leak_trials": 100_000, "nodes": 3, "known": 2}
    away, as_if = f"{one}, 2 and 3 of 5 away", leak | {"partners": AsIfAllWereThere}
    return (
        PairsCase(unit, one),
        PairsCase(replace(unit, trust=sparse), "pairs, sparse, 1 colluder", nodes=6),
        PairsCase(record, one, seconds=6e-4),
        PairsCase(unit, "pairs, 2 colluders sold as 1", **two),
        PairsCase(unit, "pairs without pair noise", **without),
        PairsCase(unit, "pairs, key used twice", **twice),
        AwayCase(unit, away),
        AwayCase(unit, f"{away}, noise as if all were there", **as_if),
        *member_cases(),
    )


# Does the noise cancel in the mean?

CHANCE = 1e-10
"""That right noise is found outside the limits. Secure noise is different every time: this is how often an audit fails for no reason."""


@dataclass(frozen=True)
class MeanFinding:
    """Limits `low` and `high` of the variance of the noise in the mean, as multiples of the promised variance."""

    noise: str
    trials: int
    low: float
    high: float
    twin: float | None
    """The lower limit when both partners add what they share; None for seeded noise, which has no keys."""

    @property
    def as_expected(self) -> bool:
        """The promised variance is within the limits, and the wrong sign is caught."""
        return self.low <= 1 <= self.high and self.caught

    @property
    def caught(self) -> bool:
        """Whether noise that does not cancel was found out."""
        return self.twin is None or self.twin > 1


def audit_mean(trials: int, seed: int = 0, *, secure_noise: bool = False) -> MeanFinding:
    """Measure `trials` means of five nodes' messages, with one colluder allowed for; secure noise has a twin."""
    partners = Pairs(1).partners(5)
    if secure_noise:
        limits = mean_variance(SecurePairs(partners), partners, trials)
        return MeanFinding("secure", trials, *limits, mean_variance(WrongSign(partners), partners, trials)[0])
    return MeanFinding("seeded", trials, *mean_variance(SeededPairs(partners, seed), partners, trials), None)


def mean_variance(source: SecurePairs | SeededPairs, partners: Partners, trials: int) -> tuple[float, float]:
    """Limits of the variance of the noise in the network's mean over the promised one; noise that does not cancel is above 1."""
    rows = torch.zeros(partners.nodes, trials, dtype=torch.float64)
    source.release(
        Gaussian(1.0), 1.0, Outgoing(rows, rows.clone(), rows, range(partners.nodes), 0, True, False)
    )
    promised = partners.shares().independent ** 2 / partners.nodes
    total = float((rows.mean(0) ** 2).sum()) / promised
    return total / float(chi2.isf(CHANCE / 2, trials)), total / float(chi2.ppf(CHANCE / 2, trials))
