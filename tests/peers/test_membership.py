"""What a member has to know of its federation: who takes part, and whom it talks to."""

from dataclasses import replace

from tests.support.bare import membership_of

NAMES = ("a", "b", "c", "d")


def test_by_default_all_take_part_and_talk_to_each_other() -> None:
    membership = membership_of(NAMES, 1)
    assert membership.name == "b"
    assert membership.present == set(NAMES)
    assert membership.partners == {"a", "c", "d"}


def test_partners_are_neighbours_who_may_still_take_part() -> None:
    membership = membership_of(NAMES, 1, neighbours=frozenset({"a", "c"}))
    assert membership.partners == {"a", "c"}
    without = replace(membership, active=frozenset({"a", "b", "d"}))
    assert without.present == {"a", "b", "d"}
    assert without.partners == {"a"}
