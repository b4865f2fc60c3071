"""The audit of noise that cancels while nodes are away: the promise holds, and noise that does not follow them is found out."""

from dataclasses import replace

import pytest

from dpps.audit import absence_cases, audit
from dpps.privacy import Partners

CLAIM, SABOTAGED = absence_cases()


@pytest.mark.parametrize("secure", [True, False], ids=["secure", "seeded"])
def test_the_claim_holds_and_a_third_less_noise_is_caught(secure: bool) -> None:
    finding = audit(CLAIM, trials=20_000, secure_noise=secure)
    assert finding.holds
    assert finding.caught


def test_noise_split_as_if_nobody_were_away_is_found() -> None:
    assert not audit(SABOTAGED, secure_noise=True).holds
    assert SABOTAGED.secure_only
    mended = replace(SABOTAGED, partners=Partners, leak_trials=0)
    assert audit(mended, trials=20_000, secure_noise=True).holds
