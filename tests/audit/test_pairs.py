"""The audit of noise that cancels: claims hold against a coalition, with nodes away, and between members that come and go; every
sabotage is found."""

import math
from dataclasses import replace

import networkx
import numpy as np
import pytest
import torch
from scipy.stats import chi2, multivariate_normal
from torch import Tensor

from dpps.audit import Case, audit, audit_mean, pair_cases, pairs
from dpps.audit.pairs import (
    AwayCase,
    MemberCase,
    PairsCase,
    WrongSign,
    known_noise,
    log_ratio,
    mean_variance,
    unknown_covariance,
    worst_coalition,
)
from dpps.noise import Gaussian, Mechanism, Outgoing, PairRounds, SecurePairs, SeededPairs
from dpps.privacy import Pairs, Partners


def name(value: Case | bool) -> str:
    return f"{value.name}, {value.kind}" if isinstance(value, Case) else "secure" if value else "seeded"


CASES = pair_cases()
CLAIMS = [case for case in CASES if not case.leaks]
SABOTAGED = [case for case in CASES if case.leaks]
SEEDED = [pytest.param(c, False, marks=[pytest.mark.slow] * isinstance(c, PairsCase)) for c in CLAIMS]


@pytest.mark.parametrize(("case", "secure"), [*((c, True) for c in CLAIMS), *SEEDED], ids=name)
def test_claims_hold_and_a_third_less_noise_is_caught(case: Case, secure: bool) -> None:
    finding = audit(case, trials=6_000 if case.name == "record" else 20_000, secure_noise=secure)
    assert finding.holds
    assert finding.caught


@pytest.mark.parametrize("case", SABOTAGED, ids=lambda case: case.kind)
def test_sabotage_is_found(case: Case) -> None:
    finding = audit(case, secure_noise=True)
    assert not finding.holds
    assert finding.as_expected
    assert case.secure_only


@pytest.mark.parametrize("case", SABOTAGED, ids=lambda case: case.kind)
def test_each_sabotage_is_what_the_attack_finds_and_not_the_attack_itself(case: Case) -> None:
    """The same observers, with the same suspicions and schedules, stay within the claim where nothing is wrong."""
    mended = {
        AwayCase: {"partners": Partners},
        MemberCase: {"rounds": PairRounds, "aware": 1},
        PairsCase: {"make": SecurePairs, "known": 1},
    }[type(case)]
    assert audit(replace(case, **mended, leak_trials=0), trials=20_000, secure_noise=True).holds


def test_the_coalition_sits_where_it_learns_most() -> None:
    """In two cliques that share the nodes 5 and 6, whoever is in node 0's own tells more than somebody in the other."""
    mine, other = networkx.complete_graph([0, 3, 5, 6]), networkx.complete_graph([1, 2, 4, 5, 6, 7])
    partners = Pairs(1, graph=networkx.compose(mine, other)).partners(8)
    found = {
        c: float(np.linalg.inv(unknown_covariance(partners, [k for k in range(8) if k != c]))[0, 0])
        for c in range(1, 8)
    }
    assert worst_coalition(partners, 1) == (max(found, key=found.__getitem__),)
    assert min(found[c] for c in (3, 5, 6)) > 1.0001 * max(found[c] for c in (1, 2, 4, 7))
    assert worst_coalition(partners, 1)[0] != 1


def test_an_observer_scores_by_the_explicit_likelihood_ratio() -> None:
    sigma = unknown_covariance(Pairs(1).partners(4), [0, 1, 3])
    seen, shift = np.random.default_rng(0).normal(size=(3, 5)), np.array([0.3, 0.0, -0.2])
    exact = multivariate_normal(shift, sigma).logpdf(seen.T) - multivariate_normal(-shift, sigma).logpdf(
        seen.T
    )
    assert log_ratio(sigma, shift, seen) == pytest.approx(exact / 2)


@pytest.mark.parametrize(
    ("present", "honest"), [(None, [0, 1, 2, 3]), (np.array([True, True, False, True, True]), [0, 1, 3])]
)
def test_what_the_coalition_does_not_know_is_what_is_left_of_the_noise_that_is_drawn(present, honest) -> None:
    partners, trials = Pairs(1).partners(5), 40_000
    source = SecurePairs(partners)
    rows = torch.zeros(5, trials, dtype=torch.float64)
    out = Outgoing(rows, rows, rows.clone(), range(5), 0, base_is_public=True, present=present)
    source.release(Gaussian(1.0), 1.0, out)
    unknown = out.half.numpy() - known_noise(source, [4], 1.0, 0, trials, present)
    promised = unknown_covariance(partners, honest, present)
    assert np.abs(np.cov(unknown[honest]) - promised).max() < 0.05 * promised.max()


# The mean


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
    monkeypatch.setattr(pairs, "SecurePairs", WrongSign)
    assert not audit_mean(5_000, secure_noise=True).as_expected
    monkeypatch.setattr(pairs, "SecurePairs", SecurePairs)
    monkeypatch.setattr(pairs, "WrongSign", SecurePairs)  # a twin that nothing is wrong with is not caught
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
