"""A member's correspondence: what it has sent and not yet heard back of, what it has counted, and who is there.

Frames come in at any time and in any order; whatever they bring is counted at once into what is *held*, of which the rounds of
:mod:`dpps.peers.fabric` take and give. Everything that must survive a crash is in `tensors` and `meta`.
"""

import hashlib
import logging
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from dpps.errors import RunError
from dpps.peers.frames import AVERAGING, FINAL, LEARNING, Claim, Frame, FrameError, Share, decode
from dpps.peers.links import Inlet, Letter, Outlet, Sent
from dpps.peers.membership import Membership
from dpps.peers.post import Post
from dpps.peers.rows import Rows
from dpps.peers.view import ACTIVE, HERE, LEFT, WORDS, View

log = logging.getLogger(__name__)

_AT_ONCE = 1000
_NOTICE = 0.5  # seconds after which a new connection is noticed at the latest


class Correspondence:
    """One member's half of all its links.

    Args:
        membership: the contract.
        post: carries frames to the others.
        clock: seconds, of any origin.

    Attributes:
        keep: puts the whole state on disk; called with the phase before anything of a push leaves.
        start_number: how often this member's process has been started.
        state: what this member is doing: one of those in :mod:`dpps.peers.view`.
        pushed: the last round of which parts were given; -1: none.
        refused: members whose frames are not accepted any more, and why.
        silenced: why nothing is sent any more, not even a sign of life: what is in memory is not what is on disk.
        lock: held while a frame is made or read; who takes in frames while the member computes takes it in between.
    """

    def __init__(self, membership: Membership, post: Post, clock: Callable[[], float]) -> None:
        self.membership, self.post, self.clock = membership, post, clock
        self.keep: Callable[[int], None] = lambda phase: None
        self.state, self.pushed = HERE, -1
        self.refused: dict[int, str] = {}
        self.silenced: RunError | None = None
        self.lock = threading.RLock()
        others = [node for node in range(len(membership.names)) if node != membership.own]
        self._outlets = {node: Outlet() for node in others}
        self._inlets = {node: Inlet() for node in others}
        self._letters: dict[tuple[int, int], Letter] = {}
        self._digests: dict[tuple[int, int], str] = {}
        self._home: dict[int, tuple[Tensor, float]] = {}
        self._given_up: set[int] = set()
        self._greeted: set[int] = set()
        self._said_of_own = -1
        self._connected: frozenset[int] = frozenset()
        self._connections: dict[int, int] = {}
        self._unheard: set[int] = set()
        self._lost: dict[int, float] = {}  # since when a neighbour's connection is gone
        self._next_tending = self._next_beat = -math.inf
        self.begin(1)

    def begin(self, start_number: int) -> None:
        """Before the first frame: how often this member's process has been started, this time included."""
        self.start_number = start_number
        self.view = View(len(self.membership.names), self.membership.own, self.membership.hard, start_number)
        self.adopt(self.membership)

    def adopt(self, membership: Membership) -> None:
        """The contract of a later epoch: who was expelled counts no more."""
        self.membership, names = membership, membership.names
        self.view.expelled = frozenset(n for n, name in enumerate(names) if name not in membership.present)

    def _prepare(self, rows: Rows) -> None:
        """What rows look like; nothing is held yet."""
        self._rows = rows
        self._home = {phase: (rows.zero(), 0.0) for phase in (LEARNING, AVERAGING, FINAL)}

    # What is held here

    def hold(self, phase: int, row: Tensor, a: float) -> None:
        """Add a row to what is held, so that `keep` finds it."""
        with self.lock:
            held, mass = self._home[phase]
            self._home[phase] = held + row.double().cpu(), mass + a

    def take(self, phase: int) -> tuple[Tensor, float]:
        """All that is held, which is then in the caller's hands."""
        with self.lock:
            (row, a), self._home[phase] = self._home[phase], (self._rows.zero(), 0.0)
        return self._rows.narrow(row), a

    def follow(self, y: Tensor) -> None:
        """This member's own parameters, from which clipped gossip measures the others'."""
        with self.lock:
            self._rows.follow(y)

    # Giving

    def _can_take(self, node: int, phase: int, round_: int, now: float) -> bool:
        here = node in self._connected and self.view.is_here(node, now) and node not in self.refused
        return here and self.view.known[node].state in ACTIVE and self._outlets[node].ready(phase, round_)

    def _give(
        self, phase: int, round_: int, row: Tensor, a: float, parts: Mapping[int, float], rest: float
    ) -> None:
        """Number the parts, put everything on disk, then let them go.

        Wherever this is interrupted before all is on disk, another thread must not send what is in memory: the next start
        would compute the round again, with other noise.
        """
        self._check_silence()
        self.silenced = RunError(
            f"round {round_} was not put on disk, so nothing of it was sent and nothing is sent any more: open the run anew"
        )
        key = phase, round_
        row = row.detach().cpu().clone()
        data = self._rows.encode(row)
        digest = hashlib.sha256(data).hexdigest()
        unsigned = Claim(phase, round_, digest, b"").message(self.membership.run, self.membership.name)
        claim = Claim(phase, round_, digest, self.membership.sign(unsigned))
        self._letters[key] = Letter(row, a, claim, data)
        self._digests[key] = digest
        for node, weight in parts.items():
            self._outlets[node].add(weight, key)
        self.hold(phase, rest * row.double(), rest * a)
        self._forget_letters(key)
        self.pushed = round_
        self._keep(phase)
        now = self.clock()
        self._send_due(now)
        for node in self._connected:
            if node not in parts:
                self._send(node)
        self._next_beat = now + self.membership.hard / 6

    def _check_silence(self) -> None:
        if self.silenced is not None:
            raise self.silenced

    def _keep(self, phase: int) -> None:
        self.silenced = self.silenced or RunError(
            "the state was not put on disk, so nothing is sent any more: open the run anew"
        )
        self.keep(phase)
        self.silenced = None
        for inlet in self._inlets.values():
            inlet.kept = inlet.counted

    # Who is here

    @property
    def here(self) -> list[str]:
        """Names of the members that are here, this one included."""
        return [self.membership.names[node] for node in self.view.here(self.clock())]

    def partners(self) -> list[int]:
        """Neighbours that take part and can be reached."""
        now, known = self.clock(), self.view.known
        here = (n for n in sorted(self._connected) if n not in self.refused and self.view.is_here(n, now))
        return [n for n in here if known[n].state in ACTIVE]

    def begun(self) -> bool:
        """Whether a round was sent: by this member, or by a neighbour that says so of itself."""
        return self.pushed >= 0 or any(self.view.pushed(node) >= 0 for node in self._outlets)

    def assembled(self, wanted: int, answers: bool = False) -> bool:
        """Whether so many members are here, a neighbour is in touch, and one has said what it knows of this
        member's earlier starts; with `answers`, every neighbour that can be reached has."""
        in_touch = [n for n in self.partners() if n not in self._given_up]
        asked = {n for n in self._connected if n not in self.refused}
        enough = len(self.view.here(self.clock())) >= wanted and bool(self._greeted) and bool(in_touch)
        return enough and (not answers or asked <= self._greeted)

    def answered(self) -> bool:
        """Whether all neighbours have said what they know of this member's earlier starts."""
        asked = {self.membership.names.index(name) for name in self.membership.partners} - set(self.refused)
        return asked <= self._greeted

    def doubtful(self) -> bool:
        """Whether somebody says that this member has sent more rounds than it knows of, and not all neighbours have answered yet:
        one that did receive them has this member's signature, which decides (`_check_seen`)."""
        return self._said_of_own > self.pushed and not self.answered()

    def status(self) -> list[dict[str, Any]]:
        """Every member: name, state in words, last round, seconds since it was heard of."""
        now = self.clock()
        found = []
        for node, (name, known) in enumerate(zip(self.membership.names, self.view.known, strict=True)):
            age = 0.0 if node == self.membership.own else self.view.age(node, now)
            word = WORDS[known.state] if self.view.is_here(node, now) or known.state == LEFT else "away"
            if word == "here" and now - self._lost.get(node, now) > self.membership.soft:
                word = (
                    "away"  # rounds do not wait for it; whether it comes back is decided at the hard deadline
                )
            if name not in self.membership.present:
                word = "expelled"
            if node in self.refused:
                word = "refused"
            told = {"name": name, "state": word, "round": known.pushed + 1, "heard": age}
            found.append(told | {"connected": node in self._connected, "why": self.refused.get(node, "")})
        return found

    # Frames

    def wait(self, seconds: float) -> None:
        """Do what is due, and take in what arrives within so many seconds, or sooner (at most one frame)."""
        with self.lock:
            now = self.clock()
            self._tend(now)
            found = self.post.receive(max(0.0, min(seconds, self._next_tending - now, _NOTICE)))
            if found is not None:
                self._handle(*found)

    def look(self) -> None:
        """Take in what is here already, unless somebody else does."""
        if self.lock.acquire(blocking=False):
            try:
                self._take_in()
            finally:
                self.lock.release()

    def _wait_until(self, done: Callable[[], bool], seconds: float) -> None:
        deadline = self.clock() + seconds
        while not done() and self.clock() < deadline:
            self.wait(deadline - self.clock())

    def _take_in(self) -> None:
        """All frames that are here already."""
        self._tend(self.clock())
        for _ in range(_AT_ONCE):  # whoever floods this member does not stop it
            if (found := self.post.receive(0.0)) is None:
                break
            self._handle(*found)

    def _tend(self, now: float) -> None:
        """Greet who is newly connected, send again what is due, show a sign of life."""
        partners = self.post.connected() & self.membership.partners
        connected = frozenset(self.membership.names.index(name) for name in partners)
        made = {node: self.post.connection(self.membership.names[node]) for node in connected}
        again = {node for node in connected & self._connected if made[node] != self._connections[node]}
        fresh = connected - self._connected | again
        for node in self._connected - connected:
            self._lost[node] = now
        self._lost = {node: since for node, since in self._lost.items() if node not in connected}
        self._connected, self._connections = connected, made
        self._unheard = (self._unheard | fresh) & connected
        for node in sorted(fresh):
            for sent in self._outlets[node].waiting:
                sent.next_time = sent.wait = 0.0
            self._send(node)
        if now >= self._next_tending or fresh:
            self._send_due(now)
            for node in sorted(connected - fresh - (self._greeted - self._unheard)):
                self._send(node)  # it has not answered yet
            self._next_tending = now + min(self.membership.soft / 3, self.membership.hard / 6)
        if now >= self._next_beat:
            self._tell_everybody()
            self._next_beat = now + self.membership.hard / 6

    def _tell_everybody(self) -> None:
        for node in sorted(self._connected):
            self._send(node)

    def _send_due(self, now: float) -> None:
        """Shares that are due, but for those to who was not heard yet on this connection: it may have a signature that shows that
        this machine was put back to an earlier state, and what waits here is not what was sent then."""
        for node in sorted(self._connected - self._unheard):
            if node not in self.refused:
                for sent in self._outlets[node].due(now, self.membership.soft / 3):
                    self._send(node, sent)

    def _send(self, node: int, sent: Sent | None = None) -> None:
        """A frame: how far this member is, a signed receipt for what has come last, and a share if there is one to send."""
        if self.silenced is not None:
            return
        inlet, share = self._inlets[node], None
        if sent is not None:
            letter = self._letters[sent.letter]
            share = Share(sent.number, sent.weight, letter.a, letter.claim, letter.data)
        if inlet.seen is not None and not inlet.receipt:
            members = self.membership
            receipt = inlet.seen.receipt(members.run, members.names[node], members.name)
            inlet.receipt = members.sign(receipt)
        data = Frame(
            run=self.membership.run,
            start=self.start_number,
            asks=node not in self._greeted or node in self._unheard,
            answers=inlet.start,
            got=inlet.counted,
            kept=inlet.kept,
            view=self.view.beat(self.pushed, self.state),
            share=share,
            seen=inlet.seen,
            receipt=inlet.receipt,
        ).encode()
        self.post.send(self.membership.names[node], data)

    def _handle(self, name: str, data: bytes) -> None:
        if name not in self.membership.partners:
            return
        node = self.membership.names.index(name)
        if node in self.refused:
            return
        try:
            frame = decode(data, self.membership.run, len(self.membership.names), self._rows.size)
            self._hear(node, frame)
        except FrameError as error:
            self.refused[node] = str(error)
            log.warning("%s is refused from now on: it sent %s", name, error)

    def _hear(self, node: int, frame: Frame) -> None:
        inlet = self._inlets[node]
        if frame.start < inlet.start:
            return  # it was sent before the sender's last restart
        self.view.hear(node, frame.view, self.clock())
        self._said_of_own = max(self._said_of_own, frame.view[self.membership.own].pushed)
        self._given_up.discard(node)
        self._outlets[node].hear(frame.start, frame.got, frame.kept)
        if frame.seen is not None:
            self._check_seen(node, frame.seen, frame.receipt)
        if frame.answers == self.start_number:
            self._greeted.add(node)
        inlet.start = frame.start
        if node in self._unheard:  # what waits for it is due at once
            self._unheard.discard(node)
            self._next_tending = -math.inf
        if frame.share is not None and inlet.expects(frame.share):
            self._count(node, inlet, frame.share)
        if frame.share is not None or frame.asks:
            self._send(node)
        if frame.asks:  # it has just been started: what it has forgotten is due at once
            self._next_tending = -math.inf

    def _count(self, node: int, inlet: Inlet, share: Share) -> None:
        """Add a share to what is held: now, and never again."""
        claim, name = share.claim, self.membership.names[node]
        if not self.membership.verify(name, claim.signature, claim.message(self.membership.run, name)):
            raise FrameError("a row that it has not signed")
        row = self._rows.checked(share)
        if self.membership.gossip_clip > 0:
            row = self._rows.clipped(row, share.a, self.membership.gossip_clip)
        if claim.phase != LEARNING:
            self._rows.saw(node, row, share)
        if claim.phase != FINAL:
            self.hold(claim.phase, share.weight * row, share.weight * share.a)
        elif inlet.seen is None or inlet.seen.phase != FINAL:  # every neighbour has one voice
            self.hold(FINAL, row / share.a if share.a else row, 1.0)
        inlet.counted = share.number
        if inlet.seen is None or claim.order > inlet.seen.order:
            inlet.seen, inlet.receipt = claim, b""

    def _check_seen(self, node: int, seen: Claim, receipt: bytes) -> None:
        """A neighbour shows this member's own signature under a row: it must know of having sent that."""
        run, own, name = self.membership.run, self.membership.name, self.membership.names[node]
        signed = self.membership.verify(own, seen.signature, seen.message(run, own))
        if not signed or not self.membership.verify(name, receipt, seen.receipt(run, own, name)):
            raise FrameError("an acknowledgement with a wrong signature")
        safe = self._outlets[node].safe
        if safe is not None and seen.order < safe:
            return  # a frame that others have overtaken: it has said of a later row that it is on its disk
        if self._digests.get((seen.phase, seen.round)) != seen.digest:
            later = seen.round > self.pushed
            stands = f"the run stands after round {self.pushed}" if later else "it is another"
            self.silenced = RunError(
                f"{name} has this member's signed message of round {seen.round}, and on this disk {stands}: ledger and outbox "
                "were replaced by an older copy or begun anew, so what was spent is not known; restore them, or leave this run; "
                "nothing more was sent"
            )
            raise self.silenced

    def _forget_letters(self, newest: tuple[int, int]) -> None:
        """Rows that all have are not kept, and digests only of what a neighbour may still show."""
        needed = {sent.letter for outlet in self._outlets.values() for sent in outlet.waiting}
        self._letters = {key: each for key, each in self._letters.items() if key in needed}
        shown = set().union({newest}, *(outlet.letters() for outlet in self._outlets.values()))
        self._digests = {key: digest for key, digest in self._digests.items() if key in shown}

    # To and from disk

    def tensors(self) -> dict[str, Tensor]:
        """Everything of this member's half of the links that changes, but for what is in `meta`."""
        named = {f"home/{phase}": row for phase, (row, _) in self._home.items()}
        return named | {f"letter/{phase}/{r}": each.row for (phase, r), each in self._letters.items()}

    def meta(self) -> dict[str, Any]:
        """Numbers, claims and scalars."""
        return {
            "start": self.start_number,
            "state": self.state,
            "pushed": self.pushed,
            "mass": {str(phase): a for phase, (_, a) in self._home.items()},
            "letters": [each.to_json() for each in self._letters.values()],
            "digests": [[*key, digest] for key, digest in self._digests.items()],
            "outlets": {str(node): outlet.to_json() for node, outlet in self._outlets.items()},
            "inlets": {str(node): inlet.to_json() for node, inlet in self._inlets.items()},
            "rows": self._rows.meta(),
        }

    def load(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Take up what `tensors` and `meta` gave, in a new start of the process."""
        self.begin(meta["start"] + 1)
        self.state, self.pushed = meta["state"], meta["pushed"]
        self._rows.load(meta["rows"])
        # version 0.2 knew no final average
        known = {phase: f"home/{phase}" for phase in self._home if f"home/{phase}" in tensors}
        self._home |= {phase: (tensors[name], meta["mass"][str(phase)]) for phase, name in known.items()}
        self._letters = {}
        for saved in meta["letters"]:
            row = tensors[f"letter/{saved[0]}/{saved[1]}"]
            letter = Letter.from_json(saved, row, self._rows.encode(row))
            self._letters[letter.claim.order] = letter
        self._digests = {(phase, r): digest for phase, r, digest in meta["digests"]}
        self._outlets = {int(node): Outlet.from_json(saved) for node, saved in meta["outlets"].items()}
        self._inlets = {int(node): Inlet.from_json(saved) for node, saved in meta["inlets"].items()}
