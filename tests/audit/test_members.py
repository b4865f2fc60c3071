"""The audit of noise that cancels between members that come and go: claims hold, and what breaks the proof is found."""

from dataclasses import replace

import pytest

from dpps.audit import audit, member_cases
from dpps.audit.pairs import MemberCase
from dpps.noise import PairRounds

CASES = [case for case in member_cases() if isinstance(case, MemberCase)]
CLAIMS = [case for case in CASES if not case.leaks]
SABOTAGED = [case for case in CASES if case.leaks]


@pytest.mark.parametrize("case", CLAIMS, ids=lambda case: case.kind)
def test_claims_hold_and_a_third_less_noise_is_caught(case: MemberCase) -> None:
    finding = audit(case, trials=20_000, secure_noise=True)
    assert finding.holds
    assert finding.caught


@pytest.mark.parametrize("case", SABOTAGED, ids=lambda case: case.kind)
def test_what_breaks_the_proof_is_found(case: MemberCase) -> None:
    assert case.secure_only
    finding = audit(case, secure_noise=True)
    assert not finding.holds
    assert finding.as_expected


def test_the_same_weeks_are_within_the_claim_where_nothing_is_wrong() -> None:
    for case in SABOTAGED:
        honest = replace(case, rounds=PairRounds, aware=1, leak_trials=0)
        assert audit(honest, trials=20_000, secure_noise=True).holds
