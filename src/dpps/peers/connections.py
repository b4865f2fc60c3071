"""Connections between organisations: gRPC streams with mutual TLS 1.3, pinned to the keys in the federation file.

One stream carries the frames of two neighbours in both directions, whoever of them has dialled. Frames are sent without waiting
for anybody; a connection that breaks is made again, and what was on its way is lost, as `Post` allows.
"""

import json
import logging
import os
import random
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, NoReturn, Self

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from dpps.errors import PeerError, RunError, UsageError, needs_extra
from dpps.peers.contract import LARGEST_FILE, Contact, Federation
from dpps.peers.identity import Identity, fingerprint, issued_by, server_name
from dpps.peers.messages import PROTOCOL, Hello, Post, newer_file, refuse_other, refuse_replayed
from dpps.transport.cluster import printable
from dpps.version import __version__

log = logging.getLogger(__name__)

SERVICE, METHOD = "dpps.Peers", "Link"
TLS = "TLSv1.3"
PATIENCE = 15.0
"""Seconds for connecting and for the hello."""
HANDSHAKE = 15.0
"""Seconds after which a connection that got no further than TLS is reported."""
SHORTEST, LONGEST = 0.2, 5.0
"""Seconds between attempts to dial: twice as long each time, and never in step with others."""
TURN = 3.0
"""Of two that both listen, the one with the later row leaves dialling to the other for so many seconds."""
DRAIN = 10.0
"""Seconds that frames have, when the channel is closed, to get away."""
STRANGERS = 64
"""Connections beside those of the members at a time. A member that has no file handle left could not write its outbox."""
HELLOS = 2
"""Connections of one member that may wait for its hello at a time."""
FRAMES = 512
"""How many frames wait at most for one member; rows are fewer, as each waits for its acknowledgement."""
_ROWS = 2
"""Frames of the largest size that wait at most in each direction: of one link no more shares than that are on their way."""
_REMEMBERED = 100
"""Different refusals that are told at most, so that nobody can fill a disk with lines."""
_ALIVE, _ANSWER = 5_000, 10_000
"""Milliseconds after which a silent connection is asked for a sign of life, and that it has for the answer."""
_SILENT = 15_000
"""Milliseconds after which a connection without TLS, or without a stream, is closed."""


def load_grpc() -> Any:
    """The module, or one line that names the extra to install.

    TLS 1.3 has its own ciphers, which cannot be chosen. So the only choice offered for TLS 1.2 is one that needs a key of another
    kind (RSA) than all members have: such a handshake finds no cipher. The listening side looks at the version once more, which
    is all that refuses TLS 1.2 in a program that has loaded gRPC before, for gRPC reads these settings once.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ["GRPC_SSL_CIPHER_SUITES"] = "ECDHE-RSA-AES128-GCM-SHA256"
    with needs_extra("peers"):
        import grpc
    return grpc


def options(largest: int, *further: tuple[str, Any]) -> Sequence[tuple[str, Any]]:
    """Of both sides of a connection. A message of more than `largest` bytes is refused before its bytes have arrived."""
    return (
        ("grpc.max_receive_message_length", largest),
        ("grpc.max_send_message_length", largest),
        ("grpc.max_metadata_size", 8192),
        ("grpc.absolute_max_metadata_size", 16384),
        ("grpc.keepalive_time_ms", _ALIVE),
        ("grpc.keepalive_timeout_ms", _ANSWER),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.lookahead_bytes", min(3 * largest, 32 << 20)),
        ("grpc.http2.max_frame_size", 1 << 20),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        *further,
    )


# Queues with an end: how many frames, and how many bytes, wait at most


class Outgoing(Iterator[bytes]):
    """Frames on their way to one connection, so many bytes at most. What does not fit is dropped; iterating waits for the next."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._frames: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._ending = False

    def put(self, frame: bytes) -> bool:
        """Whether there was room."""
        with self._changed:
            waiting = sum(map(len, self._frames))
            if self._ending or len(self._frames) >= FRAMES or waiting + len(frame) > self._largest:
                return False
            self._frames.append(frame)
            self._changed.notify_all()
            return True

    def end(self, *, at_once: bool = False) -> None:
        """No more frames: iteration ends after those that wait, or at once."""
        with self._changed:
            self._ending = True
            if at_once:
                self._frames.clear()
            self._changed.notify_all()

    def __next__(self) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: self._frames or self._ending)
            if not self._frames:
                raise StopIteration
            return self._frames.popleft()


class Incoming:
    """Frames that have arrived, taken from one member after the other, so that nobody can crowd the others out. Of a member with
    more than so many bytes the oldest are dropped."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._frames: dict[str, deque[bytes]] = {}
        self._changed = threading.Condition()

    def put(self, name: str, frame: bytes) -> None:
        with self._changed:
            frames = self._frames.setdefault(name, deque())
            frames.append(frame)
            while len(frames) > FRAMES or (len(frames) > 1 and sum(map(len, frames)) > self._largest):
                frames.popleft()
            self._changed.notify()

    def forget(self, name: str) -> None:
        """Drop the frames of a member that wait."""
        with self._changed:
            self._frames.pop(name, None)

    def get(self, seconds: float) -> tuple[str, bytes] | None:
        """The next frame; None when none comes within so many seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._frames, seconds):
                return None
            name = next(iter(self._frames))
            frames = self._frames.pop(name)
            frame = frames.popleft()
            if frames:
                self._frames[name] = frames  # now behind the others
            return name, frame


# The connections of one member


@dataclass
class Traffic:
    """What has passed between this member and another, in bytes of frames."""

    sent: int = 0
    received: int = 0
    dropped: int = 0
    """Frames that were not sent: not connected, or too much waiting."""


@dataclass
class _Link:
    """The connections with one neighbour: two when both have dialled. The newest is used."""

    streams: list[Outgoing] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)
    made: int = 0
    """How many connections there were."""


class Channel(Post):
    """Frames to and from the neighbours of one member.

    Nobody is connected before `start`.

    Args:
        federation: the contract; later revisions that neighbours bring are adopted.
        identity: this member.
        on_revision: called with every later revision that is adopted.

    Raises:
        UsageError: the member may not run this contract, or gRPC is not installed.
    """

    def __init__(
        self,
        federation: Federation,
        identity: Identity,
        on_revision: Callable[[Federation], None] | None = None,
    ) -> None:
        load_grpc()
        self.own = federation.check_for(identity)
        self.identity, self.federation = identity, federation
        self.closed = threading.Event()
        self.refusals: list[str] = []
        """One line for each kind of refusal, also those of others that refuse this member."""
        self._on_revision = on_revision or (lambda _: None)
        self._lock = threading.RLock()
        self._links = {name: _Link() for name in federation.neighbours(self.own.name)}
        self._listener: _Listener | None = None
        self._diallers: list[_Dialler] = []
        self._limit(1 << 20)

    def _limit(self, largest: int) -> None:
        self.largest = max(largest, 2 * LARGEST_FILE + 4096)
        self._incoming = Incoming(_ROWS * self.largest)

    def start(self, facts: Mapping[str, str] | None = None, largest: int = 64 << 20) -> Self:
        """Listen, and dial the neighbours that listen.

        Args:
            facts: what all members must have alike beside version and contract, such as a checksum of the model.
            largest: bytes of a frame at most.

        Raises:
            RunError: the port cannot be listened at.
        """
        self.facts = {"version": __version__, "protocol": PROTOCOL, **(facts or {})}
        self._limit(largest)
        if self.identity.listen:
            self._listener = _Listener(self, self.identity.listen)
        dialled = [name for name in sorted(self._links) if self.federation.member(name).address]
        self._diallers = [_Dialler(self, name) for name in dialled]
        for dialler in self._diallers:
            dialler.start()
        return self

    def send(self, to: str, frame: bytes) -> None:
        if len(frame) > self.largest:
            raise ValueError(f"a frame of {len(frame)} bytes, and {self.largest} are allowed")
        link = self._links.get(to)
        if link is None:
            return
        with self._lock:
            if link.streams and link.streams[-1].put(frame):
                link.traffic.sent += len(frame)
            else:
                link.traffic.dropped += 1

    def receive(self, seconds: float) -> tuple[str, bytes] | None:
        return self._incoming.get(seconds)

    def connected(self) -> frozenset[str]:
        with self._lock:
            return frozenset(name for name, link in self._links.items() if link.streams)

    def connection(self, name: str) -> int:
        return self._links[name].made

    def close(self) -> None:
        """Let waiting frames get away, then let go of all connections."""
        if self.closed.is_set():
            return
        self.closed.set()
        self._end_streams(at_once=False)
        until = time.monotonic() + DRAIN
        while self.connected() and time.monotonic() < until:
            time.sleep(0.01)
        self._end_streams(at_once=True)
        for dialler in self._diallers:
            dialler.hang_up()
        if self._listener is not None:
            self._listener.close()
        for dialler in self._diallers:
            dialler.join(DRAIN)

    def _end_streams(self, *, at_once: bool) -> None:
        with self._lock:
            for link in self._links.values():
                for stream in link.streams:
                    stream.end(at_once=at_once)

    @property
    def traffic(self) -> dict[str, Traffic]:
        """What has passed, by neighbour."""
        return {name: link.traffic for name, link in self._links.items()}

    def adopt(self, following: Federation) -> None:
        """Go on with a later revision: who was expelled is disconnected. UsageError: it is not a later revision of the same
        contract."""
        with self._lock:
            if following.digest == self.federation.digest:
                return
            self.federation.check_next(following)
            self.federation = following
            for name, link in self._links.items():
                if name not in following.active or self.own.name not in following.active:
                    for stream in link.streams:
                        stream.end(at_once=True)
            names = ", ".join(sorted(following.active))
            log.warning("revision %d of the federation: members are %s", following.revision, names)
            if self.own.name not in following.active:
                self.tell(
                    f"{self.own.name} was expelled from the federation in revision {following.revision}"
                )
            self._on_revision(following)  # in the order of revisions, whoever brings them

    def take(self, theirs: Hello) -> None:
        """Adopt the later revision that a neighbour brings, if it brings one. PeerError: it is none that the convener has
        signed."""
        with self._lock:
            newer = newer_file(self.federation, theirs)
            if newer is not None:
                self.adopt(newer)

    def tell(self, line: str) -> None:
        """One line about a refusal, once."""
        with self._lock:
            if line in self.refusals or len(self.refusals) >= _REMEMBERED:
                return
            self.refusals.append(line)
        log.warning("%s", line)

    # What the two sides of a connection need

    def hello(self, nonce: str = "") -> Hello:
        """What this member says of itself."""
        return Hello.of(self.federation, self.facts, nonce)

    def admit(self, digits: str) -> Contact:
        """Who has the key with this fingerprint, if it may connect here. PeerError: nobody of this federation, somebody who was
        expelled, or no neighbour."""
        found = self.federation.by_fingerprint(digits)
        if found is None:
            raise PeerError("stranger: its key is not in the federation file")
        if found.expelled:
            raise self._expelled(found.name)
        if found.name not in self._links:
            raise PeerError(f"{found.name} is no neighbour of {self.own.name} in the topology")
        return found

    def _expelled(self, name: str) -> PeerError:
        return PeerError(f"expelled: {name} is no member any more in revision {self.federation.revision}")

    def wanted(self, name: str) -> bool:
        """Whether a connection to this neighbour is missing."""
        with self._lock:
            both = {name, self.own.name} <= self.federation.active
            return both and not self._links[name].streams

    def outgoing(self) -> Outgoing:
        return Outgoing(_ROWS * self.largest)

    @contextmanager
    def attached(self, name: str, stream: Outgoing) -> Iterator[None]:
        """A connection with a neighbour stands while inside; frames for it go into the queue. PeerError: one of the two was
        expelled since the hello."""
        with self._lock:
            for each in (self.own.name, name):
                if each not in self.federation.active:
                    raise self._expelled(each)
            self._incoming.forget(name)  # of what came before nobody knows how old it is
            self._links[name].made += 1
            self._links[name].streams.append(stream)
        log.info("connected with %s", name)
        try:
            yield
        finally:
            with self._lock:
                self._links[name].streams.remove(stream)
            stream.end(at_once=True)
            log.info("no connection with %s any more", name)

    def arrived(self, name: str, frame: bytes) -> None:
        """A frame of a neighbour; nothing counts any more of one who was expelled."""
        if name in self.federation.active:
            self._links[name].traffic.received += len(frame)
            self._incoming.put(name, frame)


# The side that dials

_OTHER_KEY = "it does not show the key that the federation file has for it"


class _Dialler(threading.Thread):
    """Keeps a connection to one neighbour that listens."""

    def __init__(self, channel: Channel, name: str) -> None:
        super().__init__(name=f"dpps-dial-{name}", daemon=True)
        self._channel, self._peer, self._grpc = channel, name, load_grpc()
        self._call: Any = None
        self._said = ""

    def run(self) -> None:
        """Dial until the channel is closed."""
        pause, missed = SHORTEST, time.monotonic()
        while not self._channel.closed.wait(0.05):
            if not self._channel.wanted(self._peer):
                missed = time.monotonic()
                continue
            if time.monotonic() - missed < self._turn():
                continue
            begun = time.monotonic()
            again = self._connect()
            pause = SHORTEST if again or time.monotonic() - begun > 2 * PATIENCE else min(2 * pause, LONGEST)
            self._channel.closed.wait(pause * random.uniform(0.5, 1))
            missed = time.monotonic() - TURN  # it was tried: no more politeness until there is a connection

    def hang_up(self) -> None:
        call = self._call
        if call is not None:
            call.cancel()

    def _turn(self) -> float:
        federation, own = self._channel.federation, self._channel.own
        return TURN if own.address and federation.row(own.name) > federation.row(self._peer) else 0.0

    def _connect(self) -> bool:
        """One connection from start to end; whether it stood, or is worth another attempt at once."""
        contact = self._channel.federation.member(self._peer)
        stood = False
        try:
            # The other's own certificate is all that is trusted: one of the same convener for somebody else does not do.
            with self._dialled(contact, contact.pem) as (call, outgoing):
                welcome, stood = self._meet(call, outgoing), True
                if welcome:
                    self._said = ""
                    with self._channel.attached(self._peer, outgoing):
                        for frame in call:
                            self._channel.arrived(self._peer, frame)
        except PeerError as error:
            self._refuse(contact, str(error))
        except self._grpc.RpcError as error:
            if not stood and error.code() is self._grpc.StatusCode.UNAVAILABLE:
                return self._look_at_certificate(contact)
            self._failed(contact, error, stood)
        return stood

    def _look_at_certificate(self, contact: Contact) -> bool:
        """Why there is no connection: gRPC says it in words that nobody promises, so what the other shows is looked at."""
        try:
            shown = _shown(contact)
        except PeerError as error:
            self._refuse(contact, str(error))
            return False
        if shown is None:
            self._say_once("no connection yet", contact)
        elif not (issued_by(shown, self._channel.federation.convener) and _has_key(shown, contact)):
            self._refuse(contact, f"{_OTHER_KEY}; nothing was sent")
        elif datetime.now(UTC) > shown.not_valid_after_utc:
            self._refuse(contact, "its certificate has expired; nothing was sent")
        elif shown == contact.certificate:
            self._say_once("no connection yet", contact)
        else:
            return self._ask_for_newer(contact, shown)
        return False

    def _ask_for_newer(self, contact: Contact, shown: x509.Certificate) -> bool:
        """The other's certificate is of the same key, and not the one in the file here: then one of the two has a later revision,
        and its file is all that is taken or given on this connection."""
        try:
            with self._dialled(contact, shown.public_bytes(Encoding.PEM)) as (call, outgoing):
                if not self._meet(call, outgoing):
                    return True
            self._refuse(contact, "its certificate is another than that in the file of the same revision")
        except PeerError as error:
            self._refuse(contact, str(error))
        except self._grpc.RpcError as error:
            self._failed(contact, error, False)
        return False

    def _refuse(self, contact: Contact, why: str) -> None:
        self._channel.tell(f"refused {self._peer} ({contact.address}): {why}")

    @contextmanager
    def _dialled(self, contact: Contact, trusted: bytes) -> Iterator[tuple[Any, Outgoing]]:
        own = self._channel.federation.member(self._channel.own.name)
        credentials = self._grpc.ssl_channel_credentials(trusted, self._channel.identity.key.pem(), own.pem)
        further = (
            ("grpc.ssl_target_name_override", server_name(contact.fingerprint)),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.min_reconnect_backoff_ms", int(1000 * PATIENCE)),
        )
        outgoing = self._channel.outgoing()
        with self._grpc.secure_channel(
            contact.address, credentials, options(self._channel.largest, *further)
        ) as connection:
            self._call = call = connection.stream_stream(f"/{SERVICE}/{METHOD}")(outgoing)
            if self._channel.closed.is_set():
                call.cancel()
            try:
                yield call, outgoing
            finally:
                self._call = None
                outgoing.end(at_once=True)
                call.cancel()

    def _meet(self, call: Any, outgoing: Outgoing) -> bool:
        """Whether frames may follow; otherwise a later revision was adopted, with which to connect again."""
        with _time_limit(call.cancel):
            theirs = Hello.decoded(_next(call))
            own = self._channel.hello(nonce=theirs.nonce)
            if theirs.revision < own.revision:
                own = replace(own, file=self._channel.federation.to_toml())
            outgoing.put(own.encoded())  # the other side refuses, too, and tells its people
            try:
                refuse_other(own, theirs)
            except PeerError:
                with suppress(self._grpc.RpcError):  # until it refuses: then the hello has got there
                    next(call, None)
                raise
            file = _file_in(_next(call))
        if file:
            # a file that came counts as a later revision, so that it is read, and refused if it is none
            self._channel.take(replace(theirs, file=file, revision=max(theirs.revision, own.revision + 1)))
        return not file

    def _failed(self, contact: Contact, error: Any, stood: bool) -> None:
        if error.code() is self._grpc.StatusCode.PERMISSION_DENIED:
            words = printable(error.details() or "")
            self._channel.tell(f"{self._peer} ({contact.address}) refuses this member: {words}")
        else:
            self._say_once("connection lost" if stood else "no connection yet", contact)

    def _say_once(self, words: str, contact: Contact) -> None:
        if words != self._said:
            self._said = words
            log.info("%s (%s): %s", self._peer, contact.address, words)


def _shown(contact: Contact) -> x509.Certificate | None:
    """The certificate that is shown where a member is dialled; None: nobody speaks TLS 1.3 there. Nothing is sent."""
    host, _, port = contact.address.rpartition(":")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE  # it is only looked at
    tls.minimum_version = ssl.TLSVersion.TLSv1_3
    tls.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), PATIENCE) as plain,
            tls.wrap_socket(plain, server_hostname=server_name(contact.fingerprint)) as connection,
        ):
            found = connection.getpeercert(binary_form=True)
    except OSError:
        return None
    try:
        return None if found is None else x509.load_der_x509_certificate(found)
    except ValueError:
        raise PeerError("the certificate that it shows cannot be read") from None


def _has_key(shown: x509.Certificate, contact: Contact) -> bool:
    key = shown.public_key()
    return isinstance(key, ec.EllipticCurvePublicKey) and fingerprint(key) == contact.fingerprint


def _next(messages: Iterator[bytes], ended: type[Exception] = StopIteration) -> bytes:
    try:
        return next(messages)
    except ended as error:
        raise PeerError("it ended the connection before its hello") from error


def _file_in(content: bytes) -> str:
    """What the dialled side says at last: the file of a later revision, or nothing, which means welcome."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if type(found) is not dict or type(found.get("file")) is not str:
        raise PeerError("its answer to the hello is not understood")
    return str(found["file"])


@contextmanager
def _time_limit(cancel: Callable[[], Any]) -> Iterator[None]:
    """Cancel a call that takes longer than `PATIENCE`."""
    timer = threading.Timer(PATIENCE, cancel)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# The side that is dialled


def check_port(listen: str) -> None:
    """Refuse an address at which this machine cannot listen, before a run begins.

    Args:
        listen: HOST:PORT.
    """
    host, _, port = listen.rpartition(":")
    why, four, six = "", socket.AF_INET, socket.AF_INET6
    for family in (four, six) if ":" in host else (six, four):  # the last says why
        try:
            socket.create_server((host.strip("[]"), int(port)), family=family).close()
        except OSError as error:
            why = str(error.strerror).partition(" (")[0]
        else:
            return  # one address of several is enough
    raise UsageError(_cannot_listen(listen, why))


def _cannot_listen(listen: str, why: str) -> str:
    return f"cannot listen at {listen} ({why}): stop the program that has this port, or run this on the machine with this address"


class _Listener:
    """Listens at one port until it is closed: one stream for each neighbour."""

    def __init__(self, channel: Channel, listen: str) -> None:
        self._channel, self._grpc = channel, load_grpc()
        self._inbound: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._places = {name: threading.Semaphore(HELLOS) for name in channel.federation.names}
        places = len(channel.federation.members) + 4
        method = self._grpc.stream_stream_rpc_method_handler(self._serve)
        self._server = self._grpc.server(
            ThreadPoolExecutor(places, "dpps-listen"),
            handlers=[self._grpc.method_handlers_generic_handler(SERVICE, {METHOD: method})],
            options=options(
                channel.largest,
                ("grpc.so_reuseport", 0),
                ("grpc.max_concurrent_streams", 2),
                ("grpc.max_allowed_incoming_connections", 2 * places + STRANGERS),
                ("grpc.server_handshake_timeout_ms", _SILENT),
                ("grpc.max_connection_idle_ms", _SILENT),
            ),
            maximum_concurrent_rpcs=places,
        )
        self._served = channel.federation.digest
        credentials = self._grpc.dynamic_ssl_server_credentials(self._configuration(), self._refreshed, True)
        try:
            self._server.add_secure_port(listen, credentials)
        except RuntimeError as error:  # the port was taken after `check_port`
            raise RunError(f"{_cannot_listen(listen, 'the address is in use')}; nothing was sent") from error
        self._handshakes = Handshakes(channel.tell)
        self._server.start()

    def close(self) -> None:
        self._server.stop(0).wait(DRAIN)
        self._handshakes.close()

    def _configuration(self) -> Any:
        federation = self._channel.federation
        pair = (self._channel.identity.key.pem(), federation.member(self._channel.own.name).pem)
        return self._grpc.ssl_server_certificate_configuration([pair], federation.convener_pem)

    def _refreshed(self) -> Any:
        """Called for every connection: another certificate when there is one, otherwise None."""
        self._handshakes.begun()
        digest = self._channel.federation.digest
        if digest == self._served:
            return None
        self._served = digest
        return self._configuration()

    def _serve(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """One caller, from its hello to the end of its frames."""
        self._handshakes.passed(context.peer())
        who = "somebody"
        try:
            with _time_limit(context.cancel):
                contact = self._caller(context)
                who = contact.name
                with self._place(who):
                    own = self._channel.hello()
                    yield own.encoded()
                    # gRPC raises a bare Exception when the connection breaks
                    file = self._met(contact, own, _next(requests, Exception))
            yield json.dumps({"file": file}).encode()
            if not file and not self._channel.closed.is_set():
                yield from self._frames(contact.name, requests, context)
        except PeerError as error:
            self._refuse(who, context, error)

    def _refuse(self, who: str, context: Any, error: PeerError) -> NoReturn:
        self._channel.tell(f"refused {who} ({_host(context)}): {error}")
        context.abort(self._grpc.StatusCode.PERMISSION_DENIED, str(error))
        raise AssertionError("gRPC has raised")

    @contextmanager
    def _place(self, name: str) -> Iterator[None]:
        """One of few for a member that has not said its hello yet: nobody takes the threads that the others need."""
        if not self._places[name].acquire(blocking=False):
            raise PeerError(f"it has {HELLOS} connections already on which it has not said its hello")
        try:
            yield
        finally:
            self._places[name].release()

    def _caller(self, context: Any) -> Contact:
        facts = context.auth_context()
        version = facts.get("ssl_tls_version", [b"a version of TLS that gRPC does not tell"])[0].decode()
        if version != TLS:
            raise PeerError(f"it speaks {version} and must speak {TLS}")
        key = x509.load_pem_x509_certificate(facts["x509_pem_cert"][0]).public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise PeerError("stranger: it has another kind of key")
        return self._channel.admit(fingerprint(key))

    def _met(self, contact: Contact, own: Hello, content: bytes) -> str:
        """The file of a later revision than the caller's own; empty when it is welcome."""
        theirs = Hello.decoded(content)
        refuse_replayed(own.nonce, theirs)
        refuse_other(own, theirs)
        self._channel.take(theirs)
        self._channel.admit(contact.fingerprint)
        known = self._channel.federation
        if theirs.revision >= known.revision:
            return ""
        self._channel.tell(
            f"{contact.name} came with revision {theirs.revision} and was given the file of revision {known.revision}"
        )
        return known.to_toml()

    def _frames(self, name: str, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        with self._lock:  # a caller that calls again has lost its first connection
            before, self._inbound[name] = self._inbound.get(name), context
        if before is not None:
            before.cancel()
        stream = self._channel.outgoing()
        with self._channel.attached(name, stream):
            if not context.add_callback(lambda: stream.end(at_once=True)):
                return
            threading.Thread(target=self._read, args=(name, requests, stream), daemon=True).start()
            yield from stream

    def _read(self, name: str, requests: Iterator[bytes], stream: Outgoing) -> None:
        try:
            for frame in requests:
                self._channel.arrived(name, frame)
        except Exception as error:  # noqa: BLE001 - gRPC raises a bare Exception when the connection breaks; it is made again
            log.info("connection with %s lost (%s)", name, type(error).__name__)
        finally:
            stream.end()


class Handshakes:
    """Tells of connections that get no further than TLS: gRPC refuses them without a word to us."""

    def __init__(self, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock, self._lock = tell, clock, threading.Lock()
        self._open: deque[float] = deque()
        self._callers: dict[str, float] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="dpps handshakes", daemon=True).start()

    def begun(self) -> None:
        """A connection was accepted; what comes of it is looked at later."""
        with self._lock:
            self._open.append(self._clock())

    def passed(self, peer: str) -> None:
        """A connection got through; only the first of its streams counts."""
        with self._lock:
            if peer not in self._callers:
                self._callers[peer] = self._clock()
                if self._open:  # which of them it was is not known: one fewer is open
                    self._open.popleft()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(HANDSHAKE / 4):
            self.look()

    def look(self) -> None:
        """Tell of those that have had their time."""
        with self._lock:
            now, failed = self._clock(), False
            while self._open and self._open[0] <= now - HANDSHAKE:
                self._open.popleft()
                failed = True
            self._callers = {peer: at for peer, at in self._callers.items() if at > now - 10 * HANDSHAKE}
        if failed:
            self._tell(
                "refused a connection before any message: it showed no certificate of this federation that is valid now over "
                "TLS 1.3 (a stranger, a port scan, or a member whose certificate has expired)"
            )


def _host(context: Any) -> str:
    """Where the caller is; its port is another one each time."""
    return str(context.peer()).partition(":")[2].rpartition(":")[0]
