"""Does noise that cancels really cancel? Its effect on the network's mean tells; messages one by one do not."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import chi2

from dpps.audit.coalition import pair_noise
from dpps.noise.mechanisms import Gaussian
from dpps.noise.pairs import SecurePairs, SeededPairs
from dpps.noise.source import Outgoing
from dpps.privacy.partners import Pairs, Partners

CHANCE = 1e-10
"""That right noise is found outside the limits. Secure noise is different every time: this is how often an audit fails for no reason."""


class WrongSign(SecurePairs):
    """Sabotage: both partners add what they share."""

    def shared(self, scale: float, out: Outgoing) -> tuple[NDArray[np.int32], float]:
        assert self.pair_keys is not None
        whole, step = super().shared(scale, out)
        for k, node in enumerate(out.nodes):
            earlier = [i for i in out.nodes if i < node]
            whole[k] += 2 * sum(pair_noise(self, i, node, scale, out.round, whole.shape[1]) for i in earlier)
        return whole, step


@dataclass(frozen=True)
class MeanFinding:
    """Limits of the variance of the noise in the mean, over the promised one.

    Attributes:
        noise: "seeded" or "secure".
        trials: how many means were looked at.
        low: at least.
        high: at most.
        twin: at least, when both partners add what they share; None where there are no keys to do so with.
    """

    noise: str
    trials: int
    low: float
    high: float
    twin: float | None

    @property
    def as_expected(self) -> bool:
        """The promised variance is within the limits, and the wrong sign is caught."""
        return self.low <= 1 <= self.high and self.caught

    @property
    def caught(self) -> bool:
        """Whether noise that does not cancel was found out."""
        return self.twin is None or self.twin > 1


def audit_mean(trials: int, seed: int = 0, *, secure_noise: bool = False) -> MeanFinding:
    """Look at the mean of five nodes' messages, one colluder allowed for.

    Args:
        trials: how many means.
        seed: of seeded noise.
        secure_noise: the noise of messages that really leave, and its twin.
    """
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
