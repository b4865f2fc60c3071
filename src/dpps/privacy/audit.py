"""An attack on the shipped code that bounds its epsilon from below: what is claimed must not be less.

Two worlds differ in one node's input by as much as the unit allows, all of it in one coordinate. Everything that leaves the
nodes in two rounds is written down by a fabric (messages, and the scalars of the sensitivity), and an observer who knows
everything else guesses the world from it by a likelihood ratio. The threshold comes from runs that are not counted. With p0 and
p1 the rates of the guess "world 0" in the two worlds, (epsilon, delta) implies p0 <= e^epsilon p1 + delta, so

    epsilon >= ln((p0 - delta) / p1) >= ln((low(p0) - delta) / high(p1)),

low and high being Clopper-Pearson limits, both right with probability 1 - alpha.

Many trials at once. A `Wiretap` holds many two-node networks side by side in one tensor: the same protocol object runs them all
in one `step`, each row with noise of its own. Node 0 of every network has the input of world 0, node 1 that of world 1, so a
network is one trial of either. That changes nothing in the code under test, because networks can meet only in the fabric's
scalars, and the wiretap stops the run if those are not the same in all of them. Where they differ (`Paper` and `WorstCase`,
whose scalars carry noise norms), networks run one by one.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import beta
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpps.errors import RunError, UsageError
from dpps.fabric.base import Fabric, combine
from dpps.learning.partpsp import PartPSP
from dpps.mechanisms import Mechanism
from dpps.noise import NoiseSource, Outgoing, Seeded
from dpps.privacy.units import Contribution, NodeSwap, Plan, Record, Terms, Unit
from dpps.protocol import DPPS
from dpps.secure import SecureNoise
from dpps.sensitivity import Certified, Paper, WorstCase
from dpps.topology import Exponential, Weights

Scores = NDArray[np.float64]
NoiseFor = Callable[[int], NoiseSource]
"""A source of noise for a seed."""
Progress = Callable[[int], None]

CLAIM = 1.0
"""Epsilon of two rounds together, to which everything is rescaled: large ones cannot be tested by counting."""

DELTA = 0.05
"""Delta of the Gaussian claims under test. One number, the noise multiplier, fixes a Gaussian mechanism's delta at every epsilon;
at this delta too little noise shows in a few thousand trials, at 1e-5 it would take billions."""

ALPHA = 1e-3
"""Chance that a lower bound is too high."""

SABOTAGE = 2 / 3
"""The twin's noise, as a part of what it should be."""

_WIDTH = 2  # coordinates of a row: one that tells, one that does not
_COPIES = 20_000  # networks side by side
_RATIO = 1e4  # node-swap: round 1's perturbation over round 0's, see NodeSwapCase
_TOPOLOGY = Exponential(2)
_SAMPLING = 0.5
_TWO_ROUNDS = Plan(((1.0, 2),), lr_shared=1.0, batch_size=1, sampling=(_SAMPLING,))  # only record looks at it


def clopper_pearson(hits: int, trials: int, alpha: float) -> tuple[float, float]:
    """Limits of a rate, each wrong with probability at most alpha."""
    low = 0.0 if hits == 0 else float(beta.ppf(alpha, hits, trials - hits + 1))
    high = 1.0 if hits == trials else float(beta.ppf(1 - alpha, hits + 1, trials - hits))
    return low, high


def epsilon_lower(hits: int, false: int, trials: int, delta: float = 0.0, alpha: float = ALPHA) -> float:
    """What epsilon is at least, after so many right and so many false alarms in `trials` each."""
    low = clopper_pearson(hits, trials, alpha / 2)[0] - delta
    high = clopper_pearson(false, trials, alpha / 2)[1]
    return max(0.0, math.log(low / high)) if low > 0 else 0.0


def certifiable(trials: int, alpha: float = ALPHA) -> float:
    """The largest lower bound that so many trials can give: a guess that is always right."""
    return epsilon_lower(trials, 0, trials, alpha=alpha)


class Wiretap(Fabric):
    """`copies` networks of `nodes` nodes side by side, and a record of everything that leaves a node."""

    simulation = True

    def __init__(self, nodes: int, copies: int = 1) -> None:
        self.nodes, self.copies = nodes, copies
        self.rows = range(nodes * copies)
        self.messages: list[Tensor] = []
        self.received: list[Tensor] = []
        """The rows after mixing: whoever has the messages and the weights knows them."""
        self.scalars: list[Tensor] = []

    def mix(self, weights: Weights, *xs: Tensor) -> list[Tensor]:
        mixed = [combine(x, *_side_by_side(weights, self.copies)) for x in xs]
        self.messages.append(xs[0].clone())  # the protocol uses its memory again
        self.received.append(mixed[0])
        return mixed

    def max(self, v: Tensor) -> float:
        return float(self.gather(v).max())

    def gather(self, v: Tensor) -> Tensor:
        self.scalars.append(v)
        networks = v.view(self.copies, self.nodes)
        if bool((networks != networks[0]).any()):
            raise RunError("scalars differ between networks side by side: audit these one by one (copies=1)")
        return networks[0]

    def mean(self, x: Tensor, present: np.ndarray | None = None) -> Tensor:
        raise UsageError("a wiretap does not synchronise: set sync_every to 0")


@lru_cache(maxsize=8)
def _side_by_side(weights: Weights, copies: int) -> tuple[Tensor, Tensor, Tensor]:
    senders = weights.senders + weights.nodes * np.arange(copies)[:, None]
    starts = weights.indptr[:-1] + len(weights.senders) * np.arange(copies)[:, None]
    ends = np.append(starts.ravel(), copies * len(weights.senders))
    values = np.tile(weights.values, copies)
    return torch.from_numpy(senders.ravel()), torch.from_numpy(ends), torch.from_numpy(values)


class Joined(SecureNoise):
    """Secure noise for many short rows as for one long one: its draws are independent per coordinate, and one long draw is
    quick. Noise norms are not known by row then, so whoever relies on them gets NaN."""

    def release(self, mechanism: Mechanism, scale: float, out: Outgoing) -> Tensor:
        s, perturbation, half = (x.view(1, -1) for x in (out.s, out.perturbation, out.half))
        super().release(mechanism, scale, replace(out, s=s, perturbation=perturbation, half=half, nodes=[0]))
        return torch.full((len(out.nodes),), math.nan, dtype=torch.float64)


class Weakened(NoiseSource):
    """Sabotage: the noise of another source, cut by a third, sold as whole."""

    def __init__(self, source: NoiseSource) -> None:
        self.source = source

    def grid(self, scale: float) -> float:
        return self.source.grid(scale)

    def discreteness(self, scale: float) -> float:
        return self.source.discreteness(scale)

    def release(self, mechanism: Mechanism, scale: float, out: Outgoing) -> Tensor:
        return self.source.release(mechanism, SABOTAGE * scale, out)


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
        start = torch.zeros(2 * copies, _WIDTH)
        state = protocol.start(start)
        opposite = _one_coordinate(10 * self.unit.clip, -10 * self.unit.clip, copies)
        scales = [protocol.step(state, opposite).scale for _ in range(2)]
        ratio = _laplace_ratio if self.unit.mechanism == "laplace" else _gaussian_ratio
        parts = [
            ratio(x, self.unit.clip, scale) for x, scale in zip(_fresh(wire, start), scales, strict=True)
        ]
        return _by_world(parts)


@dataclass(frozen=True)
class RecordCase(Case):
    """One example of a node is there or is not, through the whole of `PartPSP`: Poisson sampling at rate 1/2, per-example
    clipping, noise. The loss is linear and the example's gradient far above the clip; an example that is not there is one
    without a gradient, since n_i is public."""

    unit: Record

    def scores(self, copies: int, noise: NoiseFor, seed: int) -> tuple[Scores, Scores]:
        wire = Wiretap(2, copies)
        learner = self._algorithm(wire, noise(seed), seed).start(self._data(copies), epochs=1)
        start = learner.state.s.clone()
        records = [learner.round()[0] for _ in range(2)]
        parts = [
            self._ratio(x, record.scale)
            for x, record in zip(_fresh(wire, start), records, strict=True)
            if record is not None
        ]
        return _by_world(parts)

    def _algorithm(self, wire: Wiretap, noise: NoiseSource, seed: int) -> PartPSP:
        solved = _terms(self.unit).mechanism.multiplier(1.0, _terms(self.unit).mechanism.scale(1.0))
        return PartPSP(
            nn.Linear(_WIDTH, 1, bias=False),
            "all",
            _TOPOLOGY,
            replace(self.unit, epsilon=None, noise_multiplier=solved),
            lr_shared=1.0,
            batch_size=1,
            loss=lambda outputs, targets: (outputs[:, 0] * targets).mean(),
            seed=seed,
            noise=noise,
            fabric=wire,
        )

    def _data(self, copies: int) -> list[TensorDataset]:
        there, gone = torch.zeros(2, _WIDTH), torch.zeros(2, _WIDTH)
        there[0, 0] = -100 * self.unit.clip
        target = torch.ones(2)
        return [TensorDataset(there, target), TensorDataset(gone, target)] * copies

    def _ratio(self, x: Scores, scale: float) -> Scores:
        share = self.unit.clip
        ratio: Scores = np.log1p(_SAMPLING * np.expm1((x - share / 2) * share / scale**2))
        return ratio


@dataclass(frozen=True)
class NodeSwapCase(Case):
    """Which of two nodes sent the messages. Their perturbations are opposite, and much larger in round 1 than in round 0, so
    that what round 0 leaves in the rows disappears in round 1's noise and both rounds cost all of their epsilon."""

    unit: NodeSwap

    def scores(self, copies: int, noise: NoiseFor, seed: int) -> tuple[Scores, Scores]:
        wire = Wiretap(2, copies)
        protocol = _protocol(self.unit, noise(seed), wire)
        state = protocol.start(torch.zeros(2 * copies, _WIDTH))
        parts = []
        for size in (1.0, _RATIO):
            record = protocol.step(state, _one_coordinate(size, -size, copies))
            parts.append(_laplace_ratio(_telling(wire.messages[-1]), size, record.scale))
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
        state = protocol.start(torch.zeros(2 * copies, _WIDTH))
        scales = [protocol.step(state, _one_coordinate(x, -x, copies)).scale for x in (1.0, -1.0)]
        x, y = (_telling(message) for message in wire.messages)
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

    def scores(self, copies: int, noise: NoiseFor, seed: int) -> tuple[Scores, Scores]:
        found = np.array([self._one(noise(_seed(seed, k))) for k in range(copies)])
        return found[:, 0], found[:, 1]

    def _one(self, noise: NoiseSource) -> Scores:
        """The scores of both nodes' messages in one network."""
        wire = Wiretap(2)
        protocol = _protocol(self.unit, noise, wire)
        rows = _one_coordinate(1.0, -1.0, 1)
        state = protocol.start(torch.zeros(2, _WIDTH))
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
def _terms(unit: Unit) -> Terms:
    """What the unit makes of its target epsilon for two rounds; accountants take a second, so once."""
    return unit.terms(_TWO_ROUNDS)


def _protocol(unit: Unit, noise: NoiseSource, wire: Wiretap) -> DPPS:
    terms = _terms(unit)
    return DPPS(_TOPOLOGY, terms.mechanism, terms.sensitivity, noise=noise, fabric=wire)


def _one_coordinate(first: float, second: float, copies: int) -> Tensor:
    """Rows for node 0 and node 1 of every network, zero but for one coordinate."""
    rows = torch.zeros(2, _WIDTH)
    rows[:, 0] = torch.tensor([first, second])
    return rows.repeat(copies, 1)


def _telling(rows: Tensor) -> Scores:
    """The one coordinate that can differ between the worlds."""
    values: Scores = rows[:, 0].double().numpy()
    return values


def _fresh(wire: Wiretap, start: Tensor) -> list[Scores]:
    """What every message adds to the row before it, which follows from earlier messages."""
    before = [start, *wire.received[:-1]]
    return [_telling(m) - _telling(s) for m, s in zip(wire.messages, before, strict=True)]


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


def _by_world(parts: Sequence[Scores]) -> tuple[Scores, Scores]:
    """Sums over rounds, node 0's and node 1's. Rounded, because Laplace ratios pile up in two values."""
    score = np.round(np.sum(parts, axis=0), 9)
    return score[0::2], score[1::2]


def _seed(*words: int) -> int:
    """A seed of its own for every part of an audit."""
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])


def weakened(noise: NoiseFor) -> NoiseFor:
    """The sabotaged twin of a source."""
    return lambda seed: Weakened(noise(seed))


@dataclass(frozen=True)
class Bound:
    """What the attack showed: with confidence 1 - alpha, epsilon is at least `epsilon`."""

    epsilon: float
    hits: int
    false: int
    trials: int
    """In either world."""


def attack(
    case: Case,
    noise: NoiseFor,
    trials: int,
    seed: int,
    alpha: float = ALPHA,
    progress: Progress | None = None,
) -> Bound:
    """Choose a threshold on runs that are not counted, then count `trials` fresh ones in either world."""
    tell = progress or (lambda _: None)
    threshold, sign = _rule(*_scores(case, noise, pilots(trials), _seed(seed, 0), tell), case.delta, alpha)
    zero, one = _directed(*_scores(case, noise, trials, _seed(seed, 1), tell), sign)
    hits, false = int((zero >= threshold).sum()), int((one >= threshold).sum())
    return Bound(epsilon_lower(hits, false, trials, case.delta, alpha), hits, false, trials)


def pilots(trials: int) -> int:
    """How many runs the threshold is chosen on."""
    return min(trials, max(trials // 5, 5_000))


def _scores(case: Case, noise: NoiseFor, trials: int, seed: int, tell: Progress) -> tuple[Scores, Scores]:
    """The case's scores, in parts that bound memory."""
    parts = []
    for first in range(0, trials, _COPIES):
        copies = min(_COPIES, trials - first)
        parts.append(case.scores(copies, noise, _seed(seed, first)))
        tell(copies)
    zero, one = zip(*parts, strict=True)
    return np.concatenate(zero), np.concatenate(one)


def _directed(zero: Scores, one: Scores, sign: int) -> tuple[Scores, Scores]:
    """Scores for guessing world 0, or with sign -1 for guessing world 1: epsilon holds both ways."""
    return (zero, one) if sign > 0 else (-one, -zero)


def _rule(zero: Scores, one: Scores, delta: float, alpha: float) -> tuple[float, int]:
    """The threshold and direction that do best on these scores."""
    best = (-1.0, 0.0, 1)
    for sign in (1, -1):
        right, wrong = _directed(zero, one, sign)
        for threshold in np.unique(np.quantile(np.concatenate([right, wrong]), np.linspace(0.02, 0.98, 97))):
            counts = int((right >= threshold).sum()), int((wrong >= threshold).sum())
            best = max(best, (epsilon_lower(*counts, len(zero), delta, alpha), float(threshold), sign))
    return best[1:]


@dataclass(frozen=True)
class Finding:
    """The audit of one claim."""

    case: Case
    noise: str
    bound: Bound
    twin: Bound | None
    """None where the claim is known to fail with all of the noise."""

    @property
    def holds(self) -> bool:
        """Whether the attack stayed within the claim."""
        return self.bound.epsilon <= self.case.claim

    @property
    def as_expected(self) -> bool:
        """Claims hold and their twins are caught; leaks are found."""
        if self.case.leaks:
            return not self.holds
        return self.holds and self.caught

    @property
    def caught(self) -> bool:
        """Whether the twin was found out."""
        return self.twin is not None and self.twin.epsilon > self.case.claim

    @property
    def verdict(self) -> str:
        """In words."""
        if self.case.leaks:
            return "not found, though documented" if self.holds else "leaks, as documented"
        if not self.holds:
            return "VIOLATED"
        return "holds" if self.as_expected else "holds, but the twin was not caught"


def audit(
    case: Case,
    *,
    trials: int = 100_000,
    seed: int = 0,
    secure_noise: bool = False,
    alpha: float = ALPHA,
    progress: Progress | None = None,
) -> Finding:
    """Attack the shipped code and, where it should hold, its sabotaged twin.

    Args:
        case: the claim.
        trials: in either world; a known leak has its own number.
        seed: of seeded noise and sampling.
        secure_noise: noise on a grid from the operating system's key, instead of seeded noise.
        alpha: chance that a bound is too high.
        progress: told of every batch of trials.
    """
    if trials < 1_000:
        raise UsageError(f"{trials} samples a side show nothing: use 1000 or more (100000 for a 5 % error)")
    noise, trials = _source(case, secure_noise), case.leak_trials or trials
    bound = attack(case, noise, trials, seed, alpha, progress)
    twin = None if case.leaks else attack(case, weakened(noise), trials, _seed(seed, 2), alpha, progress)
    return Finding(case, "secure" if secure_noise else "seeded", bound, twin)


def _source(case: Case, secure_noise: bool) -> NoiseFor:
    if not secure_noise:
        return Seeded
    source = SecureNoise if isinstance(case, NoiseNormCase) else Joined
    return lambda _: source()  # keyed by the operating system: no seed has a say in it


def work(case: Case, trials: int) -> int:
    """How many trials `audit` runs in all, for a progress bar."""
    trials = case.leak_trials or trials
    return (trials + pilots(trials)) * (1 if case.leaks else 2)


def cases() -> tuple[Case, ...]:
    """Every claim about messages, rescaled to epsilon 1 over two rounds, and three that do not hold."""
    paper, worst = (NodeSwap(epsilon=CLAIM, sensitivity=s) for s in (Paper(0.78, 0.55), WorstCase()))
    certified = NodeSwap(epsilon=CLAIM, sensitivity=Certified())
    return (
        ContributionCase(Contribution(1.0, CLAIM, 0.0, "laplace"), "contribution", "laplace"),
        ContributionCase(Contribution(1.0, CLAIM, DELTA, "gaussian"), "contribution", "gaussian", DELTA),
        RecordCase(Record(CLAIM, DELTA), "record", "gaussian", DELTA),
        NodeSwapCase(certified, "node-swap", "certified"),
        CarriedCase(certified, "node-swap", "certified, sum of rounds", leak_trials=100_000),
        NoiseNormCase(paper, "node-swap", "paper", leak_trials=2_000),
        NoiseNormCase(worst, "node-swap", "worst-case", leak_trials=2_000),
    )
