"""What somebody gets who does not belong: nothing, before any row; and one line on the side that can know of it."""

import json
import resource
import select
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpps.errors import PeerError, RunError
from dpps.peers import Channel, Federation, Identity, Request, connections, server_name
from dpps.peers.connections import METHOD, SERVICE, load_grpc
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
def opened() -> Iterator[Callable[..., Channel]]:
    with ExitStack() as stack:

        def join(federation: Federation, identity: Identity) -> Channel:
            made = Channel(federation, identity)
            stack.callback(made.close)
            return made.start()

        yield join


def at(three: Organisations, port: int) -> Federation:
    """The same contract, with somebody else at the first member's address."""
    members = (
        replace(three.federation.members[0], address=f"127.0.0.1:{port}"),
        *three.federation.members[1:],
    )
    return replace(three.federation, members=members).signed(three.convener)


def own_port(three: Organisations) -> int:
    return int(three.identities[A].listen.rpartition(":")[2])


def test_a_capture_holds_no_byte_of_a_row(three: Organisations, opened: Callable[..., Channel]) -> None:
    relay = Relay(own_port(three))
    federation = at(three, relay.port)
    listens, dials = opened(federation, three.identities[A]), opened(federation, three.identities[C])
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
    three: Organisations, opened: Callable[..., Channel], tmp_path: Path
) -> None:
    member = three.federation.members[0]
    impostor = Impostor(tmp_path, Request(member.name, member.address, member.key))
    dials = opened(at(three, impostor.port), three.identities[C])
    until(lambda: len(impostor.failed) > 1 and bool(dials.refusals))
    dials.send(A, b"row")
    assert impostor.heard == b""
    assert dials.connected() == frozenset()
    (refusal,) = dials.refusals
    assert f"hospital-a (127.0.0.1:{impostor.port})" in refusal
    assert "key" in refusal
    impostor.close()


def test_another_member_cannot_take_ones_place(three: Organisations, opened: Callable[..., Channel]) -> None:
    """Its certificate is of the same convener, but it is not the one that is dialled."""
    other = int(three.identities[B].listen.rpartition(":")[2])
    federation = at(three, other)
    opened(federation, three.identities[B])
    dials = opened(federation, three.identities[C])
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
    three: Organisations, opened: Callable[..., Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE", 0.5)
    monkeypatch.setattr(
        Federation, "check_for", lambda self, identity: self.by_fingerprint(identity.fingerprint)
    )
    listens = opened(expired(three, 0), three.identities[A])
    dials = opened(expired(three, 0), three.identities[C])
    until(lambda: bool(dials.refusals))
    assert "refused hospital-a" in dials.refusals[0]
    assert "expired" in dials.refusals[0]
    until(lambda: bool(listens.refusals))
    listens.close()
    dials.close()
    listens, dials = (
        opened(expired(three, 2), three.identities[A]),
        opened(expired(three, 2), three.identities[C]),
    )
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
    three: Organisations, opened: Callable[..., Channel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE", 0.3)
    listens = opened(three.federation, three.identities[A])
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


def test_replayed_and_malformed_hellos(three: Organisations, opened: Callable[..., Channel]) -> None:
    listens = opened(three.federation, three.identities[A])
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
    three: Organisations, opened: Callable[..., Channel]
) -> None:
    listens = opened(three.federation, three.identities[A])
    grpc = load_grpc()
    made, link = call_of(three, C)
    with made, pytest.raises(grpc.RpcError) as caught:
        list(link(iter([bytes(70 << 20)])))
    assert caught.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
    assert listens.receive(0) is None


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_garbage_neither_crashes_nor_stalls(
    three: Organisations, opened: Callable[..., Channel], tmp_path: Path, count: int
) -> None:
    listens, friend = (
        opened(three.federation, three.identities[A]),
        opened(three.federation, three.identities[B]),
    )
    until(lambda: friend.connected() == {A})
    name = server_name(listens.own.fingerprint)
    for seed in range(4):
        assert throw(own_port(three), credentials(three, tmp_path, C), name, count // 4, seed) == count // 4
        row = b"row %d" % seed  # who is connected goes on meanwhile
        until(lambda row=row: friend.send(A, row) or listens.receive(1.0) == (B, row))  # type: ignore[misc]
    newcomer = opened(three.federation, three.identities[C])
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
    three: Organisations, opened: Callable[..., Channel]
) -> None:
    """Nobody needs a certificate to open them, and without a handle no outbox is written."""
    listens, friend = (opened(three.federation, three.identities[name]) for name in (A, B))
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
    newcomer = opened(three.federation, three.identities[C])
    until(lambda: A in newcomer.connected() and C in listens.connected())


def test_a_port_that_is_taken(three: Organisations) -> None:
    with (
        socket.create_server(("127.0.0.1", own_port(three))),
        pytest.raises(RunError, match=rf"127\.0\.0\.1:{own_port(three)}"),
    ):
        Channel(three.federation, three.identities[A]).start()


def test_few_connections_of_one_member_may_wait_for_its_hello(
    three: Organisations, opened: Callable[..., Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    # those that wait are still there, however slow this is
    monkeypatch.setattr(connections, "PATIENCE", PATIENCE)
    listens = opened(three.federation, three.identities[A])
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
        friend = opened(three.federation, three.identities[B])
        until(lambda: friend.connected() == {A})
        for call in silent:
            call.cancel()
    newcomer = opened(three.federation, three.identities[C])
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
