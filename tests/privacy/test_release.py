"""One line of a ledger."""

import math

import pytest

from dpps.errors import UsageError
from dpps.noise import gaussian, laplace, sampled
from dpps.privacy import Release

ROWS = range(4)


@pytest.mark.parametrize(
    "release",
    [
        Release(3, laplace(0.5), "laplace", 2.0, 1.0),
        Release(0, sampled(0.1, gaussian(1.5)), "gaussian", 1.0, 1.5, rows=(1, 3)),
        Release(7, laplace(1.0), "laplace", math.inf, 1.0),
    ],
)
def test_a_line_says_all_that_was_charged(release: Release) -> None:
    line = release.to_json()
    assert Release.from_json(line, ROWS) == release
    assert release.charge.event == release.event


def test_the_pure_epsilon_is_for_readers() -> None:
    assert Release(0, laplace(0.5), "laplace", 2.0, 1.0).to_json()["epsilon"] == pytest.approx(2.0)
    assert Release(0, gaussian(0.5), "gaussian", 2.0, 1.0).to_json()["epsilon"] is None


@pytest.mark.parametrize(
    "wrong",
    [
        Release(0, laplace(1.0), "laplace", 1.0, 1.0, rows=(4,)),
        Release(0, laplace(1.0), "laplace", 1.0, 1.0, rows=()),
        Release(-1, laplace(1.0), "laplace", 1.0, 1.0),
        Release(0, laplace(1.0), "laplace", math.nan, 1.0),
    ],
)
def test_what_no_accountant_can_take_is_refused(wrong: Release) -> None:
    with pytest.raises(UsageError, match=r"Release\(round="):
        wrong.check(ROWS)
