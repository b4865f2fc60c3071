"""What the convener signs, and what it refuses to sign."""

from dataclasses import replace
from pathlib import Path

import pytest

from dpps.errors import UsageError
from dpps.peers import REQUEST, Request, convene, expel, renew
from tests.support.peers import NAMES, PLAN, Organisations


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Organisations:
    return Organisations(tmp_path_factory.mktemp("three"), (7441, 7442))


def requests(three: Organisations) -> list[Request]:
    return [Request.read(Path(three.folder) / name / REQUEST) for name in NAMES]


def test_members_keep_the_order_of_their_requests_and_every_epoch_is_signed(three: Organisations) -> None:
    made = convene(PLAN, requests(three), three.convener)
    assert [member.name for member in made.members] == list(NAMES)
    assert made.revision == 1
    made.check_next(renew(made, three.convener, days=30))


@pytest.mark.parametrize("days", [0, 3651])
def test_certificates_hold_a_day_to_ten_years(three: Organisations, days: int) -> None:
    with pytest.raises(UsageError, match=f"--days is {days}"):
        convene(PLAN, requests(three), three.convener, days=days)
    with pytest.raises(UsageError, match=f"--days is {days}"):
        renew(three.federation, three.convener, days)


def test_two_members_of_one_name_or_key_are_refused(three: Organisations) -> None:
    a, b, c = requests(three)
    with pytest.raises(UsageError, match="name hospital-a"):
        convene(PLAN, [a, replace(b, name=a.name), c], three.convener)
    with pytest.raises(UsageError, match=r"key [0-9a-f]{64}"):
        convene(PLAN, [a, replace(b, key=a.key), c], three.convener)


def test_of_two_neighbours_one_must_listen(three: Organisations) -> None:
    a, b, c = requests(three)
    with pytest.raises(UsageError, match=r"hospital-b and hospital-c .*--listen"):
        convene(PLAN, [a, replace(b, address=""), c], three.convener)


def test_nobody_is_expelled_twice_or_below_the_least_number(three: Organisations) -> None:
    without = expel(three.federation, "hospital-c", three.convener)
    assert without.revision == three.federation.revision + 1
    with pytest.raises(UsageError, match=r"hospital-c .*revision 2"):
        expel(without, "hospital-c", three.convener)
    with pytest.raises(UsageError, match=r"hospital-b .*\b1 members.*\b2\b"):
        expel(without, "hospital-b", three.convener)
