"""Who is here: by signs of life that their owner counts, direct ones before hearsay."""

from dpps.peers import DONE
from dpps.peers.links import HERE, LEFT, View
from dpps.peers.messages import Presence


def _told(*entries: tuple[int, int, int]) -> list[Presence]:
    return [Presence(*entry) for entry in entries]


def test_silence_makes_a_member_away_and_a_new_sign_brings_it_back() -> None:
    view = View(3, own=0, hard=10.0, start=1)
    assert view.here(0.0) == [0]
    view.hear(_told((0, 0, HERE), (5, 3, HERE), (7, 2, HERE)), now=1.0)
    assert view.here(5.0) == [0, 1, 2]
    view.hear(_told((0, 0, HERE), (6, 4, HERE), (7, 2, HERE)), now=9.0)
    assert view.here(12.0) == [0, 1], "the old sign of 2 came again"
    assert view.missing(10.0) == [2]
    view.hear(_told((0, 0, HERE), (7, 4, HERE), (8, 2, HERE)), now=13.0)
    assert view.here(13.0) == [0, 1, 2]
    view.hear(_told((0, 0, HERE), (8, 4, HERE), (9, 2, LEFT)), now=14.0)
    assert view.here(14.0) == [0, 1]


def test_the_newest_of_everybody_counts_whoever_tells_it() -> None:
    view = View(4, own=0, hard=10.0, start=1)
    view.hear(_told((0, 0, HERE), (1, 5, HERE), (1, 9, HERE), (1, 900, HERE)), now=1.0)
    assert [view.pushed(node) for node in (1, 2, 3)] == [5, 9, 900]
    assert view.rounds(1.0) == [5, 9, 900]
    view.hear(_told((7, 800, DONE), (1, 600, HERE), (2, 7, HERE), (0, 7, HERE)), now=2.0)
    assert view.known[0].pushed == -1, "of itself a member knows best"
    assert view.known[1].pushed == 5, "as many signs of life as before are not new"
    assert view.known[2].pushed == 7
    assert view.pushed(2) == 9, "what was sent is not forgotten"
    assert view.rounds(2.0) == [5, 9, 900]
    assert view.rounds(11.5) == [9]


def test_a_member_that_has_forgotten_rounds_is_told_of_them() -> None:
    view = View(3, own=0, hard=10.0, start=1)
    for beats, pushed in ((1, 7), (2, 3)):
        view.hear(_told((0, -1, HERE), (beats, pushed, HERE), (0, -1, HERE)), now=1.0)
    assert view.beat(0, HERE, to=1)[1] == Presence(1, 7, HERE)
    assert view.beat(0, HERE, to=2)[1] == Presence(2, 3, HERE)


def test_signs_of_life_are_signed_as_they_are_told() -> None:
    view = View(2, own=1, hard=10.0, start=1, sign=lambda each: each.message("run", "b"))
    told = view.beat(4, HERE)[1]
    assert told.signature == Presence(told.beats, 4, HERE).message("run", "b")


def test_who_was_expelled_counts_no_more() -> None:
    view = View(4, own=0, hard=10.0, start=1)
    view.hear(_told((0, 0, HERE), (5, 3, HERE), (5, 9, HERE), (5, 9, HERE)), now=1.0)
    assert view.here(7.0) == view.taking_part() == [0, 1, 2, 3]
    assert view.missing(7.0) == [1, 2, 3]
    assert view.rounds(7.0) == [3, 9, 9]
    view.ignored = frozenset({2, 3})
    view.hear(_told((0, 0, HERE), (6, 3, HERE), (6, 9, HERE), (6, 9, HERE)), now=7.0)  # it has not heard yet
    assert view.here(7.0) == view.taking_part() == [0, 1]
    assert view.missing(7.0) == []
    assert view.rounds(7.0) == [3]


def test_an_old_frame_changes_nothing() -> None:
    view = View(2, own=0, hard=10.0, start=1)
    view.hear(_told((0, 0, HERE), (5, 3, HERE)), now=1.0)
    view.hear(_told((0, 0, HERE), (4, 2, HERE)), now=9.0)
    assert view.pushed(1) == 3
    assert view.age(1, 9.0) == 8.0


def test_a_new_start_counts_as_new() -> None:
    first, second = View(2, 0, 1.0, start=1), View(2, 0, 1.0, start=2)
    for _ in range(1000):
        late = first.beat(0, HERE)[0]
    assert second.beat(0, HERE)[0].beats > late.beats
