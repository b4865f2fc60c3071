"""The state of a member's links: shares in transit, who is present, and which rows and shares an honest member can send.

Every share counts exactly once, whatever happens to frames and processes. A sender numbers the shares of a link and keeps each until
the receiver says that it is *kept*: counted, and safe on the receiver's disk. A receiver counts a share only if its number follows
the last one counted. So a share that is lost is sent again, one that comes twice counts once; a receiver that crashes forgets no
more than what the sender still has; and a sender that crashes sends again what it had put on disk before anything left.

A share is given only when the receiver has said that it has counted the earlier ones, but for that of the round before, of which
word may still be on its way. So a dead link swallows one share (two where it is used in every round), and the rest stays at home.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dpps.errors import RunError
from dpps.peers.contract import linked, quorum
from dpps.peers.messages import Claim, FrameError, Presence, Share
from dpps.topology import Topology, Weights

# Shares on their way


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

    def at_once(self) -> None:
        self.next_time = self.wait = 0.0


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

    def add(self, weight: float, letter: tuple[int, int]) -> None:
        self.number += 1
        self.waiting.append(Sent(self.number, weight, letter))

    def hear(self, start: int, got: int, kept: int) -> None:
        """What the receiver has. After a restart it has forgotten what it had not kept: all that is left is sent again."""
        if start < self.start or got > self.number:
            return  # an old frame
        restarted = start > self.start
        if restarted or got > self.got:
            self.start, self.got = start, got
            for sent in self.waiting:  # one that comes again may have come out of order, and had to be left
                if restarted or (sent.number == got + 1 and sent.repeated):
                    sent.at_once()
        while self.waiting and self.waiting[0].number <= kept:
            self.safe = self.waiting.pop(0).letter

    def letters(self) -> set[tuple[int, int]]:
        """Of the rows that the receiver may have as the latest."""
        return {sent.letter for sent in self.waiting} | ({self.safe} if self.safe else set())

    def gave(self, phase: int) -> bool:
        """Whether the last row, or one that waits, is of this phase."""
        return any(each == phase for each, _ in self.letters())

    def due(self, now: float, first: float, longest: float) -> list[Sent]:
        """What must be sent now, for the first time or again; the time between attempts doubles from `first` to `longest`."""
        found = [s for s in self.waiting if s.number > self.got and s.next_time <= now]
        for sent in found:
            sent.repeated = sent.wait > 0
            sent.wait = min(max(first, 2 * sent.wait), longest)
            sent.next_time = now + sent.wait
        return found

    def to_json(self) -> dict[str, Any]:
        waiting = [[s.number, s.weight, *s.letter] for s in self.waiting]
        return {"number": self.number, "waiting": waiting, "safe": self.safe}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Outlet":
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

    def to_json(self) -> dict[str, Any]:
        seen = None if self.seen is None else self.seen.to_json()
        return {"counted": self.counted, "seen": seen, "receipt": self.receipt.hex()}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Inlet":
        seen = None if saved["seen"] is None else Claim.from_json(saved["seen"])
        return cls(saved["counted"], saved["counted"], seen=seen, receipt=bytes.fromhex(saved["receipt"]))


# Which rounds a member can have released, where members share noise that cancels

AHEAD = 4
"""A member reserves this many rounds beyond its current one, so that no round waits for the others' answers."""


class Reservations:
    """The rounds that each member may have released: known before noise shared with a lost member is taken back.

    Taking noise back reveals what hides the lost member's messages, so it may touch only rounds that this member has never
    released and never will. Nobody can ask it, and others may lie about what they have of it. So a member *reserves* rounds
    before it releases them: its signed signs of life name the last round it has reserved, everybody writes that to disk and
    repeats it in signs of life of its own, and a member releases a round only when `quorum` others have repeated a
    reservation that covers it.

    A member that adopts a revision without the lost one notes no further reservation of it. When so many have signed that they
    are at this revision that any `quorum` of the others has more of them than there can be liars, one honest member is in
    both: the largest reservation among them is not below any round that the lost member has released, whoever cut it off
    from whom.

    Attributes:
        known: the last round that each member has reserved, as far as heard here. Frozen for an expelled member.
        revision: of the adopted contract.
        kept: `known` when it was last written to disk: what this member signs.
        kept_revision: the revision that was adopted then.
    """

    def __init__(self, members: int, own: int, colluders: int, absentees: int) -> None:
        self.members, self.own, self.colluders = members, own, colluders
        self.quorum = quorum(members, colluders, absentees)
        self.known = [-1] * members
        self.revision = 1
        self._gone: frozenset[int] = frozenset()
        self._said: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.note()

    def adopt(self, revision: int, gone: Set[int]) -> None:
        self.revision, self._gone = max(revision, self.revision), self._gone | gone

    def reserve(self, last: int) -> None:
        self.known[self.own] = max(self.known[self.own], last)

    def hear(self, member: int, revision: int, kept: Sequence[int]) -> None:
        if member not in self._gone:
            self._said[member] = revision, tuple(kept)
            self.known[member] = max(self.known[member], kept[member])

    @property
    def news(self) -> bool:
        """Whether something is known that is not on disk."""
        return (tuple(self.known), self.revision) != (self.kept, self.kept_revision)

    def note(self) -> None:
        """What is known is now on disk."""
        self.kept, self.kept_revision = tuple(self.known), self.revision

    @property
    def allowed(self) -> int:
        """The last round that this member may release; -1: none."""
        noted = sorted((kept[self.own] for _, kept in self._said.values()), reverse=True)
        return min(noted[self.quorum - 1], self.kept[self.own]) if len(noted) >= self.quorum else -1

    def last(self, lost: int, removed_in: int) -> int | None:
        """A round after which an expelled member has released nothing and never will; None: not known yet."""
        others = (said for member, said in self._said.items() if member != lost)
        told = [
            kept[lost]
            for revision, kept in (*others, (self.kept_revision, self.kept))
            if revision >= removed_in
        ]
        return max(told) if len(told) + self.quorum >= self.members + self.colluders else None

    def to_json(self) -> dict[str, Any]:
        return {"known": list(self.known), "revision": self.revision}

    def load(self, saved: Mapping[str, Any]) -> None:
        if saved["revision"] > self.revision:
            raise RunError(
                f"the run has adopted revision {saved['revision']} of the federation file and this is {self.revision}: give the newest file"
            )
        self.known = [max(both) for both in zip(self.known, saved["known"], strict=True)]
        self.note()


# Who is here

HERE, DONE, LEFT, NEAR = 0, 1, 2, 3
"""What a member is doing: taking part; finished, with the average in hand; gone for good,
its mass handed over; taking part, and at the end of its averaging as far as it can see."""
ACTIVE = (HERE, NEAR)
WORDS = {HERE: "here", DONE: "finished", LEFT: "left", NEAR: "here"}
STARTS = 1 << 32
"""Signs of life that one start of a process has at most: they count on from this times the number of the start."""


class View:
    """All members as one of them sees them.

    A member that goes on showing signs of life is here; one of which nothing new was heard for `hard` seconds is away. Signs are
    counted and signed by their owner, so a sign that arrives by a detour, late or twice is told from a new one, and nobody makes up another's.

    Attributes:
        known: the newest presence of everybody.
        ignored: members that count no more, whatever is heard of them.
        reservations: of rounds, where members share noise; None: they do not.
    """

    def __init__(
        self,
        nodes: int,
        own: int,
        hard: float,
        start: int,
        sign: Callable[[Presence], bytes] = lambda presence: b"",
        reservations: Reservations | None = None,
    ) -> None:
        self.own, self.hard, self._sign, self.reservations = own, hard, sign, reservations
        self.ignored: frozenset[int] = frozenset()
        self.known = [Presence(0, -1, HERE) for _ in range(nodes)]
        self._farthest = list(self.known)
        self._since = [-math.inf] * nodes
        self.known[own] = Presence(start * STARTS, -1, HERE)

    def beat(self, pushed: int, state: int, to: int | None = None) -> tuple[Presence, ...]:
        """A new sign of life of this member's own; everybody, for a frame.
        The one it goes `to` hears how far it once was: if it has forgotten rounds, it is told of them."""
        unsigned = Presence(self.known[self.own].beats + 1, pushed, state)
        if (noted := self.reservations) is not None:
            unsigned = replace(unsigned, revision=noted.kept_revision, reserved=noted.kept)
        self.known[self.own] = replace(unsigned, signature=self._sign(unsigned))
        return tuple(self._farthest[n] if n == to else each for n, each in enumerate(self.known))

    def news(self, node: int, presence: Presence) -> bool:
        """Whether this says more of another member than is known."""
        return node not in (self.own, *self.ignored) and presence.beats > self.known[node].beats

    def hear(self, told: Sequence[Presence], now: float) -> None:
        """Take in what a frame says, its signatures checked."""
        for node, presence in enumerate(told):
            if self.news(node, presence):
                self.known[node], self._since[node] = presence, now
                if self.reservations is not None and presence.reserved:
                    self.reservations.hear(node, presence.revision, presence.reserved)
                if presence.pushed >= self._farthest[node].pushed:
                    self._farthest[node] = presence

    def finished(self) -> dict[int, Presence]:
        """Of the other members, those that have signed that they have finished; for the disk."""
        return {n: known for n, known in enumerate(self.known) if known.state == DONE and n != self.own}

    def recall(self, node: int, presence: Presence) -> None:
        """What an earlier start of this process has heard of a member; whether it is here is another question."""
        self.known[node] = self._farthest[node] = presence

    def age(self, node: int, now: float) -> float:
        """Seconds since the last sign of life; infinite: never heard of."""
        return now - self._since[node]

    def is_here(self, node: int, now: float) -> bool:
        """Whether a member takes part, or is finished and still there."""
        gone = node in self.ignored or self.known[node].state == LEFT
        return node == self.own or (self.age(node, now) <= self.hard and not gone)

    def here(self, now: float) -> list[int]:
        """Who is here, this member included."""
        return [node for node in range(len(self.known)) if self.is_here(node, now)]

    def missing(self, now: float) -> list[int]:
        """Who takes part and has fallen silent, though not long enough to count as away."""
        return [n for n in self.taking_part() if self.hard / 2 < self.age(n, now) <= self.hard]

    def taking_part(self) -> list[int]:
        """Who has neither finished nor left nor is ignored, as far as is known; this member included."""
        return [n for n, known in enumerate(self.known) if known.state in ACTIVE and n not in self.ignored]

    def pushed(self, node: int) -> int:
        """The last round of which a member has said that its shares are out; -1: none."""
        return self._farthest[node].pushed

    def rounds(self, now: float) -> list[int]:
        """The last rounds of the other members that are here, in order."""
        return sorted(self.pushed(node) for node in self.here(now) if node != self.own)


# What an honest member can send

_SLACK = 2.0


@dataclass(frozen=True)
class Terms:
    """What the contract makes of every row and share: each member computes it for itself, and believes nobody else about it.

    Attributes:
        topology: who sends to whom.
        rounds: of learning.
        reach: how far (L2) clip, rates and noise can take an honest member's parameters from the start in all rounds together;
            infinite: not known.
        clock: the topology's round of a round of learning; by default the same.
        mixes: how many of these rounds, in which rows are passed on, belong to one in which something is released.
    """

    topology: Topology
    rounds: int
    reach: float = math.inf
    clock: Callable[[int], int] = int
    mixes: int = 1

    def weight(self, round_: int, sender: int, receiver: int) -> float:
        """Of the part of its row that one member gives another in a round of learning; 0: none."""
        return given(self.topology.weights(self.clock(round_)), sender).get(receiver, 0.0)

    @cached_property
    def neighbours(self) -> Counter[int]:
        """How many others each member exchanges messages with."""
        return Counter(chain.from_iterable(linked(self.topology)))


def given(weights: Weights, sender: int) -> dict[int, float]:
    """The weights with which one member gives parts of its row to others."""
    mine = (weights.senders == sender) & (weights.receivers != sender)
    return dict(zip(weights.receivers[mine].tolist(), weights.values[mine].tolist(), strict=True))


class Rows:
    r"""Rows as members send them: their bytes, what an honest one can be, and how far a single member may pull.

    Updates and noise are scaled by a member's own a, so $y_i = s_i / a_i$ moves by at most the clip and its
    noise, and mixing makes it a convex combination of others': while everybody is honest, $\|s_i\| \le a_i (\|s_0\| + R)$
    at all times, but for a chance of $10^{-12}$, with R what clip, rates and noise can add up to in the whole plan (:mod:`dpps.transport.base`).
    Where members share noise nothing is scaled, and R is larger by the smallest a that an honest member can have.
    All of it is in the contract: no member's word, not even about its round, makes a row longer.

    Rows up to $B = 2 a (\|s_0\| + R)$ count as they are. One that is longer counts as if it were just so long, so the parameters of
    an honest member, whatever a liar sends, stay within $B + a R < 2 B$: what is longer than 2 B no honest member has, and gets its sender refused.

    Args:
        row: a row as all start with.
        common: whether all do; otherwise nothing is known of a row's length.

    Attributes:
        reach: how far parameters can get from the start in the whole plan; infinite: not known.
    """

    def __init__(self, row: Tensor, common: bool) -> None:
        self.width, self.dtype, self.device = row.numel(), row.dtype, row.device
        self.size = self.width * row.element_size()
        self.reach = math.inf
        self._start = float(torch.linalg.vector_norm(row.double())) if common else math.inf
        self._own = row.double().cpu()
        self._seen: dict[int, tuple[int, Tensor]] = {}

    def zero(self) -> Tensor:
        """A row of nothing, as wide as sums of rows need it."""
        return torch.zeros(self.width, dtype=torch.float64)

    def narrow(self, row: Tensor) -> Tensor:
        """A sum as the protocol has it."""
        return row.to(self.device, self.dtype)

    def encode(self, row: Tensor) -> bytes:
        return row.detach().to("cpu", self.dtype).contiguous().view(torch.uint8).numpy().tobytes()

    def longest(self, a: float) -> float:
        """The longest row with this a that counts as it is."""
        most = self._start + self.reach
        return _SLACK * a * most if math.isfinite(most) else math.inf

    def checked(self, share: Share) -> Tensor:
        """The row of a share, not longer than `longest`. FrameError: no honest member can have it."""
        if len(share.row) != self.size:
            raise FrameError(f"a row of {len(share.row)} bytes: rows have {self.size}")
        row = torch.frombuffer(bytearray(share.row), dtype=self.dtype).double()
        norm = _norm(row)
        where = f"a row of round {share.claim.round}"
        if not math.isfinite(norm):
            raise FrameError(f"{where} that holds NaN or infinity")
        most = self.longest(share.claim.a)
        if norm > _SLACK * most:
            raise FrameError(
                f"{where} of norm {norm:.4g}: clip, rates and noise make at most {_SLACK * most:.4g} possible"
            )
        return row if norm <= most else row * (most / norm)

    def clipped(self, row: Tensor, a: float, most: float) -> Tensor:
        """Clipped gossip: a row whose y is farther than `most` from one's own counts as if it were just so far away."""
        if a <= 0:
            return row
        apart = row / a - self._own
        norm = _norm(apart)
        if not math.isfinite(norm):  # a so small that its direction is lost
            return a * self._own
        return row if norm <= most else a * (self._own + apart * (most / norm))

    def follow(self, y: Tensor) -> None:
        """One's own parameters, from which others' are measured."""
        self._own = y.detach().double().cpu()

    def saw(self, node: int, row: Tensor, claim: Claim) -> None:
        """What a neighbour's parameters were when it last told."""
        if claim.a > 0:
            self._seen[node] = claim.round, (row / claim.a).to(self.dtype)

    def middle(self, rows: Sequence[Tensor], most: float) -> tuple[Tensor, float]:
        """What several members say of the same row (a = 1): its median, coordinate by coordinate, so that one among three or more
        moves it no farther than the others are apart; and how far (L2, relative to its norm) the farthest of them is from it.

        Args:
            rows: what they say, at least one.
            most: those that are farther than this from one's own row count as if they were just so far away; 0: no limit.
        """
        told = [self.clipped(row.double(), 1.0, most) if most > 0 else row.double() for row in rows]
        ordered = torch.stack(told).sort(0).values
        found = (ordered[(len(told) - 1) // 2] + ordered[len(told) // 2]) / 2
        norm = _norm(found)
        if norm > (longest := self.longest(1.0)):
            found = found * (longest / norm)
        return self.narrow(found), _apart(found, told)

    def told(self, nodes: Sequence[int], since: int) -> bool:
        """Whether each of these has told since that round."""
        return all(node in self._seen and self._seen[node][0] >= since for node in nodes)

    def apart(self, mean: Tensor, since: int) -> float | None:
        """How far neighbours were from `mean` when they last told, relative to its norm; None: none has told since that round."""
        told = [y for round_, y in self._seen.values() if round_ >= since]
        return _apart(mean.double().cpu(), told) if told else None


def _norm(row: Tensor) -> float:
    return float(torch.linalg.vector_norm(row))


def _apart(mean: Tensor, rows: Sequence[Tensor]) -> float:
    """How far the farthest of some rows is from their mean, relative to its norm."""
    norm, far = _norm(mean), max(_norm(row.double() - mean) for row in rows)
    return far / norm if norm else far
