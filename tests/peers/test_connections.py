"""Connections: frames arrive whole; whoever does not belong gets nothing, before any row, and one line on the side that can know of it."""

import json
import logging
import os
import resource
import select
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dpps.errors import PeerError, RunError, UsageError
from dpps.peers import Channel, Federation, Request, connections, expel, renew, server_name
from dpps.peers.connections import (
    FRAMES,
    HANDSHAKE,
    METHOD,
    SERVICE,
    TURN,
    Handshakes,
    Incoming,
    Outgoing,
    _Dialler,
    _file_in,
    _next,
    _shown,
    load_grpc,
    options,
)
from dpps.peers.messages import Hello
from tests.support.garbage import throw
from tests.support.peers import NAMES, Organisations
from tests.support.processes import PATIENCE, free_port, open_files, until
from tests.support.relay import Impostor, Relay

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


def test_both_sides_tell_of_another_model(
    join: Callable[..., Channel], caplog: pytest.LogCaptureFixture
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


def test_expelled_members_are_refused_before_any_row(
    three: Organisations, join: Callable[..., Channel]
) -> None:
    second = expel(three.federation, C, three.convener)
    here, there = refusals(join(A, second), join(C))
    assert here.startswith("refused somebody (127.0.0.1): ")
    assert all(part in here for part in ("expelled: hospital-c", "revision 2"))
    assert there.startswith("hospital-a")
    assert "expelled: hospital-c" in there


def test_a_new_revision_spreads_and_disconnects_the_expelled(
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
    other = join(B)  # comes with revision 1, is given revision 2
    until(lambda: other.federation.revision == 2)
    until(lambda: one.connected() == {B} and other.connected() == {A} and third.connected() == frozenset())
    third.send(A, b"row")
    assert one.receive(0.05) is None


def test_revisions_of_two_neighbours_are_told_in_their_order(three: Organisations) -> None:
    """Each neighbour has a thread of its own, and what is remembered last holds at the next start."""
    second = renew(three.federation, three.convener)
    third, told = expel(second, C, three.convener), []
    later = threading.Thread(target=lambda: channel.adopt(third))

    def noted(following: Federation) -> None:
        if following.revision == 2:
            later.start()
            later.join(0.3)  # longer than it takes if nobody holds it back
        told.append(following.revision)

    channel = Channel(three.federation, three.identities[A], noted)
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
    three: Organisations, join: Callable[..., Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And without any words of gRPC's, which differ between its versions."""
    monkeypatch.setattr("grpc._channel._MultiThreadedRendezvous.details", lambda error: "")
    listens, dials = join(A), join(C)
    until(lambda: dials.connected() == {A})
    listens.adopt(renew(three.federation, three.convener, days=500))
    dials.close()
    dials = join(C)  # comes with the old certificate of the other, and is given the later revision
    until(lambda: dials.connected() == {A}, str(dials.refusals))
    assert dials.federation.revision == listens.federation.revision == 2
    assert dials.refusals == []


def test_a_revision_that_is_not_the_conveners_is_refused(
    three: Organisations, join: Callable[..., Channel], tmp_path: Path
) -> None:
    forged = replace(three.federation, revision=7, signature=b"x")
    here, there = refusals(join(A), join(C, forged))
    assert all(part in here for part in ("wrong revision", " 7"))
    assert "wrong revision" in there


def at(three: Organisations, port: int) -> Federation:
    """The same contract, with somebody else at the first member's address."""
    members = (
        replace(three.federation.members[0], address=f"127.0.0.1:{port}"),
        *three.federation.members[1:],
    )
    return replace(three.federation, members=members).signed(three.convener)


def own_port(three: Organisations) -> int:
    return int(three.identities[A].listen.rpartition(":")[2])


def test_a_capture_holds_no_byte_of_a_row(three: Organisations, join: Callable[..., Channel]) -> None:
    relay = Relay(own_port(three))
    federation = at(three, relay.port)
    listens, dials = join(A, federation), join(C, federation)
    until(lambda: dials.connected() == {A} and listens.connected() == {C})
    rows = [np.random.default_rng(k).normal(size=20_000).tobytes() for k in range(2)]
    dials.send(A, rows[0])
    listens.send(C, rows[1])
    assert listens.receive(PATIENCE) == (C, rows[0])
    assert dials.receive(PATIENCE) == (A, rows[1])
    relay.close()
    seen = bytes(relay.seen)
    assert len(seen) > 320_000
    for row in rows:
        assert not [k for k in range(0, len(row), 160) if row[k : k + 16] in seen]
    for secret in (federation.id.encode(), b"nonce"):
        assert secret not in seen


def test_a_man_in_the_middle_gets_nothing(
    three: Organisations, join: Callable[..., Channel], tmp_path: Path
) -> None:
    member = three.federation.members[0]
    impostor = Impostor(tmp_path, Request(member.name, member.address, member.key))
    dials = join(C, at(three, impostor.port))
    until(lambda: len(impostor.failed) > 1 and bool(dials.refusals))
    dials.send(A, b"row")
    assert impostor.heard == b""
    assert dials.connected() == frozenset()
    (refusal,) = dials.refusals
    assert f"hospital-a (127.0.0.1:{impostor.port})" in refusal
    assert "key" in refusal
    impostor.close()


def test_another_member_cannot_take_ones_place(three: Organisations, join: Callable[..., Channel]) -> None:
    """Its certificate is of the same convener, but it is not the one that is dialled."""
    other = int(three.identities[B].listen.rpartition(":")[2])
    federation = at(three, other)
    join(B, federation)
    dials = join(C, federation)
    until(lambda: bool(dials.refusals) and dials.connected() == {B})
    assert "key" in dials.refusals[0]


def expired(three: Organisations, row: int) -> Federation:
    member = three.federation.members[row]
    old = three.convener.certify(
        Request(member.name, member.address, member.key), three.federation.convener, -1
    )
    members = tuple(
        replace(m, certificate=old) if k == row else m for k, m in enumerate(three.federation.members)
    )
    return replace(three.federation, members=members).signed(three.convener)


def test_expired_certificates(
    three: Organisations, join: Callable[..., Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE", 0.5)
    monkeypatch.setattr(
        Federation, "check_for", lambda self, identity: self.by_fingerprint(identity.fingerprint)
    )
    listens = join(A, expired(three, 0))
    dials = join(C, expired(three, 0))
    until(lambda: bool(dials.refusals))
    assert "refused hospital-a" in dials.refusals[0]
    assert "expired" in dials.refusals[0]
    until(lambda: bool(listens.refusals))
    listens.close()
    dials.close()
    listens, dials = (join(A, expired(three, 2)), join(C, expired(three, 2)))
    until(lambda: bool(listens.refusals))
    assert "expired" in listens.refusals[0]
    assert dials.connected() == listens.connected() == frozenset()


def credentials(three: Organisations, folder: Path, name: str) -> ssl.SSLContext:
    """What a member's TLS shows, in the hands of somebody who writes bytes of his own."""
    context = ssl.create_default_context(cadata=three.federation.convener_pem.decode())
    (folder / "shown.crt").write_bytes(three.federation.member(name).pem)
    context.load_cert_chain(folder / "shown.crt", folder / name / "member.key")
    context.set_alpn_protocols(["h2"])
    return context


def test_strangers_and_old_tls_end_at_the_handshake(
    three: Organisations, join: Callable[..., Channel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE", 0.3)
    listens = join(A)
    name = server_name(three.federation.members[0].fingerprint)

    def reached(context: ssl.SSLContext) -> str | None:
        with socket.create_connection(("127.0.0.1", own_port(three))) as plain:
            plain.settimeout(PATIENCE)
            try:
                with context.wrap_socket(plain, server_hostname=name) as secured:
                    secured.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
                    return secured.version() if secured.recv(10) else None
            except OSError:
                return None

    member = credentials(three, tmp_path, C)
    assert reached(member) == "TLSv1.3"
    member.maximum_version = ssl.TLSVersion.TLSv1_2
    assert reached(member) is None
    nobody = ssl.create_default_context(cadata=three.federation.convener_pem.decode())
    nobody.set_alpn_protocols(["h2"])
    assert reached(nobody) is None
    until(lambda: bool(listens.refusals))
    assert "certificate" in listens.refusals[0]


def call_of(three: Organisations, name: str) -> tuple[Any, Any]:
    """A stream to the first member with another member's key."""
    grpc = load_grpc()
    own = three.federation.member(name)
    trusted = grpc.ssl_channel_credentials(
        three.federation.members[0].pem, three.identities[name].key.pem(), own.pem
    )
    override = ("grpc.ssl_target_name_override", server_name(three.federation.members[0].fingerprint))
    made = grpc.secure_channel(
        f"127.0.0.1:{own_port(three)}", trusted, [override, ("grpc.use_local_subchannel_pool", 1)]
    )
    return made, made.stream_stream(f"/{SERVICE}/{METHOD}")


def refused_as(three: Organisations, answer: Callable[[Hello], bytes]) -> str:
    """What the first member says to one who answers its hello like this."""
    grpc = load_grpc()
    made, link = call_of(three, C)
    frames: list[bytes] = []
    ready = connections.Outgoing(1 << 26)
    call = link(ready)
    with made:
        theirs = Hello.decoded(next(call))
        ready.put(answer(theirs))
        ready.put(b"row")
        with pytest.raises(grpc.RpcError) as caught:
            frames.extend(call)
        ready.end()
    assert frames == []
    return str(caught.value.details())


def test_replayed_and_malformed_hellos(three: Organisations, join: Callable[..., Channel]) -> None:
    listens = join(A)
    recorded: list[bytes] = []

    def honest(theirs: Hello) -> bytes:
        recorded.append(replace(theirs, facts={**theirs.facts, "version": "0"}).encoded())
        return recorded[0]

    assert refused_as(three, honest).startswith("other version")
    assert refused_as(three, lambda _: recorded[0]).startswith("replayed message")
    for wrong in (
        b"",
        b"{}",
        b"[" * 100_000,
        b"\xff\x00",
        b'{"federation": 1}',
        json.dumps(
            {"federation": "x", "epoch": 10**30, "digest": "", "facts": {}, "nonce": "", "file": ""}
        ).encode(),
    ):
        said = refused_as(three, lambda _, wrong=wrong: wrong)
        assert "no hello" in said or "replayed" in said or "wrong run" in said
    large = refused_as(three, lambda _: bytes(3_500_000))
    assert "3500000" in large
    assert listens.receive(0) is None
    assert listens.connected() == frozenset()
    assert any("refused hospital-c (127.0.0.1): replayed message" in line for line in listens.refusals)


def test_oversized_messages_are_refused_by_their_length(
    three: Organisations, join: Callable[..., Channel]
) -> None:
    listens = join(A)
    grpc = load_grpc()
    made, link = call_of(three, C)
    with made, pytest.raises(grpc.RpcError) as caught:
        list(link(iter([bytes(70 << 20)])))
    assert caught.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
    assert listens.receive(0) is None


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_garbage_neither_crashes_nor_stalls(
    three: Organisations, join: Callable[..., Channel], tmp_path: Path, count: int
) -> None:
    listens, friend = (join(A), join(B))
    until(lambda: friend.connected() == {A})
    name = server_name(listens.own.fingerprint)
    for seed in range(4):
        assert throw(own_port(three), credentials(three, tmp_path, C), name, count // 4, seed) == count // 4
        row = b"row %d" % seed  # who is connected goes on meanwhile
        until(lambda row=row: friend.send(A, row) or listens.receive(1.0) == (B, row))  # type: ignore[misc]
    newcomer = join(C)
    until(lambda: A in newcomer.connected() and C in listens.connected())
    until(lambda: newcomer.send(A, b"row") or listens.receive(1.0) == (C, b"row"))


@pytest.fixture
def _many_handles() -> Iterator[None]:
    """macOS allows 256 unless asked for more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = 4096 if before[1] == resource.RLIM_INFINITY else min(4096, before[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], enough), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("_many_handles")
def test_idle_connections_do_not_take_all_file_handles(
    three: Organisations, join: Callable[..., Channel]
) -> None:
    """Nobody needs a certificate to open them, and without a handle no outbox is written."""
    listens, friend = (join(name) for name in (A, B))
    until(lambda: friend.connected() == {A} and listens.connected() == {B})
    before, allowed = open_files(), connections.STRANGERS + 2 * (len(NAMES) + 4)
    with ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection(("127.0.0.1", own_port(three)), PATIENCE))
            for _ in range(allowed + 100)
        ]

        def ended() -> bool:
            taken = open_files() - before - len(idle)
            assert taken <= allowed + 20, "file handles of idle connections"
            return len(select.select(idle, [], [], 0)[0]) >= 100

        until(ended)
        until(lambda: friend.send(A, b"row") or listens.receive(1.0) == (B, b"row"))
    newcomer = join(C)
    until(lambda: A in newcomer.connected() and C in listens.connected())


def test_a_port_that_is_taken(three: Organisations) -> None:
    with (
        socket.create_server(("127.0.0.1", own_port(three))),
        pytest.raises(RunError, match=rf"127\.0\.0\.1:{own_port(three)}"),
    ):
        Channel(three.federation, three.identities[A]).start()


def test_few_connections_of_one_member_may_wait_for_its_hello(
    three: Organisations, join: Callable[..., Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    # those that wait are still there, however slow this is
    monkeypatch.setattr(connections, "PATIENCE", PATIENCE)
    listens = join(A)
    grpc = load_grpc()
    with ExitStack() as stack:
        silent = []
        for _ in range(connections.HELLOS):
            made, link = call_of(three, C)
            stack.enter_context(made)
            ready = connections.Outgoing(1 << 26)
            stack.callback(ready.end)
            silent.append(link(ready))
            Hello.decoded(next(silent[-1]))
        made, link = call_of(three, C)
        stack.enter_context(made)
        with pytest.raises(grpc.RpcError) as caught:
            list(link(iter([b"x"])))
        assert "2 connections" in str(caught.value.details())
        friend = join(B)
        until(lambda: friend.connected() == {A})
        for call in silent:
            call.cancel()
    newcomer = join(C)
    until(lambda: A in newcomer.connected() and C in listens.connected())


@pytest.mark.parametrize("told", [{}, {"ssl_tls_version": [b"TLSv1.2"]}])
def test_a_version_of_tls_that_is_not_told_is_refused(
    three: Organisations, told: dict[str, list[bytes]]
) -> None:
    listener = connections._Listener.__new__(connections._Listener)

    class Context:
        def auth_context(self) -> dict[str, list[bytes]]:
            return {"x509_pem_cert": [three.federation.member(C).pem], **told}

    with pytest.raises(PeerError, match=r"TLSv1\.3"):
        listener._caller(Context())


@pytest.mark.parametrize(
    ("own", "other", "waits"),
    [(0, 1, False), (1, 0, True), (2, 0, False)],
    ids=["the earlier row dials", "the later one waits", "who does not listen dials"],
)
def test_of_two_that_listen_the_later_row_leaves_dialling_to_the_other(
    three: Organisations, own: int, other: int, waits: bool
) -> None:
    channel: Any = SimpleNamespace(federation=three.federation, own=three.federation.members[own])
    assert _Dialler(channel, NAMES[other])._turn() == (TURN if waits else 0.0)


def test_an_answer_holds_a_file_or_nothing() -> None:
    assert _file_in(b'{"file": ""}') == ""
    assert _file_in(b'{"file": "text"}') == "text"
    for other in (b"", b"[]", b"{}", b'{"file": 3}', b"[" * 100_000):
        with pytest.raises(PeerError, match=r"answer.*hello"):
            _file_in(other)


def test_where_nobody_speaks_tls_no_certificate_is_shown(three: Organisations) -> None:
    contact = three.federation.members[0]
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def hang_up() -> None:
            server.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        assert _shown(replace(contact, address=address)) is None
    assert _shown(replace(contact, address=f"127.0.0.1:{free_port()}")) is None


class Lines(list[str]):
    """What is told, by a clock that the test moves on."""

    now = 0.0

    def told(self, handshakes: Handshakes, after: float = HANDSHAKE) -> int:
        """How many lines there are after so many seconds more."""
        self.now += after
        handshakes.look()
        return len(self)


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def handshakes(lines: Lines) -> Iterator[Handshakes]:
    made = Handshakes(lines.append, lambda: lines.now)
    yield made
    made.close()


def test_one_line_for_all_connections_that_got_no_further(lines: Lines, handshakes: Handshakes) -> None:
    assert lines.told(handshakes) == 0
    for _ in range(5):
        handshakes.begun()
    handshakes.passed("ipv4:10.0.0.1:1000")
    assert lines.told(handshakes) == 1
    assert "certificate" in lines[0]
    assert lines.told(handshakes) == 1  # they are counted once


def test_nothing_is_said_when_all_got_through_however_many_streams_they_open(
    lines: Lines, handshakes: Handshakes
) -> None:
    for port in (1000, 1001):
        handshakes.begun()
        for _ in range(3):
            handshakes.passed(f"ipv4:10.0.0.1:{port}")
    assert lines.told(handshakes) == 0


def test_a_connection_that_has_just_begun_is_not_yet_refused(lines: Lines, handshakes: Handshakes) -> None:
    handshakes.begun()
    handshakes.passed("ipv4:10.0.0.1:1000")
    lines.now = 0.9 * HANDSHAKE
    handshakes.begun()
    assert lines.told(handshakes, after=0.2 * HANDSHAKE) == 0
    assert lines.told(handshakes) == 1  # now it has had its time


def test_who_ends_the_connection_before_its_hello_is_refused() -> None:
    def broken():
        raise Exception("the connection broke")  # noqa: TRY002 - as gRPC does
        yield b""

    assert _next(iter([b"hello", b"row"])) == b"hello"
    for requests, ends in ((iter(()), StopIteration), (broken(), Exception)):
        with pytest.raises(PeerError, match="hello"):
            _next(requests, ends)


def test_what_does_not_fit_is_dropped() -> None:
    queue = Outgoing(10)
    assert [queue.put(b"1234") for _ in range(3)] == [True, True, False]
    assert next(queue) == b"1234"
    assert queue.put(b"123456")
    queue.end()
    assert not queue.put(b"")
    assert list(queue) == [b"1234", b"123456"]
    small = Outgoing(1 << 20)
    assert sum(small.put(b"x") for _ in range(2 * FRAMES)) == FRAMES
    small.end(at_once=True)
    assert list(small) == []


def test_members_take_turns_and_only_the_newest_wait() -> None:
    queue = Incoming(10)
    for k in range(5):
        queue.put("loud", b"%d234" % k)
    queue.put("quiet", b"x")
    assert [queue.get(0) for _ in range(4)] == [("loud", b"3234"), ("quiet", b"x"), ("loud", b"4234"), None]
    queue.put("loud", bytes(100))  # a single one is always taken
    assert queue.get(0) == ("loud", bytes(100))
    assert queue.get(0.01) is None


def test_messages_have_a_largest_size_in_both_directions_and_nothing_is_named_twice() -> None:
    found = dict(options(1000, ("grpc.so_reuseport", 0)))
    assert found["grpc.max_receive_message_length"] == found["grpc.max_send_message_length"] == 1000
    assert found["grpc.so_reuseport"] == 0
    assert found["grpc.enable_http_proxy"] == 0  # a proxy would see who talks to whom
    assert len(found) == len(options(1000, ("grpc.so_reuseport", 0)))


def test_no_cipher_of_tls_1_2_fits_the_members_keys() -> None:
    load_grpc()
    assert all("ECDHE-RSA" in suite for suite in os.environ["GRPC_SSL_CIPHER_SUITES"].split(":"))


def test_the_extra_is_named_where_grpc_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(UsageError, match=r"dpps\[peers\]"):
        load_grpc()
