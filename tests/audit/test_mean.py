"""Noise that does not cancel is found by its effect on the mean."""

import pytest

from dpps.audit import WrongSign, audit_mean, mean, mean_variance
from dpps.noise import SecurePairs, SeededPairs
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
