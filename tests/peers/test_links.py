"""Links: every share counts exactly once."""

import json

from dpps.peers import Share
from dpps.peers.links import Inlet, Outlet
from dpps.peers.messages import Claim


def _share(number: int) -> Share:
    return Share(Claim(0, number, "d", number, 0.5, 1.0, b"s"), b"")


def test_shares_are_kept_until_they_are_safe_at_the_receiver() -> None:
    outlet = Outlet()
    for round_ in (3, 4):
        outlet.add(0.5, (0, round_))
    outlet.hear(start=1, got=2, kept=0)
    assert [s.number for s in outlet.waiting] == [1, 2], "counted is not yet safe"
    outlet.hear(start=1, got=2, kept=1)
    assert [s.number for s in outlet.waiting] == [2]
    assert not outlet.due(100.0, first=1.0), "the receiver has it"
    outlet.hear(start=2, got=1, kept=1)
    assert [s.number for s in outlet.due(100.0, first=1.0)] == [2], "it has forgotten it in a crash"
    outlet.hear(start=1, got=2, kept=2)
    assert [s.number for s in outlet.waiting] == [2], "a frame from before the restart"


def test_what_a_receiver_may_show_as_the_latest() -> None:
    outlet = Outlet()
    for round_ in (3, 4, 6):
        outlet.add(0.5, (0, round_))
    assert outlet.letters() == {(0, 3), (0, 4), (0, 6)}
    outlet.hear(start=1, got=3, kept=2)
    assert outlet.safe == (0, 4)
    again = Outlet.from_json(json.loads(json.dumps(outlet.to_json())))
    assert again.letters() == outlet.letters() == {(0, 4), (0, 6)}
    assert again.safe == (0, 4)


def test_a_link_that_does_not_answer_swallows_little() -> None:
    outlet, given = Outlet(), 0
    for round_ in range(20):
        if outlet.ready(0, round_):
            outlet.add(0.5, (0, round_))
            given += 1
    assert given == 2
    outlet.hear(start=1, got=2, kept=0)
    assert outlet.ready(0, 20)


def test_what_is_not_heard_of_is_sent_again_more_and_more_rarely() -> None:
    outlet = Outlet()
    outlet.add(1.0, (0, 0))
    times = [t for t in range(60) if outlet.due(float(t), first=1.0)]
    assert times == [0, 1, 3, 7, 15, 31]


def test_an_inlet_counts_in_order_and_once() -> None:
    inlet = Inlet(counted=3)
    assert [inlet.expects(_share(n)) for n in (2, 3, 4, 5)] == [False, False, True, False]


def test_links_survive_on_disk() -> None:
    outlet = Outlet()
    outlet.add(0.25, (1, 9))
    again = Outlet.from_json(outlet.to_json())
    assert (again.number, again.waiting[0].letter, again.waiting[0].weight) == (1, (1, 9), 0.25)
    inlet = Inlet(5, 4, seen=Claim(0, 2, "d", 5, 0.1, 1.3, b"\x01"), receipt=b"\x02")
    assert Inlet.from_json(inlet.to_json()) == Inlet(5, 5, seen=inlet.seen, receipt=b"\x02")


def test_a_share_that_came_out_of_order_is_sent_again_as_soon_as_the_one_before_has_arrived() -> None:
    outlet = Outlet()
    for round_ in (3, 4):
        outlet.add(0.5, (0, round_))
    for now in (0.0, 1.0, 3.0, 7.0):
        assert len(outlet.due(now, first=1.0)) == 2
    outlet.hear(start=1, got=1, kept=0)
    assert [sent.number for sent in outlet.due(7.5, first=1.0)] == [2]
    outlet.hear(start=1, got=1, kept=1)
    assert not outlet.due(7.6, first=1.0), "the same word again changes nothing"
    outlet.add(0.5, (0, 5))
    assert [sent.number for sent in outlet.due(7.7, first=1.0)] == [3]
    outlet.hear(start=1, got=2, kept=1)
    assert not outlet.due(7.8, first=1.0), "it may well arrive yet"
