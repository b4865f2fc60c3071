"""Frames: what members tell each other, as bytes. Nothing in a frame is believed before its sizes and numbers were looked at.

Every frame says how far its sender is, what it has counted of the receiver's shares, and whom it has heard of lately. Most also
carry a *share*: a part of a released row. A share has a number on its link, so that it counts exactly once, whatever the
network does; and its sender's signature under everything that says what it is and how much of it:
run, sender, receiver, phase, round, digest of the row, number, weight and a. The receiver keeps it: shown to a sender that comes
back with an older copy of its ledger, its own signature says how far it had really gone; and if no honest member can have sent it, it is evidence.
What a frame says of other members' presence carries their own signatures.
"""

import hashlib
import json
import struct
from dataclasses import dataclass
from typing import Any

MAGIC = b"DPP2"
PROTOCOL = "2"
"""Said in the hello, where another one is refused: change both with the format of frames."""
LEARNING, AVERAGING, FINAL = 0, 1, 2
"""The phases of a run: rows that learn; the average at the end; and the finished average, for members that come back too late to
take part in it."""
_HEAD = struct.Struct("<4sI")
_LARGEST_HEADER = 1 << 20
_LARGEST_NUMBER = 1 << 62


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

    def message(self, run: str, name: str) -> bytes:
        """What member `name` has signed."""
        return f"dpps presence\n{run}\n{name}\n{self.beats}\n{self.pushed}\n{self.state}".encode()


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
        """As bytes."""
        share = self.share
        header = {
            "run": self.run,
            "start": self.start,
            "asks": self.asks,
            "answers": self.answers,
            "got": self.got,
            "kept": self.kept,
            "view": [[p.beats, p.pushed, p.state, p.signature.hex()] for p in self.view],
            "share": None if share is None else _listed(share.claim, with_digest=False),
            "seen": None if self.seen is None else _listed(self.seen),
            "receipt": self.receipt.hex(),
            "refusal": self.refusal,
        }
        text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
        return b"".join((_HEAD.pack(MAGIC, len(text)), text, b"" if share is None else share.row))


def largest(row_bytes: int) -> int:
    """Bytes of the largest frame of a run whose rows have so many; a longer one can be refused before it is read."""
    return _HEAD.size + _LARGEST_HEADER + row_bytes


def decode(data: bytes, run: str, nodes: int, row_bytes: int) -> Frame:
    """A frame from bytes.

    Args:
        data: what arrived.
        run: what it must belong to.
        nodes: how many members there are.
        row_bytes: how many bytes a row has.

    Raises:
        FrameError: no honest member of this run sends that.
    """
    if len(data) < _HEAD.size:
        raise FrameError(f"{len(data)} bytes are no frame")
    magic, length = _HEAD.unpack_from(data)
    if (
        magic != MAGIC
        or length > _LARGEST_HEADER
        or len(data)
        not in (
            _HEAD.size + length,
            _HEAD.size + length + row_bytes,
        )
    ):
        raise FrameError(
            f"a frame of {len(data)} bytes with a header of {length}: rows have {row_bytes} bytes"
        )
    try:
        header = json.loads(data[_HEAD.size : _HEAD.size + length])
        frame = _frame(header, data[_HEAD.size + length :], nodes)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise FrameError(f"a header that cannot be read ({error})") from error
    if frame.run != run:
        raise FrameError(f"a frame of another run ({frame.run[:40]!r})")
    if (frame.share is None) != (len(data) == _HEAD.size + length):
        raise FrameError("a row without a share, or a share without its row")
    return frame


def _frame(header: Any, row: bytes, nodes: int) -> Frame:
    view = tuple(
        Presence(_whole(beats), _whole(pushed, -1), _whole(state, 0, 3), _signature(signature))
        for beats, pushed, state, signature in header["view"]
    )
    if len(view) != nodes:
        raise ValueError(f"a view of {len(view)} members: there are {nodes}")
    share = None
    if header["share"] is not None:
        phase, round_, *rest = header["share"]
        share = Share(_claim(phase, round_, hashlib.sha256(row).hexdigest(), *rest), row)
    seen = None if header["seen"] is None else _claim(*header["seen"])
    return Frame(
        _text(header["run"]),
        _whole(header["start"], 1),
        header["asks"] is True,
        _whole(header["answers"]),
        _whole(header["got"]),
        _whole(header["kept"]),
        view,
        share,
        seen,
        _signature(header["receipt"]),
        _text(header["refusal"]),
    )


def _claim(phase: Any, round_: Any, digest: Any, number: Any, weight: Any, a: Any, signature: Any) -> Claim:
    """Whether its numbers are those of an honest member is looked at when the signature was."""
    return Claim(
        _whole(phase, 0, FINAL),
        _whole(round_),
        _text(digest),
        _whole(number, 1),
        _number(weight),
        _number(a),
        _signature(signature),
    )


def _listed(claim: Claim, with_digest: bool = True) -> list[Any]:
    digest = [claim.digest] if with_digest else []
    return [claim.phase, claim.round, *digest, claim.number, claim.weight, claim.a, claim.signature.hex()]


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
