import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from dpps.errors import PeerError
from dpps.peers import Channel, Federation, expel, renew
from dpps.peers.connections import Outgoing
from tests.support.peers import NAMES, Organisations
from tests.support.processes import PATIENCE, free_port, until

A, B, C = NAMES


@pytest.fixture
def three(tmp_path: Path) -> Organisations:
    return Organisations(tmp_path, (free_port(), free_port()))


@pytest.fixture
def join(three: Organisations) -> Iterator[Callable[..., Channel]]:
    with ExitStack() as stack:

        def opened(
            name: str,
            federation: Federation | None = None,
            facts: dict[str, str] | None = None,
            on_revision: Callable[[Federation], None] | None = None,
        ) -> Channel:
            channel = Channel(federation or three.federation, three.identities[name], on_revision)
            stack.callback(channel.close)
            return channel.start(facts)

        yield opened


def test_frames_arrive_whole_in_both_directions(join: Callable[..., Channel]) -> None:
    channels = {name: join(name) for name in NAMES}  # the last only dials out
    for name, channel in channels.items():
        others = set(NAMES) - {name}
        until(lambda channel=channel, others=others: channel.connected() == others)
    frames = [bytes([k]) * size for k, size in enumerate((0, 1, 31_000, 4 << 20))]
    for sender in NAMES:
        for to in set(NAMES) - {sender}:
            for frame in frames:
                channels[sender].send(to, sender.encode() + frame)
            got = [channels[to].receive(PATIENCE) for _ in frames]
            assert got == [(sender, sender.encode() + frame) for frame in frames]
    assert channels[A].receive(0) is None
    assert channels[A].traffic[B].sent == channels[B].traffic[A].received > 4 << 20
    assert not any(channel.refusals for channel in channels.values())


def test_nobody_waits_for_the_absent(join: Callable[..., Channel]) -> None:
    alone = join(A)
    alone.send(B, b"lost")
    alone.send("nobody", b"lost")
    assert alone.receive(0.01) is None
    assert alone.connected() == frozenset()
    assert alone.traffic[B].dropped == 1


def test_a_member_that_was_away_is_connected_again(join: Callable[..., Channel]) -> None:
    stays, away = join(A), join(C)
    until(lambda: stays.connected() == {C} and away.connected() == {A})
    away.send(A, b"last words")
    away.close()  # what waits gets away
    assert stays.receive(PATIENCE) == (C, b"last words")
    until(lambda: stays.connected() == frozenset())
    back = join(C)
    until(lambda: stays.connected() == {C} and back.connected() == {A})
    stays.send(C, b"welcome back")
    assert back.receive(PATIENCE) == (A, b"welcome back")


def test_the_listening_side_may_come_back_too(join: Callable[..., Channel]) -> None:
    listens, dials = join(A), join(C)
    until(lambda: dials.connected() == {A} and listens.connected() == {C})
    listens.close()
    until(lambda: dials.connected() == frozenset())
    join(A)
    until(lambda: dials.connected() == {A})


def refusals(one: Channel, other: Channel) -> tuple[str, str]:
    """What both sides say; nothing has passed between them."""
    until(lambda: bool(one.refusals and other.refusals), f"{one.refusals} {other.refusals}")
    assert one.connected() == other.connected() == frozenset()
    assert len(one.refusals) == len(other.refusals) == 1
    return one.refusals[0], other.refusals[0]


def test_other_model_and_other_version(
    join: Callable[..., Channel], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    listens = join(A, facts={"model": "aaaa"})
    dials = join(C, facts={"model": "bbbb"})
    here, there = refusals(listens, dials)
    assert "refused hospital-c" in here
    assert all(part in here for part in ("other model", "bbbb", "aaaa"))
    assert "refused hospital-a" in there
    assert all(part in there for part in ("other model", "aaaa", "bbbb"))
    until(lambda: len(caplog.records) == 2)  # each side notes its refusal first, and tells it then
    assert sorted(record.getMessage() for record in caplog.records) == sorted((here, there))
    listens.close()
    dials.close()
    listens = join(A)
    dials = join(C, facts={"version": "9.9"})
    here, there = refusals(listens, dials)
    assert all(part in here for part in ("other version", "9.9"))
    assert all(part in there for part in ("other version", "9.9"))


def test_wrong_run_of_the_same_convener(three: Organisations, join: Callable[..., Channel]) -> None:
    other = replace(three.federation, id="0123456789abcdef").signed(three.convener)
    here, there = refusals(join(A), join(C, other))
    assert all(part in here for part in ("wrong run", "0123456789abcdef"))
    assert "wrong run" in there


def test_expelled_members_are_refused_before_any_row(
    three: Organisations, join: Callable[..., Channel]
) -> None:
    second = expel(three.federation, C, three.convener)
    here, there = refusals(join(A, second), join(C))
    assert here.startswith("refused somebody (127.0.0.1): ")
    assert all(part in here for part in ("expelled: hospital-c", "revision 2"))
    assert there.startswith("hospital-a")
    assert "expelled: hospital-c" in there


def test_a_new_epoch_spreads_and_disconnects_the_expelled(
    three: Organisations, join: Callable[..., Channel]
) -> None:
    seen: list[int] = []
    one, other, third = join(A, on_revision=lambda f: seen.append(f.revision)), join(B), join(C)
    until(lambda: one.connected() == {B, C} and third.connected() == {A, B})
    second = expel(three.federation, C, three.convener)
    one.adopt(second)
    until(lambda: one.connected() == {B} and third.connected() == {B})
    assert seen == [2]
    other.close()
    other = join(B)  # comes with epoch 1, is given epoch 2
    until(lambda: other.federation.revision == 2)
    until(lambda: one.connected() == {B} and other.connected() == {A} and third.connected() == frozenset())
    third.send(A, b"row")
    assert one.receive(0.05) is None


def test_epochs_of_two_neighbours_are_told_in_their_order(three: Organisations) -> None:
    """Each neighbour has a thread of its own, and what is remembered last holds at the next start."""
    second = renew(three.federation, three.convener)
    third, told = expel(second, C, three.convener), []
    later = threading.Thread(target=lambda: channel.adopt(third))

    def take_over(following: Federation) -> None:
        if following.revision == 2:
            later.start()
            later.join(0.3)  # longer than it takes if nobody holds it back
        told.append(following.revision)

    channel = Channel(three.federation, three.identities[A], take_over)
    channel.adopt(second)
    later.join(PATIENCE)
    assert told == [2, 3]


def test_expelled_between_hello_and_connection(three: Organisations, join: Callable[..., Channel]) -> None:
    listens = join(A)
    listens.adopt(expel(three.federation, C, three.convener))
    with pytest.raises(PeerError, match="expelled: hospital-c"), listens.attached(C, Outgoing(100)):
        pytest.fail("attached")
    assert listens.connected() == frozenset()


def test_renewed_certificates_are_used_without_a_new_start(
    three: Organisations, join: Callable[..., Channel]
) -> None:
    listens, dials = join(A), join(C)
    until(lambda: dials.connected() == {A})
    listens.adopt(renew(three.federation, three.convener, days=500))
    dials.close()
    dials = join(C)  # comes with the old certificate of the other, and is given the later epoch
    until(lambda: dials.connected() == {A}, str(dials.refusals))
    assert dials.federation.revision == listens.federation.revision == 2
    assert dials.refusals == []


def test_a_renewed_certificate_is_told_without_any_words_of_grpcs(
    three: Organisations, join: Callable[..., Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They differ between its versions, and are not part of what it promises."""
    monkeypatch.setattr("grpc._channel._MultiThreadedRendezvous.details", lambda error: "")
    listens = join(A)
    listens.adopt(renew(three.federation, three.convener, days=500))
    dials = join(C)
    until(lambda: dials.connected() == {A}, str(dials.refusals))
    assert dials.federation.revision == 2


def test_an_epoch_that_is_not_the_conveners_is_refused(
    three: Organisations, join: Callable[..., Channel], tmp_path: Path
) -> None:
    forged = replace(three.federation, revision=7, signature=b"x")
    here, there = refusals(join(A), join(C, forged))
    assert all(part in here for part in ("wrong revision", " 7"))
    assert "wrong revision" in there
