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
from dpps.peers.frames import (
    AVERAGING,
    FINAL,
    LEARNING,
    PROTOCOL,
    Claim,
    Frame,
    FrameError,
    Presence,
    Share,
    decode,
)
from dpps.peers.links import Inlet, Letter, Outlet, Sent
from dpps.peers.membership import Membership, Terms
from dpps.peers.post import Post
from dpps.peers.rows import Rows
from dpps.peers.view import ACTIVE, DONE, HERE, LEFT, STARTS, WORDS, View

log = logging.getLogger(__name__)

_AT_ONCE = 1000
_NOTICE = 0.5  # seconds after which a new connection is noticed at the latest
_LONGEST_REASON = 300


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
        refused: members whose frames are not accepted any more, and why; for the rest of the run.
        evidence: what a refused member has signed that no honest one does, and its signature, where there is such a thing.
        refused_by: members that refuse this one, and why.
        silenced: why nothing is sent any more, not even a sign of life: what is in memory is not what is on disk.
        lock: held while a frame is made or read; who takes in frames while the member computes takes it in between.
    """

    _terms: Terms
    _last: int
    """The last round of all, the average included."""

    def __init__(self, membership: Membership, post: Post, clock: Callable[[], float]) -> None:
        self.membership, self.post, self.clock = membership, post, clock
        self.keep: Callable[[int], None] = lambda phase: None
        self.state, self.pushed = HERE, -1
        self.refused: dict[int, str] = {}
        self.evidence: dict[int, tuple[bytes, bytes]] = {}
        self.refused_by: dict[int, str] = {}
        self.silenced: RunError | None = None
        self.lock = threading.RLock()
        others = [node for node in range(len(membership.names)) if node != membership.own]
        self._outlets = {node: Outlet() for node in others}
        self._inlets = {node: Inlet() for node in others}
        self._letters: dict[tuple[int, int], Letter] = {}
        self._digests: dict[tuple[int, int], str] = {}
        self._home: dict[int, tuple[Tensor, float]] = {}
        self._voices: dict[int, Tensor] = {}  # the final average, as each neighbour that has finished says
        self._given_up: dict[int, int] = {}  # with the last round of which it had told by then
        self._silent: set[int] = set()
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
        members, name = self.membership, self.membership.name

        def sign(presence: Presence) -> bytes:
            return members.sign(presence.message(members.run, name))

        self.view = View(len(members.names), members.own, members.hard, start_number, sign)
        self.adopt(self.membership)

    def adopt(self, membership: Membership) -> None:
        """The contract of a later epoch: who was expelled counts no more, nor who is refused."""
        self.membership, names = membership, membership.names
        expelled = {n for n, name in enumerate(names) if name not in membership.present}
        self.view.ignored = frozenset(expelled | set(self.refused))

    def _prepare(self, rows: Rows) -> None:
        """What rows look like; nothing is held yet."""
        self._rows = rows
        self._home = {phase: (rows.zero(), 0.0) for phase in (LEARNING, AVERAGING)}

    # What is held here

    def hold(self, phase: int, row: Tensor, a: float) -> None:
        """Add a row to what is held, so that `keep` finds it.

        Nobody can hold more mass than all members have together. If a liar has made some up, its receiver takes the row
        with so much less of it: what it passes on is then what an honest member can have.
        """
        with self.lock:
            held, mass = self._home[phase]
            held, mass, most = held + row.double().cpu(), mass + a, float(len(self.membership.names))
            self._home[phase] = (held, mass) if mass <= most else (held * (most / mass), most)

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
        here = node in self._connected and self.view.is_here(node, now) and node not in self.refused_by
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
        digest = self._digests[key] = hashlib.sha256(data).hexdigest()
        self._letters[key] = Letter(row, a, digest, data)
        for node, weight in parts.items():
            self._outlets[node].add(weight, key)
        if rest:
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
        here = (n for n in sorted(self._connected) if n not in self.refused_by and self.view.is_here(n, now))
        return [n for n in here if known[n].state in ACTIVE]

    def begun(self) -> bool:
        """Whether a round was sent: by this member, or by a neighbour that says so of itself."""
        return self.pushed >= 0 or any(self.view.pushed(node) >= 0 for node in self._outlets)

    def assembled(self, wanted: int, answers: bool = False) -> bool:
        """Whether so many members are here, a neighbour is in touch, and one has said what it knows of this
        member's earlier starts; with `answers`, every neighbour that can be reached has."""
        in_touch = [n for n in self.partners() if n not in self._silent]
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
            why = self.refused.get(node) or self.refused_by.get(node, "")
            found.append(told | {"connected": node in self._connected, "why": why})
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
            for node in sorted(connected - fresh - (self._greeted - self._unheard) - set(self.refused)):
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
        inlet, share, members = self._inlets[node], None, self.membership
        if sent is not None:
            letter = self._letters[sent.letter]
            if not sent.signature:
                message = sent.claim(letter).message(members.run, members.name, members.names[node])
                sent.signature = members.sign(message)
            share = Share(sent.claim(letter), letter.data)
        if inlet.seen is not None and not inlet.receipt:
            receipt = inlet.seen.receipt(members.run, members.names[node], members.name)
            inlet.receipt = members.sign(receipt)
        data = Frame(
            run=members.run,
            start=self.start_number,
            asks=node not in self._greeted or node in self._unheard,
            answers=inlet.start,
            got=inlet.counted,
            kept=inlet.kept,
            view=self.view.beat(self.pushed, self.state, node),
            share=share,
            seen=inlet.seen,
            receipt=inlet.receipt,
            refusal=self.refused.get(node, ""),
        ).encode()
        self.post.send(members.names[node], data)

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
            self._refuse(node, error)

    def _refuse(self, node: int, error: FrameError) -> None:
        """Nothing that a member sends counts any more; it is told why."""
        self.refused[node] = _plain(str(error))
        if error.evidence is not None:
            self.evidence[node] = error.evidence
        self.adopt(self.membership)
        log.warning("%s is refused from now on: it sent %s", self.membership.names[node], self.refused[node])
        if node in self._connected:
            self._send(node)

    def _hear(self, node: int, frame: Frame) -> None:
        inlet = self._inlets[node]
        if frame.start < inlet.start:
            return  # it was sent before the sender's last restart
        self._check_view(node, frame)
        self.view.hear(frame.view, self.clock())
        self._said_of_own = max(self._said_of_own, frame.view[self.membership.own].pushed)
        self._hear_refusal(node, frame.refusal)
        self._silent.discard(node)
        if self.view.pushed(node) > self._given_up.get(node, -1):  # a heart that beats is not enough
            self._given_up.pop(node, None)
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
            self._count(node, inlet, frame.share, frame.view[node].state)
        if frame.share is not None or frame.asks:
            self._send(node)
        if frame.asks:  # it has just been started: what it has forgotten is due at once
            self._next_tending = -math.inf

    def _check_view(self, node: int, frame: Frame) -> None:
        """What a frame says of anybody must be signed by whom it is said of."""
        members = self.membership
        if frame.view[node].beats // STARTS != frame.start:
            raise FrameError(f"{frame.view[node].beats} signs of life in its start number {frame.start}")
        for n, presence in enumerate(frame.view):
            name, own = members.names[n], n == members.own
            if not (presence.pushed > self._said_of_own if own else self.view.news(n, presence)):
                continue
            message = presence.message(members.run, name)
            if not members.verify(name, presence.signature, message):
                raise FrameError(f"a sign of life of {name} that {name} has not signed")
            if presence.pushed > self._last and not own:
                words = f"a sign of life in round {presence.pushed}: the last round is {self._last}"
                error = FrameError(words, (message, presence.signature))
                if n == node:
                    raise error
                self._refuse(n, error)  # whoever passes it on has not made it

    def _hear_refusal(self, node: int, why: str) -> None:
        if why and node not in self.refused_by:
            name = self.membership.names[node]
            log.warning("%s refuses this member: it says that it was sent %s", name, _plain(why))
        if why:
            self.refused_by[node] = _plain(why)
        else:
            self.refused_by.pop(node, None)

    def _count(self, node: int, inlet: Inlet, share: Share, state: int) -> None:
        """Add a share to what is held: now, and never again. A final average is added to nothing: it is kept apart, as its sender's
        voice, for the case that this member comes too late to take part in the average."""
        claim, members = share.claim, self.membership
        message = claim.message(members.run, members.names[node], members.name)
        if not members.verify(members.names[node], claim.signature, message):
            raise FrameError("a share that it has not signed")
        if claim.phase == FINAL and state != DONE:
            raise FrameError("a final average before it had finished")
        try:
            self._check_claim(node, inlet, claim, state == LEFT)
            row = self._rows.checked(share)
        except FrameError as error:
            raise FrameError(str(error), (message, claim.signature)) from error
        if claim.phase == FINAL:
            self._voices[node] = row.to(self._rows.dtype)
        else:
            if members.gossip_clip > 0:
                row = self._rows.clipped(row, claim.a, members.gossip_clip)
            if claim.phase == AVERAGING:
                self._rows.saw(node, row, claim)
            self.hold(claim.phase, claim.weight * row, claim.weight * claim.a)
        inlet.counted, inlet.seen, inlet.receipt = claim.number, claim, b""

    def _check_claim(self, node: int, inlet: Inlet, claim: Claim, leaves: bool) -> None:
        """Whether an honest member gives such a part of such a row.

        How far its round is from this member's own is nobody's fault, one of them may have been away: what counts is the plan.
        Only a member that leaves gives all it has. A final average is the last share of a link, with weight and a of 1.
        """
        terms, where = self._terms, f"a share of round {claim.round}"
        handed_over = claim.phase == LEARNING and leaves and claim.weight == 1.0
        first = terms.rounds if claim.phase == AVERAGING else 0
        last = terms.rounds - 1 if claim.phase == LEARNING and not handed_over else self._last
        if not first <= claim.round <= last:
            raise FrameError(f"{where}: the plan has rounds {first} to {last} of this kind")
        if inlet.seen is not None and (claim.order <= inlet.seen.order or inlet.seen.phase == FINAL):
            raise FrameError(f"{where} after one of round {inlet.seen.round}")
        if claim.phase == AVERAGING:
            right = any(math.isclose(claim.weight * (k + 2), 1.0) for k in range(terms.neighbours[node]))
        elif claim.phase == FINAL:
            right = claim.weight == claim.a == 1.0
        else:
            right = claim.weight > 0 and math.isclose(
                claim.weight, terms.weight(claim.round, node, self.membership.own)
            )
        if not right and not handed_over:
            raise FrameError(
                f"{where} of weight {claim.weight:.6g} and a = {claim.a:.6g}, which no honest member gives"
            )
        if claim.a > len(self.membership.names) * (1 + 1e-9):
            raise FrameError(f"{where} with a = {claim.a:.6g}: all members have {len(self.membership.names)}")

    def _check_seen(self, node: int, seen: Claim, receipt: bytes) -> None:
        """A neighbour shows this member's own signature under a row: it must know of having sent that."""
        run, own, name = self.membership.run, self.membership.name, self.membership.names[node]
        signed = self.membership.verify(own, seen.signature, seen.message(run, own, name))
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
        named |= {f"voice/{node}": row for node, row in self._voices.items()}
        return named | {f"letter/{phase}/{r}": each.row for (phase, r), each in self._letters.items()}

    def meta(self) -> dict[str, Any]:
        """Numbers, claims and scalars."""
        return {
            "protocol": PROTOCOL,
            "start": self.start_number,
            "state": self.state,
            "pushed": self.pushed,
            "mass": {str(phase): a for phase, (_, a) in self._home.items()},
            "voices": list(self._voices),
            "finished": {
                str(n): [p.beats, p.pushed, p.signature.hex()] for n, p in self.view.finished().items()
            },
            "letters": [[*key, each.a, each.digest] for key, each in self._letters.items()],
            "digests": [[*key, digest] for key, digest in self._digests.items()],
            "outlets": {str(node): outlet.to_json() for node, outlet in self._outlets.items()},
            "inlets": {str(node): inlet.to_json() for node, inlet in self._inlets.items()},
            "refused": {str(node): why for node, why in self.refused.items()},
            "evidence": {str(n): [part.hex() for part in parts] for n, parts in self.evidence.items()},
        }

    def load(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Take up what `tensors` and `meta` gave, in a new start of the process.

        Raises:
            RunError: they were written by a version whose messages are other ones.
        """
        if meta.get("protocol") != PROTOCOL:
            raise RunError(
                f"the outbox was written with protocol {meta.get('protocol', '1')} and this version has {PROTOCOL}: go on with the "
                "version of dpps that the run was begun with"
            )
        self.refused = {int(node): why for node, why in meta["refused"].items()}
        self.evidence = {
            int(node): (bytes.fromhex(message), bytes.fromhex(signature))
            for node, (message, signature) in meta["evidence"].items()
        }
        self.begin(meta["start"] + 1)
        self.state, self.pushed = meta["state"], meta["pushed"]
        for node, (beats, pushed, signature) in meta["finished"].items():
            self.view.recall(int(node), Presence(beats, pushed, DONE, bytes.fromhex(signature)))
        self._home = {phase: (tensors[f"home/{phase}"], meta["mass"][str(phase)]) for phase in self._home}
        self._voices = {node: tensors[f"voice/{node}"] for node in meta["voices"]}
        self._letters = {}
        for phase, round_, a, digest in meta["letters"]:
            row = tensors[f"letter/{phase}/{round_}"]
            self._letters[phase, round_] = Letter(row, a, digest, self._rows.encode(row))
        self._digests = {(phase, r): digest for phase, r, digest in meta["digests"]}
        self._outlets = {int(node): Outlet.from_json(saved) for node, saved in meta["outlets"].items()}
        self._inlets = {int(node): Inlet.from_json(saved) for node, saved in meta["inlets"].items()}


def _plain(words: str) -> str:
    """A reason as it may be told to others and printed."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in words[:_LONGEST_REASON])
