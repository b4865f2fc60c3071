"""Noise that does not cancel is found by its effect on the mean."""

import math

import pytest
from scipy.stats import chi2
from torch import Tensor

from dpps.audit import WrongSign, audit_mean, mean, mean_variance
from dpps.noise import Mechanism, Outgoing, SecurePairs, SeededPairs
from dpps.privacy import Pairs


@pytest.mark.parametrize("secure", [True, False], ids=["secure", "seeded"])
def test_shared_noise_cancels(secure: bool) -> None:
    found = audit_mean(20_000, secure_noise=secure)
    assert found.low <= 1 <= found.high
    assert found.as_expected
    assert (found.twin is None) is not secure


def test_the_wrong_sign_shows_in_the_mean_and_not_in_single_messages() -> None:
    partners = Pairs(1).partners(5)
    assert mean_variance(WrongSign(partners), partners, 20_000)[0] > 5


def test_a_source_that_does_not_cancel_is_not_as_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mean, "SecurePairs", WrongSign)
    assert not audit_mean(5_000, secure_noise=True).as_expected
    monkeypatch.setattr(mean, "SecurePairs", SecurePairs)
    monkeypatch.setattr(mean, "WrongSign", SecurePairs)  # a twin that nothing is wrong with is not caught
    assert not audit_mean(5_000, secure_noise=True).as_expected


def test_means_noisier_or_quieter_than_promised_are_seen() -> None:
    promised, other = Pairs(1).partners(5), Pairs(1, mean_variance=1.5625).partners(5)
    low, _ = mean_variance(SeededPairs(other, 0), promised, 20_000)
    assert low > 1
    _, high = mean_variance(SeededPairs(promised, 0), other, 20_000)
    assert high < 1


class _Unlucky(SeededPairs):
    """Noise that moves every mean by the same distance."""

    distance = 0.0

    def release(self, mechanism: Mechanism, scale: float, out: Outgoing) -> Tensor:
        out.half.add_(self.distance)
        return out.half.abs().sum(1)


class _Scaled(SeededPairs):
    """Noise whose standard deviation is `factor` times the right one."""

    factor = 1.0

    def release(self, mechanism: Mechanism, scale: float, out: Outgoing) -> Tensor:
        return super().release(mechanism, scale * self.factor, out)


@pytest.mark.parametrize("tail", ["quiet", "noisy"])
def test_chance_turns_one_audit_in_a_thousand_million_red_at_most(tail: str) -> None:
    """Right noise is different every time it is secure. So is its variance: here as far off as happens once in 10^9 audits."""
    partners, trials, chance = Pairs(1).partners(5), 20_000, 0.5e-9
    unlucky = _Unlucky(partners, 0)
    squares = float(chi2.ppf(chance, trials) if tail == "quiet" else chi2.isf(chance, trials))
    unlucky.distance = math.sqrt(squares / trials / partners.nodes) * partners.shares().independent
    low, high = mean_variance(unlucky, partners, trials)
    assert low <= 1 <= high


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.1])
def test_noise_a_tenth_off_is_rejected(factor: float) -> None:
    scaled = _Scaled(Pairs(1).partners(5), 0)
    scaled.factor = factor
    low, high = mean_variance(scaled, scaled.partners, 20_000)
    assert (low <= 1 <= high) == (factor == 1)
