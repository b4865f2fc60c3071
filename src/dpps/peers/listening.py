"""The side that is dialled: one port, one stream for each neighbour."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from dpps.errors import PeerError, RunError
from dpps.peers.federation import Contact
from dpps.peers.grpc_options import METHOD, SERVICE, TLS, load_grpc, options
from dpps.peers.hello import Hello, newer_file, refuse_other, refuse_replayed, verdict
from dpps.peers.identity import fingerprint

if TYPE_CHECKING:
    from dpps.peers.channel import Channel

PATIENCE = 15.0
"""Seconds for TLS and for the hello."""
_ENDING = 10.0
"""Seconds for what is under way to end, and the port to be free again."""
_SILENT = 15_000
"""Milliseconds after which a connection without TLS, or without a stream, is closed."""
STRANGERS = 64
"""Connections beside those of the members at a time. A member that has no file handle left could not write its outbox."""
HELLOS = 2
"""Connections of one member that may wait for its hello at a time."""


class Listener:
    """Listens at one port until it is closed."""

    def __init__(self, channel: Channel, listen: str) -> None:
        self._channel, self._grpc = channel, load_grpc()
        self._handshakes = Handshakes(channel.tell)
        self._inbound: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._pending: Counter[str] = Counter()
        places = len(channel.federation.members) + 4
        self._server = self._grpc.server(
            ThreadPoolExecutor(places, "dpps-listen"),
            handlers=[self._handler()],
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
        except RuntimeError as error:
            raise RunError(
                f"cannot listen at {listen}: another program has the port, or the address is not this machine's; nothing was sent"
            ) from error
        self._server.start()

    def close(self) -> None:
        """Listen no more."""
        self._server.stop(0).wait(_ENDING)
        self._handshakes.close()

    def _handler(self) -> Any:
        method = self._grpc.stream_stream_rpc_method_handler(self._serve)
        return self._grpc.method_handlers_generic_handler(SERVICE, {METHOD: method})

    # TLS

    def _configuration(self) -> Any:
        federation = self._channel.federation
        own = federation.member(self._channel.own.name)
        pair = (self._channel.identity.key.pem(), own.pem)
        return self._grpc.ssl_server_certificate_configuration([pair], federation.convener_pem)

    def _refreshed(self) -> Any:
        """Called for every connection: another certificate when there is one, otherwise None."""
        self._handshakes.begun()
        digest = self._channel.federation.digest
        if digest == self._served:
            return None
        self._served = digest
        return self._configuration()

    # One caller

    def _serve(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        self._handshakes.passed(context.peer())
        timer = threading.Timer(PATIENCE, context.cancel)
        timer.daemon = True
        timer.start()
        who = "somebody"
        try:
            contact = self._caller(context)
            who = contact.name
            with self._place(who):
                own = self._channel.hello()
                yield own.encoded()
                file = self._met(contact, own, _first(requests))
        except PeerError as error:
            self._refuse(who, context, error)
        finally:
            timer.cancel()
        yield verdict(file=file)
        if not file and not self._channel.closed.is_set():
            try:
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
        with self._lock:
            if self._pending[name] >= HELLOS:
                raise PeerError(f"it has {HELLOS} connections already on which it has not said its hello")
            self._pending[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._pending[name] -= 1

    def _caller(self, context: Any) -> Contact:
        facts = context.auth_context()
        version = facts.get("ssl_tls_version", [b"a version of TLS that gRPC does not tell"])[0].decode()
        if version != TLS:
            raise PeerError(f"it speaks {version} and must speak {TLS}")
        certificate = x509.load_pem_x509_certificate(facts["x509_pem_cert"][0])
        key = certificate.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise PeerError("stranger: it has another kind of key")
        return self._channel.admit(fingerprint(key))

    def _met(self, contact: Contact, own: Hello, content: bytes) -> str:
        """The file of a later epoch than the caller's own; empty when it is welcome."""
        theirs = Hello.decoded(content)
        refuse_replayed(own.nonce, theirs)
        refuse_other(own, theirs)
        newer = newer_file(self._channel.federation, theirs)
        if newer is not None:
            self._channel.adopt(newer)
            self._channel.admit(contact.fingerprint)
        if theirs.epoch < self._channel.federation.epoch:
            self._channel.tell(
                f"{contact.name} came with epoch {theirs.epoch} and was given the file of epoch {self._channel.federation.epoch}"
            )
            return self._channel.federation.to_toml()
        return ""

    def _frames(self, name: str, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        with self._lock:  # a caller that calls again has lost its first connection
            before, self._inbound[name] = self._inbound.get(name), context
        if before is not None:
            before.cancel()
        stream = self._channel.outgoing()
        with self._channel.attached(name, stream):
            if not context.add_callback(lambda: stream.end(at_once=True)):
                return
            reader = threading.Thread(target=self._read, args=(name, requests, stream.end), daemon=True)
            reader.start()
            yield from stream

    def _read(self, name: str, requests: Iterator[bytes], end: Callable[[], None]) -> None:
        try:
            for frame in requests:
                self._channel.arrived(name, frame)
        except Exception as error:  # noqa: BLE001 - gRPC raises a bare Exception when the connection breaks; it is made again
            self._channel.lost(name, error)
        finally:
            end()


class Handshakes:
    """Tells of connections that get no further than TLS: gRPC refuses them without a word to us.

    Args:
        tell: takes one line.
        clock: seconds, of any origin.
    """

    def __init__(self, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock, self._lock = tell, clock, threading.Lock()
        self._open: deque[float] = deque()
        self._callers: dict[str, float] = {}
        self._timer: threading.Timer | None = None

    def begun(self) -> None:
        """A connection was accepted; what comes of it is looked at later."""
        with self._lock:
            self._open.append(self._clock())
            self._look_after(PATIENCE)

    def passed(self, peer: str) -> None:
        """A connection got through; only the first of its streams counts."""
        with self._lock:
            if peer not in self._callers:
                self._callers[peer] = self._clock()
                if self._open:  # which of them it was is not known: one fewer is open
                    self._open.popleft()

    def close(self) -> None:
        """Nothing is told any more."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()

    def _look_after(self, seconds: float) -> None:
        if self._timer is None:
            self._timer = threading.Timer(seconds, self._look)
            self._timer.daemon = True
            self._timer.start()

    def _look(self) -> None:
        """Tell of those that have had their time."""
        with self._lock:
            now, failed, self._timer = self._clock(), False, None
            while self._open and self._open[0] <= now - PATIENCE:
                self._open.popleft()
                failed = True
            self._callers = {peer: at for peer, at in self._callers.items() if at > now - 10 * PATIENCE}
            if self._open:
                self._look_after(self._open[0] + PATIENCE - now)
        if failed:
            self._tell(
                "refused a connection before any message: it showed no certificate of this federation that is valid now over "
                "TLS 1.3 (a stranger, a port scan, or a member whose certificate has expired)"
            )


def _first(requests: Iterator[bytes]) -> bytes:
    try:
        return next(requests)
    except Exception as error:
        raise PeerError("it ended the connection before its hello") from error


def _host(context: Any) -> str:
    """Where the caller is; its port is another one each time."""
    return str(context.peer()).partition(":")[2].rpartition(":")[0]
