"""What all units share: refusals in one line, and the defaults of the command line."""

import math

import pytest

from dpps.errors import UsageError
from dpps.privacy import UNITS, PrivacyOptions, one_of, positive
from dpps.privacy.units.base import check_delta
from dpps.runs import TrainConfig


@pytest.mark.parametrize("name", UNITS.names())
def test_every_unit_has_usual_settings_and_says_whom_it_protects(name: str) -> None:
    unit = UNITS[name].usual()
    assert unit.name == name
    assert unit.who()
    assert unit.limits()
    options = PrivacyOptions.of(TrainConfig(unit=name))
    assert set(UNITS[name].defaults(options)) >= {"lr_shared", "lr_local"}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: one_of("record", epsilon=1.0, noise=2.0), "both are given: leave one out"),
        (lambda: one_of("record", epsilon=None, noise=None), "neither is given: give one"),
        (lambda: positive(clip=0.0), "clip is 0.0: it must be a number, positive"),
        (lambda: positive(clip=math.nan), "clip is nan"),
        (lambda: check_delta(0.5), r"it must lie in \[0, 0.1\)"),
        (lambda: check_delta(0.0), "Gaussian noise needs a delta above 0"),
    ],
)
def test_refusals_name_value_and_remedy(call, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        call()


def test_what_makes_sense_is_let_through() -> None:
    one_of("record", epsilon=None, noise=2.0)
    positive(clip=1.0, epsilon=None)
    check_delta(0.0, pure=True)
