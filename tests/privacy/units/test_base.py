"""What all units share: refusals in one line, and the defaults of the command line."""

import math

import pytest

from dpps.errors import UsageError
from dpps.privacy import UNITS, PrivacyOptions, one_of, positive
from dpps.privacy.units.base import check_delta
from dpps.runs import Options


@pytest.mark.parametrize("name", UNITS.names())
def test_every_unit_has_usual_settings_and_says_whom_it_protects(name: str) -> None:
    unit = UNITS[name].usual()
    assert unit.name == name
    assert unit.who()
    assert unit.limits()
    options = PrivacyOptions.of(Options(unit=name))
    assert set(UNITS[name].defaults(options)) >= {"lr_shared", "lr_local"}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: one_of("record", epsilon=1.0, noise=2.0), "record.*epsilon or noise.*both"),
        (lambda: one_of("record", epsilon=None, noise=None), "record.*epsilon or noise.*neither"),
        (lambda: positive(clip=0.0), r"clip.*0\.0"),
        (lambda: positive(clip=math.nan), "clip.*nan"),
        (lambda: check_delta(0.5), r"delta.*0\.5.*\[0, 0\.1\)"),
        (lambda: check_delta(0.0), "delta.*0.*Laplace"),
    ],
)
def test_refusals_name_value_and_remedy(call, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        call()


def test_what_makes_sense_is_let_through() -> None:
    one_of("record", epsilon=None, noise=2.0)
    positive(clip=1.0, epsilon=None)
    check_delta(0.0, pure=True)
