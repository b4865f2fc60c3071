"""An attack on the shipped code that bounds its epsilon from below: what is claimed must not be less.

Two worlds differ in one node's input by as much as the unit allows, all of it in one coordinate. Everything that leaves the
nodes is written down by a fabric (messages, and the scalars of the sensitivity), and an observer who knows everything else
guesses the world from it by a likelihood ratio. The threshold comes from runs that are not counted. With p0 and p1 the rates
of the guess "world 0" in the two worlds, (epsilon, delta) implies p0 <= e^epsilon p1 + delta, so

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import logsumexp
from scipy.stats import beta, binom
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpps.errors import RunError, UsageError
from dpps.learning import PEDFL, Algorithm, PartPSP
from dpps.noise import Laplace, Mechanism, NoiseSource, Outgoing, SecureNoise, Seeded
from dpps.privacy import Calibration, Contribution, NodeSwap, Plan, Record, Unit
from dpps.protocol import DPPS
from dpps.runs import Run, Simulation
from dpps.sensitivity import Certified, Paper, WorstCase
from dpps.statistics import Category, Number, OneRecord, Release, Survey
from dpps.topology import Complete, Exponential, Weights
from dpps.transport import Arrived, Exchange, Fabric, Link, Stacked

Scores = NDArray[np.float64]
NoiseFor = Callable[[int], NoiseSource]
"""A source of noise for a seed."""
Scoring = Callable[[Scores, float], Scores]
"""Scores of a round's messages, given the scale of their noise."""
Progress = Callable[[int], None]

# What counting right and wrong guesses says about epsilon

ALPHA = 1e-3
"""Chance that a lower bound is too high."""


def clopper_pearson(hits: int, trials: int, alpha: float) -> tuple[float, float]:
    """Limits of a rate, each wrong with probability at most alpha."""
    low = 0.0 if hits == 0 else float(beta.ppf(alpha, hits, trials - hits + 1))
    high = 1.0 if hits == trials else float(beta.ppf(1 - alpha, hits + 1, trials - hits))
    return low, high


def epsilon_lower(hits: int, false: int, trials: int, delta: float = 0.0, alpha: float = ALPHA) -> float:
    """What epsilon is at least, after so many right guesses and so many false alarms in `trials` each."""
    low = clopper_pearson(hits, trials, alpha / 2)[0] - delta
    high = clopper_pearson(false, trials, alpha / 2)[1]
    return max(0.0, math.log(low / high)) if low > 0 else 0.0


def certifiable(trials: int) -> float:
    """The largest lower bound that so many trials can give: a guess that is always right."""
    return epsilon_lower(trials, 0, trials)


@dataclass(frozen=True)
class Bound:
    """What the attack showed: with confidence 1 - alpha, epsilon is at least `epsilon`."""

    epsilon: float
    hits: int
    false: int
    trials: int
    """In either world."""

    def trials_for(self, claim: float, delta: float) -> int | None:
        """How many trials would bound epsilon above `claim` at these rates; None where the rates do not differ by so much."""
        right, false = self.hits / self.trials, self.false / self.trials
        if right - delta <= math.exp(claim) * false:
            return None
        trials = self.trials
        while epsilon_lower(round(right * trials), round(false * trials), trials, delta) <= claim:
            trials *= 2
        return trials


# The instruments: a fabric that writes down what leaves, and noise sources for many networks or with too little noise

SABOTAGE = 2 / 3
"""The twin's noise, as a part of what it should be."""


class Wiretap(Stacked):
    """`copies` networks of `nodes` nodes side by side, and a record of everything that leaves a node."""

    def __init__(self, nodes: int, copies: int = 1) -> None:
        super().__init__(nodes)
        self.copies = copies
        self.rows = range(nodes * copies)
        self.messages: list[Tensor] = []
        """What was sent, one entry per gossip step."""
        self.received: list[Tensor] = []
        """The rows after each gossip step: whoever has the messages and the weights knows them."""
        self.scalars: list[Tensor] = []

    def push(self, exchange: Exchange, s: Tensor, a: Tensor, link: Link) -> None:
        self.messages.append(s.clone())  # the protocol uses its memory again
        if exchange.weights is None:  # all nodes of a network average
            exchange = replace(exchange, weights=Complete(self.nodes).weights(0))
        super().push(exchange, s, a, link)

    def collect(self, seconds: float | None = None) -> Arrived:
        arrived = super().collect(seconds)
        self.received.append(arrived.s)
        return arrived

    def mix(self, weights: Weights, *xs: Tensor) -> list[Tensor]:
        mixed = super().mix(weights, *(beside(x, self.nodes) for x in xs))
        return [
            beside(y.view(-1, *x.shape[1:]), self.copies).view(x.shape)
            for x, y in zip(xs, mixed, strict=True)
        ]

    def max(self, v: Tensor) -> float:
        return Fabric.max(self, v)

    def gather(self, v: Tensor) -> Tensor:
        self.scalars.append(v)
        networks = v.view(self.copies, self.nodes)
        if bool((networks != networks[0]).any()):
            raise RunError("scalars differ between networks side by side: audit these one by one (copies=1)")
        return networks[0]

    def fresh(self, start: Tensor) -> list[Scores]:
        """What every message adds to the row before it, which follows from earlier messages."""
        before = [start, *self.received[:-1]]
        return [telling(m) - telling(s) for m, s in zip(self.messages, before, strict=True)]


def beside(rows: Tensor, nodes: int) -> Tensor:
    """Rows of many networks, one network after the other, as those of one network, which has the columns of all."""
    return rows.reshape(len(rows) // nodes, nodes, -1).transpose(0, 1).reshape(nodes, -1).contiguous()


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

    def discreteness(self, step: float) -> float:
        return self.source.discreteness(step)

    def for_local_part(self) -> NoiseSource:
        return Weakened(self.source.for_local_part())

    def release(self, mechanism: Mechanism, scale: float, out: Outgoing) -> Tensor:
        return self.source.release(mechanism, SABOTAGE * scale, out)


def weakened(noise: NoiseFor) -> NoiseFor:
    """The sabotaged twin of a source."""
    return lambda seed: Weakened(noise(seed))


# The claims under test: what runs in two worlds, and how an observer scores what it sees

QUESTIONS = (
    "mean(x)",
    "count()",
    "variance(x)",
    "histogram(group)",
    "table(group, event)",
    "quantiles(x, 0.5, bins=16)",
    "correlation(x, y)",
    "regression(y ~ x + group)",
    "km(x, event, bins=4)",
    "mean(y, by=group)",
)
"""One of every kind."""

CLAIM = 1.0
"""Epsilon of all rounds together, to which everything is rescaled: large ones cannot be tested by counting."""

DELTA = 0.05
"""Delta of the Gaussian claims under test. One number, the noise multiplier, fixes a Gaussian mechanism's delta at every epsilon;
at this delta too little noise shows in a few thousand trials, at 1e-5 it would take billions."""

WIDTH = 2
"""Coordinates of a row: one that tells, one that does not."""
SAMPLING = 0.5
"""The chance that an example joins a round (record)."""
_TOPOLOGY = Exponential(2)


@dataclass(frozen=True)
class Case(ABC):
    """One claim under test: what runs, and how the observer scores what it sees (higher: rather world 0).

    Attributes:
        unit: who is protected; its epsilon and delta are the claim.
        kind: the mechanism, or where the sensitivity comes from.
        leak_trials: above 0: known to fail, as the documentation says, and this many trials show it.
        secure_only: whether it says nothing about seeded noise.
        seconds: rough time of one run on one core.
    """

    unit: Unit
    kind: str
    leak_trials: int = 0
    secure_only: bool = False
    seconds: float = 4e-5

    @property
    def name(self) -> str:
        """That of the unit."""
        return self.unit.name

    @property
    def claim(self) -> float:
        """Epsilon of all rounds together."""
        assert self.unit.epsilon is not None
        return self.unit.epsilon

    @property
    def delta(self) -> float:
        """The delta at which they are added up."""
        return self.unit.composition_delta

    @property
    def leaks(self) -> bool:
        """Whether it is known to fail."""
        return self.leak_trials > 0

    def secure_noise(self, _: int) -> NoiseSource:
        """Keyed by the operating system: no seed has a say in it."""
        return Joined()

    @abstractmethod
    def scores(self, copies: int, noise: NoiseFor, seed: int) -> tuple[Scores, Scores]:
        """Run so many networks; the scores of world 0 and of world 1."""


@dataclass(frozen=True)
class ContributionCase(Case):
    """Replacing all data of a node: the perturbation is +clip or -clip, and larger than that before clipping."""

    unit: Contribution
    sync_every: int = 0
    mixes: int = 1

    def scores(self, copies: int, noise: NoiseFor, seed: int) -> tuple[Scores, Scores]:
        wire, far = Wiretap(2, copies), 10 * self.unit.clip
        options = {"sync_every": self.sync_every, "mixes": self.mixes}
        scales = _opposite_steps(self.unit, noise(seed), wire, (far, far), **options)
        return _round_by_round(wire, torch.zeros(2 * copies, WIDTH), scales, self._ratio)

    def _ratio(self, x: Scores, scale: float) -> Scores:
        """The best attack on a message is known for these mechanisms."""
        if self.unit.mechanism == Laplace.name:
            return _laplace_ratio(x, self.unit.clip, scale)
        return 2 * self.unit.clip * x / scale**2


@dataclass(frozen=True)
class PEDFLCase(ContributionCase):
    """The same through the whole of `PEDFL`. Its update leaves one round later, so the first message tells nothing:
    over twelve rounds the other eleven tell nearly as much as twelve would."""

    rounds: int = 12
    seconds: float = 1e-4

    def scores(self, copies: int, noise: NoiseFor, seed: int) -> tuple[Scores, Scores]:
        wire, far = Wiretap(2, copies), 100 * self.unit.clip
        data = [TensorDataset(torch.tensor([[x, 0.0]]), torch.ones(1)) for x in (-far, far)]
        unit = solved(self.unit, self.rounds)
        run = linear_run(PEDFL, data * copies, unit, wire, noise(seed), seed).start(epochs=self.rounds)
        start, scales = run.state.shared.s.clone(), (run.step().scale for _ in range(self.rounds))
        return _round_by_round(wire, start, scales, self._ratio)


@dataclass(frozen=True)
class RecordCase(Case):
    """One example of a node is there or is not, through the whole of `PartPSP`: Poisson sampling, per-example clipping, noise.
    The loss is linear and the example's gradient far above the clip; an example that is not there is one
    without a gradient: rates and divisors follow from declared sizes, so that is the same."""

    unit: Record
    batch: int = 1
    """Expected number of a node's two examples that join a round."""
    sync_every: int = 0
    mixes: int = 1
    seconds: float = 1.5e-4

    def scores(self, copies: int, noise: NoiseFor, seed: int) -> tuple[Scores, Scores]:
        wire, unit = Wiretap(2, copies), solved(self.unit, 2, self.batch / 2)
        options: dict[str, Any] = {
            "sync_every": self.sync_every,
            "mixes": self.mixes,
            "batch_size": self.batch,
        }
        data, (model, shared) = self._data(copies), self._model()
        run = linear_run(PartPSP, data, unit, wire, noise(seed), seed, model, shared, **options)
        run.start(epochs=self.batch)  # two rounds
        start, scales = run.state.shared.s.clone(), (run.step().scale for _ in range(2))
        return _round_by_round(wire, start, scales, self._scoring(run))

    def _model(self) -> tuple[nn.Module | None, Sequence[str]]:
        """The model, and what of it is shared."""
        return None, "all"

    def _data(self, copies: int) -> list[TensorDataset]:
        there, gone = torch.zeros(2, WIDTH), torch.zeros(2, WIDTH)
        there[: self.unit.records_per_user, 0] = -100 * self.unit.clip
        return [TensorDataset(x, torch.ones(2)) for x in (there, gone)] * copies

    def _scoring(self, run: Run) -> Scoring:
        return self._ratio

    def _ratio(self, x: Scores, scale: float) -> Scores:
        """ln of the density where some of one person's examples joined, each by chance, over that where none did."""
        drawn = np.arange(self.unit.records_per_user + 1)
        chances = binom.pmf(drawn, self.unit.records_per_user, self.batch / 2)
        shift = drawn * self.unit.clip / self.batch
        exponents = (x[:, None] - shift / 2) * shift / scale**2
        ratio: Scores = logsumexp(exponents, axis=1, b=chances)
        return ratio


@dataclass(frozen=True)
class LocalRecordCase(RecordCase):
    """The same with local parameters, which the observer sees after every round: in the unit record they may be published.

    The weight is shared and the bias is local. The inputs are 1 and the example's target is what is far above the clip, so its
    gradient lies in both alike: under the one joint clip it moves each by clip / sqrt(2), and what tells is their sum over
    sqrt(2)."""

    def _model(self) -> tuple[nn.Module, Sequence[str]]:
        return nn.Sequential(nn.Linear(WIDTH, 1)), ["0.weight"]

    def _data(self, copies: int) -> list[TensorDataset]:
        inputs = torch.zeros(2, WIDTH)
        inputs[:, 0] = 1
        there = torch.tensor([-100 * self.unit.clip, 0.0])
        return [TensorDataset(inputs, targets) for targets in (there, torch.zeros(2))] * copies

    def _scoring(self, run: Run) -> Scoring:
        seen = [telling(run.state.local).copy()]

        def score(x: Scores, scale: float) -> Scores:
            seen.append(telling(run.state.local).copy())
            return self._ratio((x + seen[-1] - seen[-2]) / math.sqrt(2), scale)

        return score


@dataclass(frozen=True)
class NodeSwapCase(Case):
    """Which of two nodes sent the messages. Their perturbations are opposite, and much larger in round 1 than in round 0, so
    that what round 0 leaves in the rows disappears in round 1's noise and both rounds cost all of their epsilon."""

    unit: NodeSwap

    def scores(self, copies: int, noise: NoiseFor, seed: int) -> tuple[Scores, Scores]:
        wire, sizes = Wiretap(2, copies), (1.0, 1e4)
        scales = list(_opposite_steps(self.unit, noise(seed), wire, sizes))
        sent = zip(map(telling, wire.messages), sizes, scales, strict=True)
        return _by_world([_laplace_ratio(*message) for message in sent])


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
        scales = list(_opposite_steps(self.unit, noise(seed), wire, (1.0, -1.0)))
        x, y = map(telling, wire.messages)
        here, there = (_sum_of_laplaces(y - x / 2 + far, scales[1], scales[0] / 2) for far in (1.5, -1.5))
        return _by_world([_laplace_ratio(x, 1.0, scales[0]), here - there])


@dataclass(frozen=True)
class NoiseNormCase(Case):
    """Which of two nodes sent a message, when round 1's scalars carry the exact norm of round 0's noise.

    The observer knows both rows before the noise, s_0 and s_1. The message m of node i has ||m - s_i||_1 = ||n_i||_1; for the
    other node that would be a coincidence. Nothing is perturbed in round 1, so all that it adds is the scalar.
    """

    unit: NodeSwap
    seconds: float = 2.5e-3  # networks run one by one

    def secure_noise(self, _: int) -> NoiseSource:
        return SecureNoise()

    def scores(self, copies: int, noise: NoiseFor, seed: int) -> tuple[Scores, Scores]:
        found = np.array([self._one(noise(sub_seed(seed, k))) for k in range(copies)])
        return found[:, 0], found[:, 1]

    def _one(self, noise: NoiseSource) -> Scores:
        """The scores of both nodes' messages in one network."""
        wire, rows, sensitivity = Wiretap(2), _opposite(1.0, 1), self.unit.sensitivity
        protocol = _protocol(self.unit, noise, wire)
        state = protocol.start(torch.zeros(2, WIDTH))
        used, norms = protocol.step(state, rows).used or 0.0, wire.scalars[-1].numpy()
        # worst-case: every node says its noise norm, and the largest is used
        if isinstance(sensitivity, Paper):  # S_i(1) = lambda (S(0) + 2C' ||n_i(0)||_1)
            protocol.step(state)
            norms = (wire.scalars[-1].numpy() / sensitivity.decay - used) / (2 * sensitivity.c_prime)
        distances = torch.cdist(wire.messages[0].double(), rows.double(), p=1).numpy()  # (message, candidate)
        mismatch = np.abs(distances - norms) / norms + 1e-12
        score: Scores = np.log(mismatch[:, 1] / mismatch[:, 0])
        return score


@dataclass(frozen=True)
class StatisticsCase(Case):
    """One record is there or is not, in a release of every kind of question. Its values are at the ends of their ranges, where
    every block is as long as it can be."""

    unit: OneRecord
    questions: tuple[str, ...] = QUESTIONS
    enlarged: float = 1.0
    """Sabotage above 1: by how much the first question's block exceeds its bound."""

    def scores(self, copies: int, noise: NoiseFor, seed: int) -> tuple[Scores, Scores]:
        survey, wire = Survey(self.questions, COLUMNS), Wiretap(2, copies)
        gone = survey.sums({name: np.empty(0) for name in COLUMNS})
        ends = {name: column.high if isinstance(column, Number) else 1.0 for name, column in COLUMNS.items()}
        vector = survey.sums({name: np.array([end]) for name, end in ends.items()})
        vector[: survey.questions[0].width] *= self.enlarged
        sums = np.tile(np.stack([vector, gone]), (copies, 1))
        unit, simulated = solved(self.unit, 1, 1.0), Simulation(wire)
        run = Release(survey, sums, 2, unit, deployment=simulated, noise=noise(seed), seed=seed)
        scale = run.start(1).step().scale
        length = float(np.linalg.norm(vector))
        along = wire.messages[0].numpy() @ vector / length
        ratio = (along - length / 2) * length / scale**2
        return ratio[0::2], ratio[1::2]


COLUMNS: Mapping[str, Number | Category] = {
    "x": Number("x", -1, 1),
    "y": Number("y", -1, 1),
    "group": Category("group", ("a", "b")),
    "event": Category("event", ("no", "yes")),
}


def cases() -> tuple[Case, ...]:
    """Every claim about messages, rescaled to epsilon 1 over all rounds, and three that do not hold."""
    paper, worst = (NodeSwap(epsilon=CLAIM, sensitivity=s) for s in (Paper(0.78, 0.55), WorstCase()))
    certified = NodeSwap(epsilon=CLAIM, sensitivity=Certified())
    laplace = Contribution(1.0, CLAIM, 0.0, "laplace")
    gaussian = Contribution(1.0, CLAIM, DELTA, "gaussian")
    record, person = Record(CLAIM, DELTA), Record(CLAIM, DELTA, records_per_user=2)
    often = "synchronised, 2 gossip steps"
    return (
        ContributionCase(laplace, "laplace"),
        ContributionCase(gaussian, "gaussian"),
        ContributionCase(laplace, f"laplace, {often}", sync_every=2, mixes=2),
        PEDFLCase(gaussian, "gaussian, PEDFL"),
        RecordCase(record, "gaussian"),
        LocalRecordCase(record, "gaussian, local part seen"),
        RecordCase(record, f"gaussian, {often}", sync_every=2, mixes=2),
        RecordCase(person, "gaussian, 2 records of a person", batch=2),
        StatisticsCase(OneRecord(CLAIM, DELTA), "gaussian, statistics"),
        NodeSwapCase(certified, "certified"),
        CarriedCase(certified, "certified, sum of rounds", leak_trials=100_000),
        NoiseNormCase(paper, "paper", leak_trials=2_000),
        NoiseNormCase(worst, "worst-case", leak_trials=2_000),
    )


# What cases share


@lru_cache(maxsize=32)
def calibration(unit: Unit, rounds: int = 2, sampling: float = SAMPLING, nodes: int = 1) -> Calibration:
    """What the unit makes of its target epsilon; accountants take a second, so once."""
    sizes = (2,) * nodes if nodes > 1 else ()
    return unit.calibrate(
        Plan(((1.0, rounds),), 1.0, 2 * sampling, (sampling,) * nodes, declared_sizes=sizes)
    )


def solved(unit: Any, *plan: Any) -> Any:
    """The unit with the noise that its target epsilon needs; `plan` as in `calibration`."""
    return replace(unit, epsilon=None, noise_multiplier=calibration(unit, *plan).mechanism.scale(1.0))


def _protocol(unit: Unit, noise: NoiseSource, wire: Wiretap, **options: Any) -> DPPS:
    made = calibration(unit)
    return DPPS(_TOPOLOGY, made.mechanism, made.sensitivity, noise=noise, fabric=wire, **options)


def linear_run(
    algorithm: type[Algorithm],
    data: Sequence[TensorDataset],
    unit: Unit,
    wire: Wiretap,
    noise: NoiseSource,
    seed: int,
    model: nn.Module | None = None,
    shared: Sequence[str] = "all",
    batch_size: int = 1,
    **options: Any,
) -> Run:
    """A run before it starts, whose loss is linear: gradients are the inputs times the targets, whatever the parameters."""
    if model is None:
        layer = nn.Linear(WIDTH, 1, bias=False)
        nn.init.zeros_(layer.weight)
        model = nn.Sequential(layer)  # a chain: gradients of all networks at once
    rates: dict[str, Any] = {"lr_shared": 1.0, "lr_local": 1.0, "batch_size": batch_size}
    learner = algorithm(model, shared, loss=lambda out, targets: (out[:, 0] * targets).mean(), **rates)
    options |= {"topology": Exponential(wire.nodes), "deployment": Simulation(wire)}
    return Run(learner, data, privacy=unit, seed=seed, noise=noise, **options)


def _opposite(x: float, copies: int) -> Tensor:
    """Rows for node 0 and node 1 of every network: x and -x in one coordinate, zero elsewhere."""
    rows = torch.zeros(2, WIDTH)
    rows[:, 0] = torch.tensor([x, -x])
    return rows.repeat(copies, 1)


def _opposite_steps(
    unit: Unit, noise: NoiseSource, wire: Wiretap, sizes: Sequence[float], **options: Any
) -> Iterator[float]:
    """A round for each size, in which the two nodes of every network move by so much, in opposite directions; its noise's scale."""
    protocol = _protocol(unit, noise, wire, **options)
    state = protocol.start(torch.zeros(2 * wire.copies, WIDTH))
    for size in sizes:
        yield protocol.step(state, _opposite(size, wire.copies)).scale


def _round_by_round(
    wire: Wiretap, start: Tensor, scales: Iterable[float], score: Scoring
) -> tuple[Scores, Scores]:
    """Score what every round adds. Its first message carries all of it, and further gossip steps must add nothing.

    Args:
        wire: what records the rounds.
        start: the rows before them.
        scales: runs a round for each scale it gives.
        score: of a round's message, by the scale of its noise.
    """
    parts: list[Scores] = []
    for scale in scales:
        first, *further = wire.fresh(start)[len(parts) :]
        parts.append(score(first, scale))
        parts += [1e6 * np.sign(x) for x in further]  # anything but zero gives the world away
    return _by_world(parts)


def telling(rows: Tensor) -> Scores:
    """The one coordinate that can differ between the worlds."""
    values: Scores = rows[:, 0].double().numpy()
    return values


def _laplace_ratio(x: Scores, shift: float, scale: float) -> Scores:
    """ln of the density at x of noise around +shift over that around -shift."""
    ratio: Scores = (np.abs(x + shift) - np.abs(x - shift)) / scale
    return ratio


def _sum_of_laplaces(x: Scores, a: float, b: float) -> Scores:
    """ln of the density at x, up to a constant, of Laplace noise of scale a plus one of scale b < a."""
    ratio: Scores = np.log1p(-b / a * np.exp(-np.abs(x) * (1 / b - 1 / a))) - np.abs(x) / a
    return ratio


def _by_world(parts: Sequence[Scores]) -> tuple[Scores, Scores]:
    """Sums over rounds, node 0's and node 1's. Rounded, because Laplace ratios pile up in two values."""
    score = np.round(np.sum(parts, axis=0), 9)
    return score[0::2], score[1::2]


def sub_seed(*words: int) -> int:
    """A seed of its own for every part of an audit."""
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])


# The attack

ENOUGH = 10_000
"""Runs in either world with which every twin is caught."""
LEAST = 1_000
"""Runs in either world below which nothing can be shown."""

_COPIES = 20_000  # networks side by side


def _untold(_: int) -> None:
    """Nobody watches the progress."""


def attack(case: Case, noise: NoiseFor, trials: int, seed: int, progress: Progress = _untold) -> Bound:
    """Choose a threshold on runs that are not counted, then count `trials` fresh ones in either world."""
    threshold, sign = _rule(*_scores(case, noise, pilots(trials), sub_seed(seed, 0), progress), case.delta)
    zero, one = _directed(*_scores(case, noise, trials, sub_seed(seed, 1), progress), sign)
    hits, false = int((zero >= threshold).sum()), int((one >= threshold).sum())
    return Bound(epsilon_lower(hits, false, trials, case.delta), hits, false, trials)


def pilots(trials: int) -> int:
    """How many runs the threshold is chosen on."""
    return min(trials, max(trials // 5, 5_000))


def _scores(case: Case, noise: NoiseFor, trials: int, seed: int, progress: Progress) -> tuple[Scores, Scores]:
    """The case's scores, in parts that bound memory."""
    parts = []
    for first in range(0, trials, _COPIES):
        copies = min(_COPIES, trials - first)
        parts.append(case.scores(copies, noise, sub_seed(seed, first)))
        progress(copies)
    zero, one = map(np.concatenate, zip(*parts, strict=True))
    return zero, one


def _directed(zero: Scores, one: Scores, sign: int) -> tuple[Scores, Scores]:
    """Scores for guessing world 0, or with sign -1 for guessing world 1: epsilon holds both ways."""
    return (zero, one) if sign > 0 else (-one, -zero)


def _rule(zero: Scores, one: Scores, delta: float) -> tuple[float, int]:
    """The threshold and direction that do best on these scores."""
    best = (-1.0, 0.0, 1)
    for sign in (1, -1):
        right, wrong = _directed(zero, one, sign)
        for threshold in np.unique(np.quantile(np.concatenate([right, wrong]), np.linspace(0.02, 0.98, 97))):
            counts = int((right >= threshold).sum()), int((wrong >= threshold).sum())
            best = max(best, (epsilon_lower(*counts, len(zero), delta), float(threshold), sign))
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
        return not self.holds if self.case.leaks else self.holds and self.caught

    @property
    def caught(self) -> bool:
        """Whether the twin was found out."""
        return self.twin is not None and self.twin.epsilon > self.case.claim

    @property
    def trials_needed(self) -> int | None:
        """Where the twin was missed because there were too few runs: how many would catch it, at the rates that were seen."""
        if self.twin is None or self.caught:
            return None
        enough = ENOUGH if self.twin.trials < ENOUGH else None
        return self.twin.trials_for(self.case.claim, self.case.delta) or enough

    @property
    def verdict(self) -> str:
        """In words."""
        if self.case.leaks:
            return "not found, though documented" if self.holds else "leaks, as documented"
        if not self.holds:
            return "VIOLATED"
        if self.as_expected:
            return "holds"
        missed = "too few runs for the twin" if self.trials_needed else "the twin was not caught"
        return f"holds, but {missed}"


def audit(
    case: Case,
    *,
    trials: int = 100_000,
    seed: int = 0,
    secure_noise: bool = False,
    progress: Progress = _untold,
) -> Finding:
    """Attack the shipped code and, where it should hold, its sabotaged twin.

    Args:
        case: the claim.
        trials: in either world; a known leak has its own number.
        seed: of seeded noise and sampling.
        secure_noise: noise on a grid from the operating system's key, instead of seeded noise.
        progress: called with the size of every batch of trials.
    """
    if trials < LEAST:
        raise UsageError(
            f"{trials} samples a side show nothing: use {LEAST} or more (100000 for a 5 % error)"
        )
    trials, noise = case.leak_trials or trials, Seeded if not secure_noise else case.secure_noise
    bound = attack(case, noise, trials, seed, progress)
    twin = None if case.leaks else attack(case, weakened(noise), trials, sub_seed(seed, 2), progress)
    return Finding(case, "secure" if secure_noise else "seeded", bound, twin)


def work(case: Case, trials: int) -> int:
    """How many trials `audit` runs in all, for a progress bar."""
    trials = case.leak_trials or trials
    return (trials + pilots(trials)) * (1 if case.leaks else 2)
