"""One link in each direction between two members: every share counts exactly once, whatever happens to frames and processes.

A sender numbers the shares of a link and keeps each until the receiver says that it is *kept*: counted,
and safe on the receiver's disk. A receiver counts a share only if its number follows the last one counted.
So a share that is lost is sent again, one that comes twice counts once; a receiver that crashes forgets no
more than what the sender still has; and a sender that crashes sends again what it had put on disk before anything left.

A share is given only when the receiver has said that it has counted the earlier ones, but for that of the round before, of which
word may still be on its way: so a dead link swallows one share (two where it is used in every round),
and what it would have got stays at home. (Running sums, which do the same without numbers,
would need two vectors per link in double width on the disk and on the wire in every round;
with so few shares on their way there is nothing that they save.)
"""

from dataclasses import astuple, dataclass, field
from typing import Any

from torch import Tensor

from dpps.peers.frames import Claim, Share


@dataclass
class Letter:
    """A released row, as it is sent to every neighbour that gets a part of it."""

    row: Tensor
    a: float
    digest: str
    data: bytes
    """The row as it is sent, made once for all neighbours and attempts."""


@dataclass
class Sent:
    """A share that its receiver has not kept yet."""

    number: int
    weight: float
    letter: tuple[int, int]
    """(phase, round) of the row it is a part of."""
    next_time: float = 0.0
    """When it is sent again unless the receiver says that it has it."""
    wait: float = 0.0
    repeated: bool = False
    """Whether it was sent more than once."""
    signature: bytes = b""
    """This member's own, made when it is first sent."""

    def claim(self, letter: Letter) -> Claim:
        """What is signed for its receiver."""
        return Claim(*self.letter, letter.digest, self.number, self.weight, letter.a, self.signature)


@dataclass
class Outlet:
    """The link to one member."""

    number: int = 0
    waiting: list[Sent] = field(default_factory=list)
    got: int = 0
    start: int = 0
    """Of the receiver's process, as far as known."""
    safe: tuple[int, int] | None = None
    """(phase, round) of the last row that the receiver has on disk: it never shows an earlier one as the latest again."""

    def ready(self, phase: int, round_: int) -> bool:
        """Whether a share of this round may be given: the receiver has counted all but perhaps that of the round before."""
        return all(s.number <= self.got or s.letter >= (phase, round_ - 1) for s in self.waiting)

    def add(self, weight: float, letter: tuple[int, int]) -> Sent:
        """A new share."""
        self.number += 1
        self.waiting.append(Sent(self.number, weight, letter))
        return self.waiting[-1]

    def hear(self, start: int, got: int, kept: int) -> None:
        """What the receiver has. After a restart it has forgotten what it had not kept: all that is left is sent again."""
        if start < self.start or got > self.number:
            return  # an old frame
        if start > self.start:
            self.start, self.got = start, got
            for sent in self.waiting:
                sent.next_time = sent.wait = 0.0
        if got > self.got:
            self.got = got
            for sent in self.waiting:
                if (
                    sent.number == got + 1 and sent.repeated
                ):  # it came out of order, and the receiver had to leave it
                    sent.next_time = sent.wait = 0.0
        for sent in self.waiting:
            if sent.number <= kept:
                self.safe = sent.letter
        self.waiting = [sent for sent in self.waiting if sent.number > kept]

    def letters(self) -> set[tuple[int, int]]:
        """Of the rows that the receiver may have as the latest."""
        return {sent.letter for sent in self.waiting} | ({self.safe} if self.safe else set())

    def gave(self, phase: int) -> bool:
        """Whether the last row, or one that waits, is of this phase."""
        return any(each == phase for each, _ in self.letters())

    def due(self, now: float, first: float) -> list[Sent]:
        """What must be sent now, for the first time or again; the time between attempts doubles from `first`."""
        found = [s for s in self.waiting if s.number > self.got and s.next_time <= now]
        for sent in found:
            sent.repeated = sent.wait > 0
            sent.wait = max(first, 2 * sent.wait)
            sent.next_time = now + sent.wait
        return found

    def to_json(self) -> dict[str, Any]:
        """For the disk."""
        waiting = [[s.number, s.weight, *s.letter] for s in self.waiting]
        return {"number": self.number, "waiting": waiting, "safe": self.safe}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Outlet":
        """What `to_json` gave."""
        waiting = [Sent(number, weight, (phase, r)) for number, weight, phase, r in saved["waiting"]]
        return cls(saved["number"], waiting, safe=saved["safe"] and (saved["safe"][0], saved["safe"][1]))


@dataclass
class Inlet:
    """The link from one member."""

    counted: int = 0
    kept: int = 0
    """What was counted when everything was last put on disk."""
    start: int = 0
    seen: Claim | None = None
    """The sender's latest claim."""
    receipt: bytes = b""
    """This member's signature under it."""

    def expects(self, share: Share) -> bool:
        """Whether this is the next share of the link: any other was counted before, or comes again."""
        return share.claim.number == self.counted + 1

    def to_json(self) -> dict[str, Any]:
        """For the disk."""
        seen = self.seen
        claim = None if seen is None else [*astuple(seen)[:-1], seen.signature.hex()]
        return {"counted": self.counted, "seen": claim, "receipt": self.receipt.hex()}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Inlet":
        """What `to_json` gave."""
        seen = None
        if saved["seen"] is not None:
            phase, round_, digest, number, weight, a, signature = saved["seen"]
            seen = Claim(phase, round_, digest, number, weight, a, bytes.fromhex(signature))
        receipt = bytes.fromhex(saved["receipt"])
        return cls(saved["counted"], saved["counted"], seen=seen, receipt=receipt)
