"""Messages between members: a hello when they connect, then frames. Sizes and numbers are checked before
anything is used.

Every frame says how far its sender is, what it has counted of the receiver's shares, and whom it has heard of lately. Most also
carry a *share*: a part of a released row. A share has a number on its link, so that it counts exactly once, whatever the
network does; and its sender's signature under everything that says what it is and how much of it:
run, sender, receiver, phase, round, digest of the row, number, weight and a. The receiver keeps it: shown to a sender that comes
back with an older copy of its ledger, its own signature says how far it had really gone; and if no honest member can have sent it, it is evidence.
What a frame says of other members' presence carries their own signatures.
"""

import hashlib
import json
import re
import secrets
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dpps.errors import PeerError, UsageError
from dpps.peers.contract import Federation

MAGIC = b"DPP2"
PROTOCOL = "2"
"""Said in the hello, where another one is refused: change both with the format of frames."""
LEARNING, AVERAGING, FINAL = 0, 1, 2
"""The phases of a run: rows that learn; the average at the end; and the finished average, for members that come back too late to
take part in it."""
LARGEST_HELLO = 3 << 20
"""Bytes of a hello at most: it may hold a federation file."""
_HEAD = struct.Struct("<4sI")
_LARGEST_HEADER = 1 << 20
_LARGEST_NUMBER = 1 << 62
_WORD = re.compile(r"[\w .,:/+-]{0,200}")


class Post(ABC):
    """Carries frames (bytes) between members, by name. Frames may be lost, repeated, delayed and overtake each other; each arrives
    whole or not at all.

    `send` may be called from several threads; `receive` from one.
    """

    @abstractmethod
    def send(self, to: str, frame: bytes) -> None:
        """Hand a frame over. Never waits: it is dropped where `to` is not connected or too much waits already."""

    @abstractmethod
    def receive(self, seconds: float) -> tuple[str, bytes] | None:
        """The next frame and who sent it; None when none came within so many seconds (0: look once)."""

    @abstractmethod
    def connected(self) -> frozenset[str]:
        """Who can be reached right now, as far as is known here."""

    def connection(self, name: str) -> int:
        """Which connection with `name` is the newest: another number after every new one, where that cannot be seen from
        `connected` because the one before is not yet known to be dead."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Let go of all connections."""


# Hello: TLS has already shown who both are. The one who is dialled speaks first, with a fresh random number; the other answers with
# it, so that a recorded answer is worth nothing.


@dataclass(frozen=True)
class Hello:
    """What one side says of itself.

    Attributes:
        federation: which run.
        revision: of its contract; "epoch" on the wire.
        digest: of its contract.
        facts: what all members must have alike, by name: version, model.
        nonce: a random number; in an answer, that of the other side.
        file: the federation file, for one who has an older revision.
    """

    federation: str
    revision: int
    digest: str
    facts: Mapping[str, str]
    nonce: str
    file: str = ""

    @classmethod
    def of(cls, federation: Federation, facts: Mapping[str, str], nonce: str = "") -> "Hello":
        """What a member with this contract says."""
        own = federation.id, federation.revision, federation.digest
        return cls(*own, dict(facts), nonce or secrets.token_hex(16))

    def encoded(self) -> bytes:
        return json.dumps({"epoch" if k == "revision" else k: v for k, v in vars(self).items()}).encode()

    @classmethod
    def decoded(cls, content: bytes) -> "Hello":
        """What came over the wire. PeerError: it is something else."""
        if len(content) > LARGEST_HELLO:
            raise PeerError(
                f"its first message has {len(content)} bytes and a hello has at most {LARGEST_HELLO}"
            )
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            raise PeerError("its first message is no hello") from None
        kinds = {"federation": str, "epoch": int, "digest": str, "facts": dict, "nonce": str, "file": str}
        if type(found) is not dict or {k: type(v) for k, v in found.items()} != kinds:
            raise PeerError("its first message is no hello")
        facts = found["facts"]
        words = [*facts, *facts.values(), *(found[k] for k in ("federation", "digest", "nonce"))]
        if len(words) > 100 or not all(type(w) is str and _WORD.fullmatch(w) for w in words):
            raise PeerError("its first message is no hello")
        return cls(revision=found.pop("epoch"), **found)


def refuse_other(own: Hello, theirs: Hello) -> None:
    """Refuse one of another run, another version or another model; revisions are compared by `newer_file`. PeerError: one line that
    names what differs."""
    if theirs.federation != own.federation:
        raise PeerError(f"wrong run: it is of federation {theirs.federation}, here is {own.federation}")
    for name, value in own.facts.items():
        said = theirs.facts.get(name, "nothing")
        if said != value:
            raise PeerError(f"other {name}: it has {said}, here is {value}")
    if theirs.revision == own.revision and theirs.digest != own.digest:
        raise PeerError(f"wrong revision: its file of revision {theirs.revision} differs from the one here")


def newer_file(known: Federation, theirs: Hello) -> Federation | None:
    """The later revision that the other side brings; None when it has the same or an older one. PeerError: it says that its
    revision is later and shows no file of the convener for it."""
    if theirs.revision <= known.revision:
        return None
    try:
        file = theirs.file.encode(errors="replace")
        found = Federation.parse(file, "its federation file", known.convener_fingerprint)
        known.check_next(found, "its federation file")
    except UsageError as error:
        raise PeerError(f"wrong revision: it says {theirs.revision}, and {error}") from None
    if found.revision < theirs.revision:
        raise PeerError(f"wrong revision: it says {theirs.revision} and shows the file of {found.revision}")
    return found


def refuse_replayed(asked: str, answer: Hello) -> None:
    """An answer must hold the number that was asked with."""
    if not secrets.compare_digest(asked.encode(), answer.nonce.encode()):
        raise PeerError("replayed message: its answer is to another question than the one asked here")


# Frames


class FrameError(ValueError):
    """A frame that no honest member sends; the message says what is wrong with it.

    Attributes:
        evidence: (what the sender has signed, its signature), where that alone shows it.
    """

    def __init__(self, words: str, evidence: tuple[bytes, bytes] | None = None) -> None:
        super().__init__(words)
        self.evidence = evidence


@dataclass(frozen=True)
class Claim:
    """A member's signature under one of its shares: `weight` times (row, a) of (phase, round), the so-many-th on its link."""

    phase: int
    round: int
    digest: str
    """Of the row."""
    number: int
    """On its link, from 1."""
    weight: float
    a: float
    signature: bytes = b""

    def message(self, run: str, name: str, to: str) -> bytes:
        """What member `name` has signed for `to`."""
        what = (self.phase, self.round, self.digest, self.number, repr(self.weight), repr(self.a))
        return "\n".join(("dpps share", run, name, to, *map(str, what))).encode()

    def receipt(self, run: str, name: str, by: str) -> bytes:
        """What member `by` signs that has received it from `name`."""
        return b"dpps received\n" + self.message(run, name, by)

    @property
    def order(self) -> tuple[int, int]:
        """Later claims compare larger."""
        return self.phase, self.round

    def to_json(self) -> list[Any]:
        numbers = self.number, self.weight, self.a
        return [self.phase, self.round, self.digest, *numbers, self.signature.hex()]

    @classmethod
    def from_json(cls, listed: Any) -> "Claim":
        """What `to_json` gave. Whether its numbers are those of an honest member is checked after the signature."""
        phase, round_, digest, number, weight, a, signature = listed
        return cls(
            _whole(phase, 0, FINAL),
            _whole(round_),
            _text(digest),
            _whole(number, 1),
            _number(weight),
            _number(a),
            _signature(signature),
        )


@dataclass(frozen=True)
class Share:
    """A part of a released row."""

    claim: Claim
    row: bytes


@dataclass(frozen=True)
class Presence:
    """What is known of one member: how often it has shown a sign of life, how far it is, and what it is doing, signed by itself."""

    beats: int
    """0: nothing was heard of it yet."""
    pushed: int
    state: int
    signature: bytes = b""
    revision: int = 0
    """Of the contract that its `reserved` are of; 0: members share no noise."""
    reserved: tuple[int, ...] = ()
    """By member, the last round that it has reserved, as this one has noted on its disk (`dpps.peers.links.Reservations`)."""

    def message(self, run: str, name: str) -> bytes:
        """What member `name` has signed."""
        told = f"dpps presence\n{run}\n{name}\n{self.beats}\n{self.pushed}\n{self.state}"
        if self.reserved:
            told += f"\n{self.revision}\n{','.join(map(str, self.reserved))}"
        return told.encode()

    def to_json(self) -> list[Any]:
        more = [self.revision, list(self.reserved)] if self.reserved else []
        return [self.beats, self.pushed, self.state, self.signature.hex(), *more]

    @classmethod
    def from_json(cls, listed: Any, nodes: int) -> "Presence":
        beats, pushed, state, signature, *more = listed
        found = cls(_whole(beats), _whole(pushed, -1), _whole(state, 0, 3), _signature(signature))
        if not more:
            return found
        revision, reserved = more
        if type(reserved) is not list or len(reserved) != nodes:
            raise ValueError(f"reservations of {nodes} members are expected")
        known = tuple(_whole(each, -1) for each in reserved)
        return replace(found, revision=_whole(revision, 1), reserved=known)


@dataclass(frozen=True)
class Frame:
    """One frame.

    Attributes:
        run: which run it belongs to.
        start: how often the sender's process has been started.
        asks: the sender has started and has not heard yet what the receiver has seen of it.
        answers: the receiver's start that `seen` answers; 0: none.
        got: number of the last share of the receiver's that the sender has counted.
        kept: the same, as far as it is safe on the sender's disk: these need not be kept at home any more.
        view: everybody, as far as the sender has heard, in the order of nodes.
        share: a part of the sender's row.
        seen: the latest claim of the *receiver's* that the sender has; None where there is none.
        receipt: the sender's signature under that claim.
        refusal: why the sender refuses the receiver; empty: it does not.
    """

    run: str
    start: int
    asks: bool
    answers: int
    got: int
    kept: int
    view: tuple[Presence, ...]
    share: Share | None = None
    seen: Claim | None = None
    receipt: bytes = b""
    refusal: str = ""

    def encode(self) -> bytes:
        share = None
        if self.share is not None:
            share = self.share.claim.to_json()
            del share[2]  # the receiver computes the digest of the row itself
        header = vars(self) | {
            "view": [presence.to_json() for presence in self.view],
            "share": share,
            "seen": None if self.seen is None else self.seen.to_json(),
            "receipt": self.receipt.hex(),
        }
        text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
        row = b"" if self.share is None else self.share.row
        return b"".join((_HEAD.pack(MAGIC, len(text)), text, row))


def largest(row_bytes: int) -> int:
    """Bytes of the largest frame of a run whose rows have so many; a longer one can be refused before it is read."""
    return _HEAD.size + _LARGEST_HEADER + row_bytes


def decode(data: bytes, run: str, nodes: int, row_bytes: int) -> Frame:
    """A frame from bytes, of this run with so many members and so many bytes in a row. FrameError: no honest member of this run
    sends that."""
    if len(data) < _HEAD.size:
        raise FrameError(f"{len(data)} bytes are no frame")
    magic, length = _HEAD.unpack_from(data)
    end = _HEAD.size + length
    if magic != MAGIC or length > _LARGEST_HEADER or len(data) not in (end, end + row_bytes):
        raise FrameError(
            f"a frame of {len(data)} bytes with a header of {length}: rows have {row_bytes} bytes"
        )
    try:
        frame = _frame(json.loads(data[_HEAD.size : end]), data[end:], nodes)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise FrameError(f"a header that cannot be read ({error})") from error
    if frame.run != run:
        raise FrameError(f"a frame of another run ({frame.run[:40]!r})")
    if (frame.share is None) != (len(data) == end):
        raise FrameError("a row without a share, or a share without its row")
    return frame


def _frame(header: Any, row: bytes, nodes: int) -> Frame:
    view = tuple(Presence.from_json(each, nodes) for each in header["view"])
    if len(view) != nodes:
        raise ValueError(f"a view of {len(view)} members: there are {nodes}")
    share = None
    if header["share"] is not None:
        phase, round_, *rest = header["share"]
        share = Share(Claim.from_json([phase, round_, hashlib.sha256(row).hexdigest(), *rest]), row)
    return Frame(
        _text(header["run"]),
        _whole(header["start"], 1),
        header["asks"] is True,
        _whole(header["answers"]),
        _whole(header["got"]),
        _whole(header["kept"]),
        view,
        share,
        None if header["seen"] is None else Claim.from_json(header["seen"]),
        _signature(header["receipt"]),
        _text(header["refusal"]),
    )


def _whole(value: Any, low: int = 0, high: int = _LARGEST_NUMBER) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{value!r} is not a whole number from {low} to {high}")
    return value


def _number(value: Any) -> float:
    """A weight, or a scalar a."""
    if type(value) not in (int, float) or not 0 <= value <= _LARGEST_NUMBER:
        raise ValueError(f"{value!r} is not a number from 0")
    return float(value)


def _signature(value: Any) -> bytes:
    return bytes.fromhex(_text(value))


def _text(value: Any) -> str:
    # digests and signatures are ASCII; other texts may not even have bytes to be checked
    if type(value) is not str or len(value) > 1000 or not value.isascii():
        raise ValueError("not a short text")
    return value
