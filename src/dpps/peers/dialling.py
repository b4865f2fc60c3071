"""The side that dials: one thread for each neighbour that listens."""

from __future__ import annotations

import json
import logging
import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from dpps.errors import PeerError, UsageError
from dpps.peers.federation import Contact, Federation
from dpps.peers.grpc_options import METHOD, SERVICE, load_grpc, options
from dpps.peers.hello import Hello, refuse_other
from dpps.peers.identity import fingerprint, server_name
from dpps.peers.queues import Outgoing

if TYPE_CHECKING:
    from dpps.peers.channel import Channel

log = logging.getLogger(__name__)

PATIENCE = 15.0
"""Seconds for connecting and for the hello."""
SHORTEST, LONGEST = 0.2, 5.0
"""Seconds between attempts: twice as long each time, and never in step with others."""
TURN = 3.0
"""Of two that both listen, the one with the later row leaves dialling to the other for so many seconds."""

_OTHER_KEY = "it does not show the key that the federation file has for it"


class Dialler(threading.Thread):
    """Keeps a connection to one neighbour."""

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
        """End the connection."""
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
                    self._exchange(call, outgoing)
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
        elif not _same_key(shown, contact, self._channel.federation.convener):
            self._refuse(contact, f"{_OTHER_KEY}; nothing was sent")
        elif datetime.now(UTC) > shown.not_valid_after_utc:
            self._refuse(contact, "its certificate has expired; nothing was sent")
        elif shown == contact.certificate:
            self._say_once("no connection yet", contact)
        else:
            return self._ask_for_newer(contact, shown)
        return False

    def _ask_for_newer(self, contact: Contact, shown: x509.Certificate) -> bool:
        """The other's certificate is of the same key, and not the one in the file here: then one of the two has a later epoch,
        and its file is all that is taken or given on this connection."""
        try:
            with self._dialled(contact, shown.public_bytes(Encoding.PEM)) as (call, outgoing):
                if not self._meet(call, outgoing):
                    return True
            self._refuse(contact, "its certificate is another than that in the file of the same epoch")
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
        """Whether frames may follow; otherwise a later epoch was taken over, with which to connect again."""
        timer = threading.Timer(PATIENCE, call.cancel)
        timer.daemon = True
        timer.start()
        try:
            theirs = Hello.decoded(_next(call))
            own = self._channel.hello(nonce=theirs.nonce)
            if theirs.epoch < own.epoch:
                own = replace(own, file=self._channel.federation.to_toml())
            outgoing.put(own.encoded())  # the other side refuses, too, and tells its people
            try:
                refuse_other(own, theirs)
            except PeerError:
                _until_refused(call, self._grpc)
                raise
            file = _read_verdict(_next(call))
        finally:
            timer.cancel()
        if file:
            self._take_over(file)
        return not file

    def _take_over(self, file: str) -> None:
        try:
            where, known = (
                f"the federation file of {self._peer}",
                self._channel.federation.convener_fingerprint,
            )
            self._channel.adopt(Federation.parse(file.encode(errors="replace"), where, known))
        except UsageError as error:
            raise PeerError(f"wrong epoch: {error}") from None

    def _exchange(self, call: Any, outgoing: Outgoing) -> None:
        self._said = ""
        with self._channel.attached(self._peer, outgoing):
            for frame in call:
                self._channel.arrived(self._peer, frame)

    def _failed(self, contact: Contact, error: Any, stood: bool) -> None:
        words, code = str(error.details() or ""), error.code()
        if code is self._grpc.StatusCode.PERMISSION_DENIED:
            self._channel.tell(f"{self._peer} ({contact.address}) refuses this member: {_printable(words)}")
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


def _same_key(shown: x509.Certificate, contact: Contact, convener: x509.Certificate) -> bool:
    """Whether a certificate is the convener's, of the key that the contract has for a member."""
    try:
        shown.verify_directly_issued_by(convener)
    except (ValueError, TypeError, InvalidSignature):
        return False
    key = shown.public_key()
    return isinstance(key, ec.EllipticCurvePublicKey) and fingerprint(key) == contact.fingerprint


def _next(call: Any) -> bytes:
    try:
        found: bytes = next(call)
    except StopIteration:
        raise PeerError("it ended the connection before its hello") from None
    return found


def _until_refused(call: Any, grpc: Any) -> None:
    """Wait for the end, so that the hello gets there."""
    try:
        next(call, None)
    except grpc.RpcError:
        return


def _read_verdict(content: bytes) -> str:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise PeerError("its answer to the hello is not understood") from None
    if type(found) is not dict or type(found.get("file")) is not str:
        raise PeerError("its answer to the hello is not understood")
    return str(found["file"])


def _printable(words: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in words[:300])
