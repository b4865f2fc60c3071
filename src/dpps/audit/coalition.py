"""An attack on noise that cancels: an observer of all messages who also has the secrets of some nodes.

The networks of `dpps.audit.cases` have one more kind of member here: colluders.
Their data and their own noise are theirs to tell, and the observer computes the pair noise that they share
with honest nodes from their keys and subtracts it. What is left of the honest rows is scored by the exact
likelihood ratio of the covariance that the proof names. The coalition is placed where it learns most about
node 0, whose input tells the worlds apart.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import Literal

import networkx
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpps.audit.cases import CLAIM, DELTA, SAMPLING, WIDTH, Case, Scores, telling
from dpps.audit.wiretap import SABOTAGE, NoiseFor, Weakened, Wiretap
from dpps.learning.partpsp import PartPSP
from dpps.noise.mechanisms import Mechanism
from dpps.noise.pair_keys import RoundStream
from dpps.noise.pairs import Partners as PairGraph
from dpps.noise.pairs import SecurePairs, SeededPairs
from dpps.noise.secure import SecureNoise
from dpps.noise.source import NoiseSource, Outgoing
from dpps.noise.table import gaussian_table
from dpps.privacy.trust import Pairs, Partners
from dpps.privacy.units import Calibration, Contribution, Plan, Record
from dpps.protocol import DPPS
from dpps.runs.deployment import Simulation
from dpps.runs.run import Run
from dpps.topology import Exponential

Matrix = NDArray[np.float64]
Suspicion = Literal["nothing", "no pair noise", "key used twice"]


class NoPairNoise(SecurePairs):
    """Sabotage: the independent noise is as small as if there were pair noise, and there is none."""

    def shared(self, scale: float, out: Outgoing) -> tuple[NDArray[np.int32], float]:
        whole, step = super().shared(scale, out)
        return np.zeros_like(whole), step


class ReusedKey(SecurePairs):
    """Sabotage: every round has the pair noise of round 0."""

    def shared(self, scale: float, out: Outgoing) -> tuple[NDArray[np.int32], float]:
        assert self.pair_keys is not None
        self.pair_keys._next = 0
        return super().shared(scale, replace(out, round=0))


Source = Callable[[PairGraph], SecurePairs]


class SideBySide(NoiseSource):
    """One source for many networks: their rows lie behind each other as the columns of one network, whose noise is independent
    per coordinate anyway.

    Args:
        inner: the source of one network, told of its partners when the run is.
        make: how a secure source is told, for twins.
    """

    def __init__(self, inner: NoiseSource, make: Source = SecurePairs) -> None:
        weak = isinstance(inner, Weakened)
        self.inner, self._make = (inner.source if weak else inner), make  # type: ignore[attr-defined]
        self.part = SABOTAGE if weak else 1.0
        """Of the noise that should be there."""

    def grid(self, scale: float) -> float:
        return self.inner.grid(scale)

    def discreteness(self, step: float) -> float:
        return self.inner.discreteness(step)

    def with_partners(self, partners: PairGraph) -> NoiseSource:
        secure = isinstance(self.inner, SecureNoise)
        self.inner = self._make(partners) if secure else self.inner.with_partners(partners)
        return self

    def release(self, mechanism: Mechanism, scale: float, out: Outgoing) -> Tensor:
        assert isinstance(self.inner, (SecurePairs, SeededPairs))
        nodes = self.inner.partners.nodes
        s, perturbation, half = (_beside(x, nodes) for x in (out.s, out.perturbation, out.half))
        one = replace(out, s=s, perturbation=perturbation, half=half, nodes=range(nodes))
        self.inner.release(mechanism, self.part * scale, one)
        out.half.copy_(half.view(nodes, -1, out.half.shape[1]).transpose(0, 1).reshape(out.half.shape))
        return torch.full((len(out.nodes),), math.nan, dtype=torch.float64)


def _beside(rows: Tensor, nodes: int) -> Tensor:
    """(copies x nodes, width) as (nodes, copies x width)."""
    return rows.view(-1, nodes, rows.shape[1]).transpose(0, 1).reshape(nodes, -1).contiguous()


def pair_noise(
    source: SecurePairs,
    i: int,
    j: int,
    scale: float,
    round_: int,
    size: int,
    present: NDArray[np.bool_] | None = None,
) -> NDArray[np.int32]:
    """What i adds and j subtracts in a round, in steps: whoever has a partner's key can compute it."""
    assert source.pair_keys is not None
    stream = RoundStream(source.pair_keys.key(i, j), round_)
    return gaussian_table(source.lattice(scale, present)[1]).draw(stream, size)


@dataclass(frozen=True)
class Observer:
    """Who sees all messages, and what is known beside them.

    Args:
        partners: the partner graph, which is public.
        colluders: how many nodes have told their secrets.
        suspicion: what the code may have done wrong; the score is then the likelihood ratio of that.
    """

    partners: Partners
    colluders: int
    suspicion: Suspicion = "nothing"

    @property
    def coalition(self) -> tuple[int, ...]:
        """Where so many colluders learn most about node 0."""
        return _worst(self.partners, self.colluders)

    def scores(self, rounds: list[Matrix], shifts: list[float]) -> tuple[Scores, Scores]:
        """How far the rows of both rounds lie in the direction of `shifts`, and how far a message without noise would.

        Args:
            rounds: (nodes, trials), in units of the scale; what the colluders know is subtracted.
            shifts: of row 0 in each round, in the same units.
        """
        honest = [k for k in range(self.partners.nodes) if k not in self.coalition]
        inverse = np.linalg.inv(self._covariance(honest))
        shift = np.concatenate([_unit(len(honest)) * s for s in shifts])
        seen = np.concatenate([rows[honest] for rows in rounds])
        along: Scores = shift @ inverse @ seen
        return along, np.asarray(shift @ inverse @ shift)

    def _covariance(self, honest: list[int]) -> Matrix:
        shares = self.partners.shares()
        own = shares.independent**2 * np.eye(len(honest))
        pair = np.zeros((len(honest), len(honest)))
        for i, j in self.partners.among().tolist():
            if i in honest and j in honest:
                column = _unit(len(honest), honest.index(i)) - _unit(len(honest), honest.index(j))
                pair += shares.pair**2 * np.outer(column, column)
        if self.suspicion == "no pair noise":
            pair[:] = 0
        both = pair if self.suspicion == "key used twice" else np.zeros_like(pair)
        return np.block([[own + pair, both], [both, own + pair]])


def _unit(size: int, place: int = 0) -> Matrix:
    column = np.zeros(size)
    column[place] = 1
    return column


@lru_cache(maxsize=32)
def _worst(partners: Partners, colluders: int) -> tuple[int, ...]:
    def known(coalition: tuple[int, ...]) -> float:
        observer = Observer(partners, 0)
        honest = [k for k in range(partners.nodes) if k not in coalition]
        return float(np.linalg.inv(observer._covariance(honest))[0, 0])

    return max(combinations(range(1, partners.nodes), colluders), key=known)


@dataclass(frozen=True)
class PairsCase(Case):
    """A unit with partners against a coalition; both rounds' inputs are as far apart as allowed, in opposite directions."""

    unit: Contribution | Record
    nodes: int = 5
    known: int = 1
    """How many nodes have really told their secrets."""
    make: Source = SecurePairs
    suspicion: Suspicion = "nothing"

    @property
    def seconds(self) -> float:
        return 6e-4 if isinstance(self.unit, Record) else 4e-5

    @property
    def secure_only(self) -> bool:
        """What goes wrong with keys shows where there are keys."""
        return self.leaks

    def scores(self, copies: int, noise: NoiseFor, seed: int) -> tuple[Scores, Scores]:
        zero, one = (self._world(copies, noise(seed + world), seed + world, world) for world in (0, 1))
        return zero, one

    def _world(self, copies: int, source: NoiseSource, seed: int, world: int) -> Scores:
        beside = SideBySide(source, self.make)
        wire = Wiretap(self.nodes, copies)
        scales = self._send(wire, beside, seed, copies, world)
        start = torch.zeros(self.nodes * copies, WIDTH)
        before = [start, *wire.received[:-1]]
        rounds = []
        for t, (m, s, scale) in enumerate(zip(wire.messages, before, scales, strict=True)):
            fresh = (telling(m) - telling(s)).reshape(copies, self.nodes).T / scale
            rounds.append(fresh - self._told(beside.inner, beside.part * scale, t, copies) / scale)
        # seeded noise is drawn without keys, so there are none to tell
        observer = (
            self._observer if isinstance(beside.inner, SecurePairs) else replace(self._observer, colluders=0)
        )
        return self._ratio(observer, rounds, scales)

    @property
    def _observer(self) -> Observer:
        partners = self.unit.trust.partners(self.nodes)
        assert partners is not None
        return Observer(partners, self.known, self.suspicion)

    def _told(self, source: NoiseSource, scale: float, round_: int, copies: int) -> Matrix:
        """The pair noise between colluders and honest nodes, in the honest rows."""
        known = np.zeros((self.nodes, copies))
        if not isinstance(source, SecurePairs) or isinstance(source, NoPairNoise):
            return known
        coalition, step = self._observer.coalition, source.lattice(scale, None)[0]
        at = 0 if isinstance(source, ReusedKey) else round_
        for i, j in source.partners.among().tolist():
            if (i in coalition) != (j in coalition):
                noise = pair_noise(source, i, j, scale, at, copies * WIDTH)[::WIDTH] * step
                known[i] += noise
                known[j] -= noise
        return known

    def _send(self, wire: Wiretap, noise: NoiseSource, seed: int, copies: int, world: int) -> list[float]:
        """Two rounds of the shipped code; the scales of their noise."""
        if isinstance(self.unit, Record):
            run = self._run(wire, noise, seed, copies, world).start(epochs=1)
            return [run.step().scale for _ in range(2)]
        calibration = calibrated(self.unit, self.nodes)
        protocol = DPPS(
            Exponential(self.nodes),
            calibration.mechanism,
            calibration.sensitivity,
            noise=calibration.source(noise),
            fabric=wire,
        )
        state = protocol.start(torch.zeros(self.nodes * copies, WIDTH))
        scales = []
        for sign in (1, -1):
            rows = torch.zeros(self.nodes * copies, WIDTH)
            rows[:: self.nodes, 0] = 10 * self.unit.clip * sign * (1 - 2 * world)  # far above the clip
            scales.append(protocol.step(state, rows).scale)
        return scales

    def _run(self, wire: Wiretap, noise: NoiseSource, seed: int, copies: int, world: int) -> Run:
        """As in `RecordCase`: in world 0 node 0 has an example that it does not have in world 1."""
        solved = calibrated(self.unit, self.nodes).mechanism.scale(1.0)
        layer = nn.Linear(WIDTH, 1, bias=False)
        nn.init.zeros_(layer.weight)
        model = nn.Sequential(layer)  # gradients of all networks at once
        algorithm = PartPSP(
            model,
            lr_shared=1.0,
            batch_size=1,
            loss=lambda outputs, targets: (outputs[:, 0] * targets).mean(),
        )
        target, gone = torch.ones(2), torch.zeros(2, WIDTH)
        there = gone.clone()
        there[0, 0] = -100 * self.unit.clip * (1 - world)
        others = [TensorDataset(gone, target)] * (self.nodes - 1)
        return Run(
            algorithm,
            [TensorDataset(there, target), *others] * copies,
            topology=Exponential(self.nodes),
            privacy=replace(self.unit, epsilon=None, noise_multiplier=solved),
            seed=seed,
            noise=noise,
            deployment=Simulation(wire),
        )

    def _ratio(self, observer: Observer, rounds: list[Matrix], scales: list[float]) -> Scores:
        clip = self.unit.clip
        if isinstance(self.unit, Contribution):  # between +clip, -clip and -clip, +clip
            along, _ = observer.scores(rounds, [2 * clip / scales[0], -2 * clip / scales[1]])
            return np.round(along, 9)
        total: Scores = np.zeros(rounds[0].shape[1])
        for k, (rows, scale) in enumerate(zip(rounds, scales, strict=True)):
            zero = [np.zeros_like(rows)] * 2
            zero[k] = rows
            shifts = [0.0, 0.0]
            shifts[k] = clip / scale
            along, square = observer.scores(zero, shifts)
            total += np.log1p(SAMPLING * np.expm1(along - square / 2))
        return np.round(total, 9)


@lru_cache(maxsize=16)
def calibrated(unit: Contribution | Record, nodes: int) -> Calibration:
    """What the unit makes of its target epsilon for two rounds."""
    sizes = (2,) * nodes
    return unit.calibrate(Plan(((1.0, 2),), 1.0, 1, (SAMPLING,) * nodes, declared_sizes=sizes))


def coalition_cases() -> tuple[PairsCase, ...]:
    """Every unit with partners, and what must be found out."""
    pairs, sparse = Pairs(1), Pairs(1, graph=networkx.circulant_graph(6, [1, 2]))
    contribution = Contribution(1.0, CLAIM, DELTA, "gaussian", trust=pairs)
    record = Record(CLAIM, DELTA, trust=pairs)
    name, found = "contribution", 20_000
    return (
        PairsCase(contribution, name, "pairs, 1 colluder", DELTA),
        PairsCase(replace(contribution, trust=sparse), name, "pairs, sparse, 1 colluder", DELTA, nodes=6),
        PairsCase(record, "record", "pairs, 1 colluder", DELTA),
        PairsCase(contribution, name, "pairs, 2 colluders sold as 1", DELTA, 5 * found, nodes=3, known=2),
        PairsCase(
            contribution,
            name,
            "pairs without pair noise",
            DELTA,
            found,
            make=NoPairNoise,
            suspicion="no pair noise",
        ),
        PairsCase(
            contribution,
            name,
            "pairs, key used twice",
            DELTA,
            found,
            make=ReusedKey,
            suspicion="key used twice",
        ),
    )
