"""Attacks on noise that cancels between members that come and go: one is away and makes up for it, one is lost and expelled.

Five members, one colluder, one lost. The observer sees all messages, has the colluder's keys, and knows which noise the code puts
into which message. So it scores by the exact likelihood ratio of what is really sent, also by a twin. Each twin breaks one premise of the
proof (docs/cancelling-noise.md) and must be found out.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpps.audit.epsilon import CLAIM, DELTA, SABOTAGE, Case, NoiseFor, Scores, Weakened, calibration
from dpps.audit.pairs import Matrix
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
    Seeded,
)
from dpps.noise.pairs import Part
from dpps.privacy import Contribution, Pairs, Partners

_NODES, _COLLUDER, _LOST = 5, 4, 3


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
class MemberCase(Case):
    """Unit contribution; all noise that the proof needs is there, or not.

    A row has a coordinate for every trial, each of which moves as far as the noise is calibrated to.
    """

    unit: Contribution
    schedule: Schedule = _STAYS
    rounds: type[PairRounds] = PairRounds
    aware: int = 1
    """Of how many lost members the calibration knows."""

    def scores(self, copies: int, noise: NoiseFor, seed: int) -> tuple[Scores, Scores]:
        zero, one = (self._world(copies, noise(seed + world), 1 - 2 * world) for world in (0, 1))
        return zero, one

    def _world(self, copies: int, source: NoiseSource, sign: int) -> Scores:
        inner, part = (source.source, SABOTAGE) if isinstance(source, Weakened) else (source, 1.0)
        seed = inner.seed if isinstance(inner, Seeded) else None
        mechanism, clip = calibration(self.unit, nodes=_NODES).mechanism, self.unit.clip
        assert isinstance(mechanism, Gaussian)
        scale = mechanism.scale(2 * clip)
        partners, week = Partners(_NODES, None, 1, absentees=self.aware), self.schedule
        members = _members(partners, self.rounds, part * scale, seed)
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
