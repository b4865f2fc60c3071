"""What counting right and wrong guesses says about epsilon, with limits that hold for any number of trials."""

import math
from dataclasses import dataclass

from scipy.stats import beta

ALPHA = 1e-3
"""Chance that a lower bound is too high."""


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
