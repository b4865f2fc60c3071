"""The claims under test: what runs in two worlds, and how an observer scores what it sees."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpps.audit.wiretap import NoiseFor, Wiretap
from dpps.learning.partpsp import PartPSP
from dpps.noise.mechanisms import Gaussian, Laplace
from dpps.noise.source import NoiseSource
from dpps.privacy.units import Calibration, Contribution, NodeSwap, Plan, Record, Unit
from dpps.protocol import DPPS
from dpps.runs.deployment import Simulation
from dpps.runs.run import Run
from dpps.sensitivity import Certified, Paper, WorstCase
from dpps.topology import Exponential

Scores = NDArray[np.float64]

CLAIM = 1.0
"""Epsilon of two rounds together, to which everything is rescaled: large ones cannot be tested by counting."""

DELTA = 0.05
"""Delta of the Gaussian claims under test. One number, the noise multiplier, fixes a Gaussian mechanism's delta at every epsilon;
at this delta too little noise shows in a few thousand trials, at 1e-5 it would take billions."""

WIDTH = 2
"""Coordinates of a row: one that tells, one that does not."""
_RATIO = 1e4  # node-swap: round 1's perturbation over round 0's, see NodeSwapCase
_TOPOLOGY = Exponential(2)
SAMPLING = 0.5
"""The chance that an example joins a round (record)."""
_TWO_ROUNDS = Plan(((1.0, 2),), lr_shared=1.0, batch_size=1, sampling=(SAMPLING,))  # only record looks at it


@dataclass(frozen=True)
class Case(ABC):
    """One claim under test: what runs, and how the observer scores what it sees (higher: rather world 0)."""

    unit: Unit
    name: str
    kind: str
    """The mechanism, or where the sensitivity comes from."""
    delta: float = 0.0
    leak_trials: int = 0
    """Above 0: known to fail, as the documentation says, and so many trials show it."""
    claim: float = CLAIM

    @property
    def leaks(self) -> bool:
        """Whether it is known to fail."""
        return self.leak_trials > 0

    @property
    def secure_only(self) -> bool:
        """Whether there is nothing to test about seeded noise."""
        return False

    @property
    def seconds(self) -> float:
        """Of one core for one run, roughly: for saying how long it takes."""
        return 4e-5

    @abstractmethod
    def scores(self, copies: int, noise: NoiseFor, seed: int) -> tuple[Scores, Scores]:
        """Run so many networks for two rounds; the scores of world 0 and of world 1."""


@dataclass(frozen=True)
class ContributionCase(Case):
    """Replacing all data of a node: the perturbation is +clip or -clip, and larger than that before clipping."""

    unit: Contribution

    def scores(self, copies: int, noise: NoiseFor, seed: int) -> tuple[Scores, Scores]:
        wire = Wiretap(2, copies)
        protocol = _protocol(self.unit, noise(seed), wire)
        start = torch.zeros(2 * copies, WIDTH)
        state = protocol.start(start)
        opposite = _one_coordinate(10 * self.unit.clip, -10 * self.unit.clip, copies)
        scales = [protocol.step(state, opposite).scale for _ in range(2)]
        ratio = _RATIOS[self.unit.mechanism]
        parts = [
            ratio(x, self.unit.clip, scale) for x, scale in zip(_fresh(wire, start), scales, strict=True)
        ]
        return _by_world(parts)


@dataclass(frozen=True)
class RecordCase(Case):
    """One example of a node is there or is not, through the whole of `PartPSP`: Poisson sampling at rate 1/2, per-example
    clipping, noise. The loss is linear and the example's gradient far above the clip; an example that is not there is one
    without a gradient: rates and divisors follow from declared sizes, so that is the same."""

    unit: Record

    @property
    def seconds(self) -> float:
        return 1.5e-4

    def scores(self, copies: int, noise: NoiseFor, seed: int) -> tuple[Scores, Scores]:
        wire = Wiretap(2, copies)
        run = self._run(wire, noise(seed), seed, copies).start(epochs=1)
        start = run.state.shared.s.clone()
        scales = [run.step().scale for _ in range(2)]
        parts = [self._ratio(x, scale) for x, scale in zip(_fresh(wire, start), scales, strict=True)]
        return _by_world(parts)

    def _run(self, wire: Wiretap, noise: NoiseSource, seed: int, copies: int) -> Run:
        solved = _calibration(self.unit).mechanism.scale(1.0)
        algorithm = PartPSP(
            *self._model(),
            lr_shared=1.0,
            lr_local=1.0,
            batch_size=1,
            loss=lambda outputs, targets: (outputs[:, 0] * targets).mean(),
        )
        return Run(
            algorithm,
            self._data(copies),
            topology=_TOPOLOGY,
            privacy=replace(self.unit, epsilon=None, noise_multiplier=solved),
            seed=seed,
            noise=noise,
            deployment=Simulation(wire),
        )

    def _model(self) -> tuple[nn.Module, Sequence[str]]:
        """The model, and what of it is shared."""
        chain = nn.Sequential(nn.Linear(WIDTH, 1, bias=False))  # gradients of all networks at once
        return chain, "all"

    def _data(self, copies: int) -> list[TensorDataset]:
        there, gone = torch.zeros(2, WIDTH), torch.zeros(2, WIDTH)
        there[0, 0] = -100 * self.unit.clip
        target = torch.ones(2)
        return [TensorDataset(there, target), TensorDataset(gone, target)] * copies

    def _ratio(self, x: Scores, scale: float) -> Scores:
        share = self.unit.clip
        ratio: Scores = np.log1p(SAMPLING * np.expm1((x - share / 2) * share / scale**2))
        return ratio


@dataclass(frozen=True)
class LocalRecordCase(RecordCase):
    """The same with local parameters, which the observer sees after every round: in the unit record they may be published.

    The weight is shared and the bias is local. The inputs are 1 and the example's target is what is far above the clip, so its
    gradient lies in both alike: under the one joint clip it moves each by clip / sqrt(2), and what tells is their sum over
    sqrt(2)."""

    def scores(self, copies: int, noise: NoiseFor, seed: int) -> tuple[Scores, Scores]:
        wire = Wiretap(2, copies)
        run = self._run(wire, noise(seed), seed, copies).start(epochs=1)
        start, scales, local = run.state.shared.s.clone(), [], [telling(run.state.local).copy()]
        for _ in range(2):
            scales.append(run.step().scale)
            local.append(telling(run.state.local).copy())
        moved = [after - before for before, after in pairwise(local)]
        parts = [
            self._ratio((x + own) / math.sqrt(2), scale)
            for x, own, scale in zip(_fresh(wire, start), moved, scales, strict=True)
        ]
        return _by_world(parts)

    def _model(self) -> tuple[nn.Module, Sequence[str]]:
        return nn.Sequential(nn.Linear(WIDTH, 1)), ["0.weight"]

    def _data(self, copies: int) -> list[TensorDataset]:
        inputs = torch.zeros(2, WIDTH)
        inputs[:, 0] = 1
        there = torch.tensor([-100 * self.unit.clip, 0.0])
        return [TensorDataset(inputs, there), TensorDataset(inputs, torch.zeros(2))] * copies


@dataclass(frozen=True)
class NodeSwapCase(Case):
    """Which of two nodes sent the messages. Their perturbations are opposite, and much larger in round 1 than in round 0, so
    that what round 0 leaves in the rows disappears in round 1's noise and both rounds cost all of their epsilon."""

    unit: NodeSwap

    def scores(self, copies: int, noise: NoiseFor, seed: int) -> tuple[Scores, Scores]:
        wire = Wiretap(2, copies)
        protocol = _protocol(self.unit, noise(seed), wire)
        state = protocol.start(torch.zeros(2 * copies, WIDTH))
        parts = []
        for size in (1.0, _RATIO):
            record = protocol.step(state, _one_coordinate(size, -size, copies))
            parts.append(_laplace_ratio(telling(wire.messages[-1]), size, record.scale))
        return _by_world(parts)


@dataclass(frozen=True)
class CarriedCase(Case):
    """The same with perturbations of one size, in round 1 the other way round: then round 0's noise, which is in round 1's rows,
    says more than the two epsilons together.

    Let x be the message of round 0. Both nodes then hold (x + x')/2, x' being the other node's message: around -1 if node 0
    sent x, around +1 if node 1 did. So the messages of round 1 are apart by what was perturbed, 2, *and* by 1, while its noise
    covers 2. The noise of x' takes some of it back, not all. (The paper claims epsilon for a round; this is about the sum.)
    """

    unit: NodeSwap

    def scores(self, copies: int, noise: NoiseFor, seed: int) -> tuple[Scores, Scores]:
        wire = Wiretap(2, copies)
        protocol = _protocol(self.unit, noise(seed), wire)
        state = protocol.start(torch.zeros(2 * copies, WIDTH))
        scales = [protocol.step(state, _one_coordinate(x, -x, copies)).scale for x in (1.0, -1.0)]
        x, y = (telling(message) for message in wire.messages)
        density = _sum_of_laplaces(scales[1], scales[0] / 2)
        carried = density(y - x / 2 + 1.5) - density(y - x / 2 - 1.5)
        return _by_world([_laplace_ratio(x, 1.0, scales[0]), carried])


@dataclass(frozen=True)
class NoiseNormCase(Case):
    """Which of two nodes sent a message, when round 1's scalars carry the exact norm of round 0's noise.

    The observer knows both rows before the noise, s_0 and s_1. The message m of node i has ||m - s_i||_1 = ||n_i||_1; for the
    other node that would be a coincidence. Nothing is perturbed in round 1, so all that it adds is the scalar.
    """

    unit: NodeSwap

    @property
    def seconds(self) -> float:
        return 2.5e-3  # networks run one by one

    def scores(self, copies: int, noise: NoiseFor, seed: int) -> tuple[Scores, Scores]:
        found = np.array([self._one(noise(sub_seed(seed, k))) for k in range(copies)])
        return found[:, 0], found[:, 1]

    def _one(self, noise: NoiseSource) -> Scores:
        """The scores of both nodes' messages in one network."""
        wire = Wiretap(2)
        protocol = _protocol(self.unit, noise, wire)
        rows = _one_coordinate(1.0, -1.0, 1)
        state = protocol.start(torch.zeros(2, WIDTH))
        first = protocol.step(state, rows)
        after = wire.scalars[-1]
        protocol.step(state)
        norms = self._noise_norms(after, wire.scalars[-1], first.used or 0.0)
        distances = torch.cdist(wire.messages[0].double(), rows.double(), p=1).numpy()  # (message, candidate)
        mismatch = np.abs(distances - norms) / norms + 1e-12
        score: Scores = np.log(mismatch[:, 1] / mismatch[:, 0])
        return score

    def _noise_norms(self, after: Tensor, next_: Tensor, used: float) -> Scores:
        """||n_0||_1 and ||n_1||_1 from what was broadcast at the end of round 0 and in round 1."""
        sensitivity = self.unit.sensitivity
        if not isinstance(sensitivity, Paper):
            return after.numpy()  # worst-case: every node says its noise norm, and the largest is used
        # S_i(1) = lambda (S(0) + 2C' ||n_i(0)||_1)
        norms: Scores = (next_.numpy() / sensitivity.decay - used) / (2 * sensitivity.c_prime)
        return norms


@lru_cache(maxsize=8)
def _calibration(unit: Unit) -> Calibration:
    """What the unit makes of its target epsilon for two rounds; accountants take a second, so once."""
    return unit.calibrate(_TWO_ROUNDS)


def _protocol(unit: Unit, noise: NoiseSource, wire: Wiretap) -> DPPS:
    calibration = _calibration(unit)
    return DPPS(_TOPOLOGY, calibration.mechanism, calibration.sensitivity, noise=noise, fabric=wire)


def _one_coordinate(first: float, second: float, copies: int) -> Tensor:
    """Rows for node 0 and node 1 of every network, zero but for one coordinate."""
    rows = torch.zeros(2, WIDTH)
    rows[:, 0] = torch.tensor([first, second])
    return rows.repeat(copies, 1)


def telling(rows: Tensor) -> Scores:
    """The one coordinate that can differ between the worlds."""
    values: Scores = rows[:, 0].double().numpy()
    return values


def _fresh(wire: Wiretap, start: Tensor) -> list[Scores]:
    """What every message adds to the row before it, which follows from earlier messages."""
    before = [start, *wire.received[:-1]]
    return [telling(m) - telling(s) for m, s in zip(wire.messages, before, strict=True)]


def _laplace_ratio(x: Scores, shift: float, scale: float) -> Scores:
    """ln of the density at x of noise around +shift over that around -shift."""
    ratio: Scores = (np.abs(x + shift) - np.abs(x - shift)) / scale
    return ratio


def _sum_of_laplaces(a: float, b: float) -> Callable[[Scores], Scores]:
    """ln of the density, up to a constant, of Laplace noise of scale a plus one of scale b < a."""

    def log_density(x: Scores) -> Scores:
        ratio: Scores = np.log1p(-b / a * np.exp(-np.abs(x) * (1 / b - 1 / a))) - np.abs(x) / a
        return ratio

    return log_density


def _gaussian_ratio(x: Scores, shift: float, scale: float) -> Scores:
    return 2 * shift * x / scale**2


_RATIOS = {Laplace.name: _laplace_ratio, Gaussian.name: _gaussian_ratio}
"""The best attack on a message is known for these mechanisms."""


def _by_world(parts: Sequence[Scores]) -> tuple[Scores, Scores]:
    """Sums over rounds, node 0's and node 1's. Rounded, because Laplace ratios pile up in two values."""
    score = np.round(np.sum(parts, axis=0), 9)
    return score[0::2], score[1::2]


def sub_seed(*words: int) -> int:
    """A seed of its own for every part of an audit."""
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])


def cases() -> tuple[Case, ...]:
    """Every claim about messages, rescaled to epsilon 1 over two rounds, and three that do not hold."""
    paper, worst = (NodeSwap(epsilon=CLAIM, sensitivity=s) for s in (Paper(0.78, 0.55), WorstCase()))
    certified = NodeSwap(epsilon=CLAIM, sensitivity=Certified())
    return (
        ContributionCase(Contribution(1.0, CLAIM, 0.0, "laplace"), "contribution", "laplace"),
        ContributionCase(Contribution(1.0, CLAIM, DELTA, "gaussian"), "contribution", "gaussian", DELTA),
        RecordCase(Record(CLAIM, DELTA), "record", "gaussian", DELTA),
        LocalRecordCase(Record(CLAIM, DELTA), "record", "gaussian, local part seen", DELTA),
        NodeSwapCase(certified, "node-swap", "certified"),
        CarriedCase(certified, "node-swap", "certified, sum of rounds", leak_trials=100_000),
        NoiseNormCase(paper, "node-swap", "paper", leak_trials=2_000),
        NoiseNormCase(worst, "node-swap", "worst-case", leak_trials=2_000),
    )
