"""The post between organisations: gRPC streams with mutual TLS 1.3, pinned to the keys in the federation file.

One stream carries the frames of two neighbours in both directions, whoever of them has dialled. Frames are pushed without waiting
for anybody; a connection that breaks is made again, and what was on its way is lost, as `Post` allows.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

from dpps.errors import PeerError
from dpps.peers.dialling import Dialler
from dpps.peers.federation import LARGEST_FILE, Contact, Federation
from dpps.peers.frames import PROTOCOL
from dpps.peers.grpc_options import load_grpc
from dpps.peers.hello import Hello
from dpps.peers.identity import Identity
from dpps.peers.listening import Listener
from dpps.peers.post import Post
from dpps.peers.queues import Incoming, Outgoing
from dpps.version import __version__

log = logging.getLogger(__name__)

DRAIN = 10.0
"""Seconds that frames have, when the post is closed, to get away."""
_ROWS = 2
"""Frames of the largest size that wait at most in each direction: of one link no more shares than that are on their way."""
_REMEMBERED = 100
"""Different refusals that are told at most, so that nobody can fill a disk with lines."""


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
        federation: the contract; later epochs that neighbours bring are taken over.
        identity: this member.
        on_epoch: called with every later epoch that is taken over.

    Raises:
        UsageError: the member may not run this contract, or gRPC is not installed.
    """

    def __init__(
        self,
        federation: Federation,
        identity: Identity,
        on_epoch: Callable[[Federation], None] | None = None,
    ) -> None:
        load_grpc()
        self.own = federation.check_for(identity)
        self.identity, self.federation = identity, federation
        self.closed = threading.Event()
        self.refusals: list[str] = []
        """One line for each kind of refusal, also those of others that refuse this member."""
        self._on_epoch = on_epoch or (lambda _: None)
        self._lock = threading.RLock()
        self._links = {name: _Link() for name in federation.neighbours(self.own.name)}
        self._listener: Listener | None = None
        self._diallers: list[Dialler] = []
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
            self._listener = Listener(self, self.identity.listen)
        for name in sorted(self._links):
            if self.federation.member(name).address:
                self._diallers.append(Dialler(self, name))
        for dialler in self._diallers:
            dialler.start()
        return self

    # The post

    def send(self, to: str, frame: bytes) -> None:
        """Hand a frame over; it is dropped where `to` is not connected or too much waits already."""
        if len(frame) > self.largest:
            raise ValueError(f"a frame of {len(frame)} bytes, and {self.largest} are allowed")
        link = self._links.get(to)
        if link is None:
            return
        with self._lock:
            taken = bool(link.streams) and link.streams[-1].put(frame)
            if taken:
                link.traffic.sent += len(frame)
            else:
                link.traffic.dropped += 1

    def receive(self, seconds: float) -> tuple[str, bytes] | None:
        """The next frame and who sent it."""
        return self._incoming.get(seconds)

    def connected(self) -> frozenset[str]:
        """Neighbours to whom a stream is open."""
        with self._lock:
            return frozenset(name for name, link in self._links.items() if link.streams)

    def connection(self, name: str) -> int:
        """How many connections with a neighbour there were."""
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

    # What listening and dialling need

    def hello(self, nonce: str = "") -> Hello:
        """What this member says of itself."""
        return Hello.of(self.federation, self.facts, nonce)

    def admit(self, fingerprint: str) -> Contact:
        """Who has this key, if it may connect here.

        Raises:
            PeerError: nobody of this federation, somebody who was expelled, or no neighbour.
        """
        found = self.federation.by_fingerprint(fingerprint)
        if found is None:
            raise PeerError("stranger: its key is not in the federation file")
        if found.expelled:
            raise PeerError(f"expelled: {found.name} is no member any more in epoch {self.federation.epoch}")
        if found.name not in self._links:
            raise PeerError(f"{found.name} is no neighbour of {self.own.name} in the topology")
        return found

    def wanted(self, name: str) -> bool:
        """Whether a connection to this neighbour is missing."""
        with self._lock:
            return (
                name in self.federation.active
                and self.own.name in self.federation.active
                and not self._links[name].streams
            )

    @contextmanager
    def attached(self, name: str, stream: Outgoing) -> Iterator[None]:
        """A connection with a neighbour stands while inside; frames for it go into the queue.

        Raises:
            PeerError: one of the two was expelled since the hello.
        """
        with self._lock:
            for each in (self.own.name, name):
                if each not in self.federation.active:
                    raise PeerError(
                        f"expelled: {each} is no member any more in epoch {self.federation.epoch}"
                    )
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

    def outgoing(self) -> Outgoing:
        """An empty queue of frames."""
        return Outgoing(_ROWS * self.largest)

    def arrived(self, name: str, frame: bytes) -> None:
        """A frame of a neighbour; nothing counts any more of one who was expelled."""
        if name in self.federation.active:
            self._links[name].traffic.received += len(frame)
            self._incoming.put(name, frame)

    def lost(self, name: str, error: Exception) -> None:
        """A connection broke; it is made again."""
        log.info("connection with %s lost (%s)", name, type(error).__name__)

    def adopt(self, following: Federation) -> None:
        """Take over a later epoch: who was expelled is disconnected.

        Raises:
            UsageError: it is not a later epoch of the same contract.
        """
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
            log.warning("epoch %d of the federation: members are %s", following.epoch, names)
            if self.own.name not in following.active:
                self.tell(f"{self.own.name} was expelled from the federation in epoch {following.epoch}")
            self._on_epoch(following)  # in the order of epochs, whoever brings them

    def tell(self, line: str) -> None:
        """One line about a refusal, once."""
        with self._lock:
            if line in self.refusals or len(self.refusals) >= _REMEMBERED:
                return
            self.refusals.append(line)
        log.warning("%s", line)
