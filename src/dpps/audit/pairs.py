"""Attacks on noise that cancels: an observer of all messages who also has the secrets of some nodes.

The networks of `dpps.audit.epsilon` have one more kind of member here: colluders. Their data and their own noise are
theirs to tell, and the observer computes the pair noise that they share with honest nodes from their keys and subtracts
it. What is left of the honest rows is scored by the exact likelihood ratio of the covariance that the proof names. The
coalition is placed where it learns most about node 0, whose input tells the worlds apart.

Whether the noise really cancels shows in the network's mean, not in single messages: `audit_mean`.
"""

import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
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
    Scores,
    Weakened,
    Wiretap,
    WorldByWorld,
    calibration,
    linear_run,
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
    shares, place = partners.shares(present), {node: k for k, node in enumerate(honest)}
    covariance: Matrix = shares.independent**2 * np.eye(len(honest))
    for i, j in partners.among(present).tolist():
        if i in place and j in place:
            column = np.eye(len(honest))[place[i]] - np.eye(len(honest))[place[j]]
            covariance += shares.pair**2 * np.outer(column, column)
    return covariance


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
        s, perturbation, half = (_beside(x, nodes) for x in (out.s, out.perturbation, out.half))
        one = replace(out, s=s, perturbation=perturbation, half=half, nodes=range(nodes))
        self.inner.release(mechanism, self.part * scale, one)
        out.half.copy_(half.view(nodes, -1, out.half.shape[1]).transpose(0, 1).reshape(out.half.shape))
        return torch.full((len(out.nodes),), math.nan, dtype=torch.float64)


def _unwrapped(source: NoiseSource) -> tuple[NoiseSource, float]:
    """The source behind a weakened one, and how much of the noise that should be there it has."""
    return (source.source, SABOTAGE) if isinstance(source, Weakened) else (source, 1.0)


def _with_partners(source: NoiseSource, partners: Partners, make: Source = SecurePairs) -> NoiseSource:
    return make(partners) if isinstance(source, SecureNoise) else source.with_partners(partners)


def _beside(rows: Tensor, nodes: int) -> Tensor:
    """(copies x nodes, width) as (nodes, copies x width)."""
    return rows.view(-1, nodes, rows.shape[1]).transpose(0, 1).reshape(nodes, -1).contiguous()


@dataclass(frozen=True)
class Observer:
    """Sees all messages and knows the secrets of `colluders` nodes. Scores by the likelihood ratio of its suspicion."""

    partners: Partners
    colluders: int
    suspicion: Suspicion = "nothing"

    @property
    def coalition(self) -> tuple[int, ...]:
        """Where so many colluders learn most about node 0."""
        return _worst(self.partners, self.colluders)

    def scores(self, rounds: list[Matrix], shifts: list[float]) -> tuple[Scores, Scores]:
        """How far the rows of both rounds lie in the direction of `shifts`, and how far a message without noise would.

        Rows are (nodes, trials) without what the colluders know; rows and the shifts of row 0 are in units of the scale.
        """
        honest = [k for k in range(self.partners.nodes) if k not in self.coalition]
        inverse = np.linalg.inv(self.covariance(honest))
        shift = np.concatenate([np.eye(len(honest))[0] * s for s in shifts])
        seen = np.concatenate([rows[honest] for rows in rounds])
        along: Scores = shift @ inverse @ seen
        return along, np.asarray(shift @ inverse @ shift)

    def covariance(self, honest: list[int]) -> Matrix:
        """Of the honest nodes' noise in two rounds, without what they share with colluders."""
        whole = unknown_covariance(self.partners, honest)
        own = self.partners.shares().independent ** 2 * np.eye(len(honest))
        if self.suspicion == "no pair noise":
            whole = own
        both = whole - own if self.suspicion == "key used twice" else np.zeros_like(own)
        return np.block([[whole, both], [both, whole]])


@lru_cache(maxsize=32)
def _worst(partners: Partners, colluders: int) -> tuple[int, ...]:
    def known(coalition: tuple[int, ...]) -> float:
        honest = [k for k in range(partners.nodes) if k not in coalition]
        return float(np.linalg.inv(Observer(partners, 0).covariance(honest))[0, 0])

    return max(combinations(range(1, partners.nodes), colluders), key=known)


@dataclass(frozen=True)
class PairsCase(WorldByWorld):
    """A unit with partners against a coalition; both rounds' inputs are as far apart as allowed, in opposite directions."""

    unit: Contribution | Record
    nodes: int = 5
    known: int = 1
    """How many nodes really collude."""
    make: Source = SecurePairs
    suspicion: Suspicion = "nothing"

    def _world(self, copies: int, source: NoiseSource, seed: int, world: int) -> Scores:
        beside = SideBySide(source, self.make)
        wire = Wiretap(self.nodes, copies)
        scales = self._send(wire, beside, seed, copies, world)
        start = torch.zeros(self.nodes * copies, WIDTH)
        rounds = []
        for t, (fresh, scale) in enumerate(zip(wire.fresh(start), scales, strict=True)):
            known = self._known_noise(beside.inner, beside.part * scale, t, copies)
            rounds.append(fresh.reshape(copies, self.nodes).T / scale - known / scale)
        keys = isinstance(beside.inner, SecurePairs)  # seeded noise is drawn without keys to tell
        return self._ratio(self._observer if keys else replace(self._observer, colluders=0), rounds, scales)

    @property
    def _observer(self) -> Observer:
        partners = self.unit.trust.partners(self.nodes)
        assert partners is not None
        return Observer(partners, self.known, self.suspicion)

    def _known_noise(self, source: NoiseSource, scale: float, round_: int, copies: int) -> Matrix:
        """The pair noise between colluders and honest nodes, in the honest rows."""
        if not isinstance(source, SecurePairs) or isinstance(source, NoPairNoise):
            return np.zeros((self.nodes, copies))
        at = 0 if isinstance(source, ReusedKey) else round_
        return known_noise(source, self._observer.coalition, scale, at, copies * WIDTH)[:, ::WIDTH]

    def _send(self, wire: Wiretap, noise: NoiseSource, seed: int, copies: int, world: int) -> list[float]:
        """Two rounds of the shipped code; the scales of their noise."""
        if isinstance(self.unit, Record):
            return self._learn(self.unit, wire, noise, seed, copies, world)
        made = calibration(self.unit, nodes=self.nodes)
        topology, source = Exponential(self.nodes), made.source(noise)
        protocol = DPPS(topology, made.mechanism, made.sensitivity, noise=source, fabric=wire)
        state = protocol.start(torch.zeros(self.nodes * copies, WIDTH))
        scales = []
        for sign in (1, -1):
            rows = torch.zeros(self.nodes * copies, WIDTH)
            rows[:: self.nodes, 0] = 10 * self.unit.clip * sign * (1 - 2 * world)  # far above the clip
            scales.append(protocol.step(state, rows).scale)
        return scales

    def _learn(
        self, unit: Record, wire: Wiretap, noise: NoiseSource, seed: int, copies: int, world: int
    ) -> list[float]:
        """As in `RecordCase`: in world 0 node 0 has an example that it does not have in world 1."""
        solved = calibration(unit, nodes=self.nodes).mechanism.scale(1.0)
        target, gone = torch.ones(2), torch.zeros(2, WIDTH)
        there = gone.clone()
        there[0, 0] = -100 * unit.clip * (1 - world)
        data = [TensorDataset(there, target), *[TensorDataset(gone, target)] * (self.nodes - 1)] * copies
        solved_unit = replace(unit, epsilon=None, noise_multiplier=solved)
        run = linear_run(PartPSP, data, solved_unit, wire, noise, seed).start(epochs=1)
        return [run.step().scale for _ in range(2)]

    def _ratio(self, observer: Observer, rounds: list[Matrix], scales: list[float]) -> Scores:
        clip = self.unit.clip
        if isinstance(self.unit, Contribution):  # between +clip, -clip and -clip, +clip
            along, _ = observer.scores(rounds, [2 * clip / scales[0], -2 * clip / scales[1]])
            return np.round(along, 9)
        total: Scores = np.zeros(rounds[0].shape[1])
        for k, (rows, scale) in enumerate(zip(rounds, scales, strict=True)):
            zero, shifts = [np.zeros_like(rows)] * 2, [0.0, 0.0]
            zero[k], shifts[k] = rows, clip / scale
            along, square = observer.scores(zero, shifts)
            total += np.log1p(SAMPLING * np.expm1(along - square / 2))
        return np.round(total, 9)


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

    def _world(self, copies: int, source: NoiseSource, seed: int, world: int) -> Scores:
        sign = 1 - 2 * world
        mechanism, clip = calibration(self.unit, nodes=_NODES).mechanism, self.unit.clip
        inner, part = _unwrapped(source)
        inner = _with_partners(inner, self.partners(_NODES, None, 1))
        noise = inner if part == 1 else Weakened(inner)
        wire, topology = Wiretap(_NODES), Exponential(_NODES).with_dropouts(_AWAY)
        protocol = DPPS(topology, mechanism, Unclipped(2 * clip), noise=noise, fabric=wire)
        state = protocol.start(torch.zeros(_NODES, copies))
        before, total = state.s.clone(), np.zeros(copies)
        for t in range(2):
            rows = torch.zeros(_NODES, copies)
            rows[0] = sign * clip
            scale, present = protocol.step(state, rows).scale, topology.present(t)
            fresh = (wire.messages[-1] - before).double().numpy()
            keys = isinstance(inner, SecurePairs)  # seeded noise is drawn without keys to tell
            if isinstance(inner, SecurePairs):
                fresh -= known_noise(inner, [_COLLUDER], part * scale, t, copies, present)
            assert present is not None
            here = [k for k in np.flatnonzero(present).tolist() if not (keys and k == _COLLUDER)]
            direction = 2 * clip / scale * np.eye(len(here))[0]  # node 0 is never away
            covariance = unknown_covariance(Partners(_NODES, None, 1), here, present)  # the promised one
            total += direction @ np.linalg.solve(covariance, fresh[here] / scale)
            before = state.s.clone()
        return np.round(total, 9)


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

    def _world(self, copies: int, source: NoiseSource, seed: int, world: int) -> Scores:
        sign = 1 - 2 * world
        inner, part = _unwrapped(source)
        keyed = inner.seed if isinstance(inner, Seeded) else None
        mechanism, clip = calibration(self.unit, nodes=_NODES).mechanism, self.unit.clip
        assert isinstance(mechanism, Gaussian)
        scale = mechanism.scale(2 * clip)
        partners, week = Partners(_NODES, None, 1, absentees=self.aware), self.schedule
        members = _members(partners, self.rounds, part * scale, keyed)
        rows, made, shifts = [], [], []
        for r in range(week.rounds):
            for node, member in enumerate(members):
                if r in week.away.get(node, ()):
                    continue
                if r >= week.expelled:
                    member.rounds.lose(_LOST, week.last)
                moves = node == week.victim and r in week.updates
                update = torch.full((1, copies), sign * clip if moves else 0.0, dtype=torch.float64)
                row, parts = _sent(member, mechanism, part * scale, r, update)
                rows.append(row)
                made.append((node, parts))
                shifts.append(2 * clip * moves)
        seen = [k for k, (node, _) in enumerate(made) if node != _COLLUDER]
        told = np.stack(
            [rows[k] - _known(members[made[k][0]], made[k][1], part * scale, copies) for k in seen]
        )
        covariance = _covariance(partners, [made[k] for k in seen]) * scale**2
        along: Scores = np.array([shifts[k] for k in seen]) @ np.linalg.solve(covariance, told)
        return np.round(along, 9)


def _members(partners: Partners, rounds: type[PairRounds], scale: float, seed: int | None) -> list["Noting"]:
    """Five members, with keys of their own or of a seed."""

    def key(node: int, what: str) -> bytes | None:
        return None if seed is None else hashlib.sha256(f"{seed} {node} {what}".encode()).digest()

    identities = [IdentityKey(key(node, "pairs")) for node in range(_NODES)]
    publics = [identity.public for identity in identities]
    made = []
    for node, identity in enumerate(identities):
        keys, own = PairKeys(identity, publics, "audit", bytes(16)), Keystream(key(node, "own"))
        member = Noting(partners, keys, node, own)
        member.rounds = rounds(node, member.rounds.partners, 1)
        level = NoiseLevel(0.0, scale, member.grid(scale))
        member.levels = dict.fromkeys(range(10), level).__getitem__
        made.append(member)
    return made


class Noting(MemberPairs):
    """Remembers which noise it put into its last message."""

    parts: Sequence[Part] = ()

    def drawn(
        self, mechanism: Mechanism, parts: Sequence[Part], size: int, known: Mapping[int, NoiseLevel]
    ) -> tuple[NDArray[np.int64], float]:
        self.parts = parts
        return super().drawn(mechanism, parts, size, known)


def _sent(
    member: Noting, mechanism: Gaussian, scale: float, round_: int, update: torch.Tensor
) -> tuple[Matrix, Sequence[Part]]:
    """What leaves in a round, and which noise the shipped code put into it."""
    zero = torch.zeros_like(update)
    out = Outgoing(zero, update, zero.clone(), [member.node], round_, True, False)
    member.release(mechanism, scale, out)
    return out.half[0].numpy(), member.parts


def _known(member: MemberPairs, parts: Sequence[Part], scale: float, size: int) -> Matrix:
    """The noise in a message that the colluder knows."""
    step = member.grid(scale)
    total = np.zeros(size)
    for part in parts:
        pairs = tuple(pair for pair in part.pairs if pair[0] == _COLLUDER)
        total += member.in_steps(replace(part, pairs=pairs), scale, size, step) * step
    return total


def _covariance(partners: Partners, made: Sequence[tuple[int, Sequence[Part]]]) -> Matrix:
    """Of the noise in these messages that nobody but their senders and honest partners know, per unit of scale."""
    shares, own, rows = partners.shares(), np.zeros(len(made)), []
    names: dict[tuple[int, int, int], int] = {}
    for k, (node, parts) in enumerate(made):
        row: dict[int, int] = {}
        for part in parts:
            own[k] += part.own
            for other, sign in part.pairs:
                if other != _COLLUDER:
                    at = names.setdefault((min(node, other), max(node, other), part.round), len(names))
                    row[at] = row.get(at, 0) + sign
        rows.append(row)
    pair = np.zeros((len(made), len(names)))
    for k, row in enumerate(rows):
        for at, sign in row.items():
            pair[k, at] = sign
    return np.diag(own * shares.independent**2) + shares.pair**2 * pair @ pair.T


def member_cases() -> tuple[Case, ...]:
    """The claim for a member that stays and for the one that is lost, and what must be found out."""
    unit = Contribution(1.0, CLAIM, DELTA, "gaussian", trust=Pairs(1, absentees=1))
    leak: dict[str, Any] = {"secure_only": True, "leak_trials": 100_000}
    without: dict[str, Any] = leak | {"schedule": _MAKES_UP, "rounds": WithoutOwnNoise}
    released: dict[str, Any] = leak | {"schedule": _IS_LOST, "rounds": TakesBackReleased}
    repeated: dict[str, Any] = leak | {"schedule": _REPEATS, "rounds": Repeats}
    name = unit.name
    return (
        MemberCase(unit, name, "pairs, 1 colluder, 1 lost", DELTA),
        MemberCase(unit, name, "pairs, 1 colluder, of the lost one", DELTA, schedule=_IS_LOST),
        MemberCase(unit, name, "pairs, missed rounds without own noise", DELTA, **without),
        MemberCase(unit, name, "pairs, a released round taken back", DELTA, **released),
        MemberCase(
            unit, name, "pairs, 1 lost, calibrated for none", DELTA, schedule=_COUNTS, aware=0, **leak
        ),
        MemberCase(unit, name, "pairs, a repeated round", DELTA, **repeated),
    )


def pair_cases() -> tuple[Case, ...]:
    """Every unit with partners, announced absences, members that come and go, and what must be found out."""
    pairs, sparse = Pairs(1), Pairs(1, graph=networkx.circulant_graph(6, [1, 2]))
    unit = Contribution(1.0, CLAIM, DELTA, "gaussian", trust=pairs)
    record = Record(CLAIM, DELTA, trust=pairs)
    name, one, away = unit.name, "pairs, 1 colluder", "pairs, 1 colluder, 2 and 3 of 5 away"
    leak: dict[str, Any] = {"secure_only": True, "leak_trials": 20_000}  # keys go wrong where there are keys
    without: dict[str, Any] = leak | {"make": NoPairNoise, "suspicion": "no pair noise"}
    twice: dict[str, Any] = leak | {"make": ReusedKey, "suspicion": "key used twice"}
    two: dict[str, Any] = leak | {"leak_trials": 100_000, "nodes": 3, "known": 2}
    return (
        PairsCase(unit, name, one, DELTA),
        PairsCase(replace(unit, trust=sparse), name, "pairs, sparse, 1 colluder", DELTA, nodes=6),
        PairsCase(record, record.name, one, DELTA, seconds=6e-4),
        PairsCase(unit, name, "pairs, 2 colluders sold as 1", DELTA, **two),
        PairsCase(unit, name, "pairs without pair noise", DELTA, **without),
        PairsCase(unit, name, "pairs, key used twice", DELTA, **twice),
        AwayCase(unit, name, away, DELTA),
        AwayCase(unit, name, f"{away}, noise as if all were there", DELTA, partners=AsIfAllWereThere, **leak),
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
