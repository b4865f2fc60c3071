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

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dpps.audit.bounds import ALPHA, Bound, epsilon_lower
from dpps.audit.cases import Case, NoiseNormCase, Scores, sub_seed
from dpps.audit.wiretap import Joined, NoiseFor, weakened
from dpps.errors import UsageError
from dpps.noise.source import SecureNoise, Seeded

Progress = Callable[[int], None]

ENOUGH = 10_000
"""Runs in either world with which every twin is caught."""
LEAST = 1_000
"""Runs in either world below which nothing can be shown."""

_COPIES = 20_000  # networks side by side


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
    threshold, sign = _rule(*_scores(case, noise, pilots(trials), sub_seed(seed, 0), tell), case.delta, alpha)
    zero, one = _directed(*_scores(case, noise, trials, sub_seed(seed, 1), tell), sign)
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
        parts.append(case.scores(copies, noise, sub_seed(seed, first)))
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
    def trials_needed(self) -> int | None:
        """Where the twin was missed because there were too few runs: how many would catch it, at the rates that were seen."""
        if self.twin is None or self.caught:
            return None
        return self.twin.trials_for(self.case.claim, self.case.delta) or (
            ENOUGH if self.twin.trials < ENOUGH else None
        )

    @property
    def verdict(self) -> str:
        """In words."""
        if self.case.leaks:
            return "not found, though documented" if self.holds else "leaks, as documented"
        if not self.holds:
            return "VIOLATED"
        if self.as_expected:
            return "holds"
        return (
            f"holds, but {'too few runs for the twin' if self.trials_needed else 'the twin was not caught'}"
        )


def audit(
    case: Case,
    *,
    trials: int = 100_000,
    seed: int = 0,
    secure_noise: bool = False,
    progress: Progress | None = None,
) -> Finding:
    """Attack the shipped code and, where it should hold, its sabotaged twin.

    Args:
        case: the claim.
        trials: in either world; a known leak has its own number.
        seed: of seeded noise and sampling.
        secure_noise: noise on a grid from the operating system's key, instead of seeded noise.
        progress: told of every batch of trials.
    """
    if trials < LEAST:
        raise UsageError(
            f"{trials} samples a side show nothing: use {LEAST} or more (100000 for a 5 % error)"
        )
    noise, trials = _source(case, secure_noise), case.leak_trials or trials
    bound = attack(case, noise, trials, seed, ALPHA, progress)
    twin = None if case.leaks else attack(case, weakened(noise), trials, sub_seed(seed, 2), ALPHA, progress)
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
