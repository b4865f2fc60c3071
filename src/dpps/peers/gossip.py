"""Push-sum between organisations: each member holds one row, rounds have no barrier, and links lose nothing.

A round pushes parts of the released row to those neighbours that can be reached and goes on with what has
arrived; parts of those who are late count whenever they come. A part that cannot be given stays at home,
so that the mass (the sum of all `a`, those on their way included) is N at all times.
Before anything of a round leaves, `keep` has put the whole state on disk.

Frames come in at any time and in any order; whatever they bring is counted at once into what is *held*, of which the rounds
take and give. Everything that must survive a crash is in `tensors` and `meta`.
"""

import hashlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpps.errors import RunError, UsageError
from dpps.peers.contract import Membership, linked
from dpps.peers.links import (
    ACTIVE,
    AHEAD,
    DONE,
    HERE,
    LEFT,
    NEAR,
    STARTS,
    WORDS,
    Inlet,
    Letter,
    Outlet,
    Reservations,
    Rows,
    Sent,
    Terms,
    View,
    given,
)
from dpps.peers.messages import (
    AVERAGING,
    FINAL,
    LEARNING,
    PROTOCOL,
    Claim,
    Frame,
    FrameError,
    Post,
    Presence,
    Share,
    decode,
)
from dpps.peers.status import Peer
from dpps.topology import Topology
from dpps.transport import Arrived, Exchange, Fabric, Link

log = logging.getLogger(__name__)

TOLERANCE = 1e-6
"""A member goes on averaging until its neighbours are as near as this (L2, relative to the norm of the average)."""
PATIENCE, LONGEST = 10, 200
"""It gives up after so many times the rounds that it takes when nothing fails, or after so many rounds if that is more."""
JUMP = 8
"""Where a single other member is here, its word takes this one on by so many rounds at a time."""
ENOUGH = 0.25
"""Where members share noise, which is not scaled by a, one with less mass than this gives no parts away: noise would drive its
parameters too far. With 0.5, two messages of five stay at home in a bad week, and rows mix too slowly (docs/cancelling-noise.md)."""
_FEWEST, _MOST = 6, 1000
_LARGEST = 400  # members of whom eigenvalues are computed; more of them get the most rounds
_LATELY = 4  # rounds
_VAIN = 4
"""Hard deadlines after which a member that gets nothing from anybody, though they are there, ends the average alone."""
_AT_ONCE = 1000
_NOTICE = 0.5  # seconds after which a new connection is noticed at the latest
_LONGEST_REASON = 300


class Peers(Fabric):
    """The row of one member, and its half of the links to its neighbours.

    Attributes:
        keep: puts the whole state on disk; called with the phase before anything of a push leaves.
        keep_reservations: puts `reservations` on disk, alone: they change while a round is computed.
        start_number: how often this member's process has been started.
        state: what this member is doing: one of those in :mod:`dpps.peers.links`.
        pushed: the last round of which parts were given; -1: none.
        late: whether the average was taken over from neighbours that had finished.
        refused: members whose frames are not accepted any more, and why; for the rest of the run.
        evidence: what a refused member has signed that no honest one does, and its signature, where there is such a thing.
        refused_by: members that refuse this one, and why.
        reservations: of rounds, where members share noise and may be lost; None otherwise.
        counts_late: whether the average at the end is of all that members hold, with its mass, and counts what comes late.
        silenced: why nothing is sent any more, not even a sign of life: what is in memory is not what is on disk.
        lock: held while a frame is made or read; who takes in frames while the member computes takes it in between.
    """

    simulation = False
    meets = False
    _rows: Rows
    _terms: Terms
    _last: int
    """The last round of all, the average included."""

    def __init__(
        self, membership: Membership, post: Post, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.membership, self.post, self.clock = membership, post, clock
        self.rules = membership.rules  # no revision changes them
        self.nodes, self.own, self.rows = len(membership.names), membership.own, [membership.own]
        self.keep: Callable[[int], None] = lambda phase: None
        self.keep_reservations: Callable[[], None] = lambda: None
        self.state, self.pushed, self.late = HERE, -1, False
        self.refused: dict[int, str] = {}
        self.evidence: dict[int, tuple[bytes, bytes]] = {}
        self.refused_by: dict[int, str] = {}
        self.silenced: RunError | None = None
        self.reservations: Reservations | None = None
        self.counts_late = False
        self.lock = threading.RLock()
        # rows: what is held here by phase, what was released, and the average as each neighbour that has finished says
        self._home: dict[int, tuple[Tensor, float]] = {}
        self._letters: dict[tuple[int, int], Letter] = {}
        self._digests: dict[tuple[int, int], str] = {}
        self._finals: dict[int, Tensor] = {}
        # links and connections
        others = [node for node in range(self.nodes) if node != membership.own]
        self._outlets = {node: Outlet() for node in others}
        self._inlets = {node: Inlet() for node in others}
        self._connected: dict[int, int] = {}  # in order, with the number of the newest connection
        self._unheard: set[int] = set()  # connected, and nothing came yet on this connection
        self._greeted: set[int] = set()  # has answered this start
        self._lost: dict[int, float] = {}  # since when a neighbour's connection is gone
        # who is waited for
        self._waiting_for: tuple[int, int, Sequence[int]] | None = None
        self._given_up: dict[int, int] = {}  # with the last round of which it had told by then
        self._silent: set[int] = set()
        self._no_room: set[int] = set()
        self._late: Counter[int] = Counter()
        self._said_of_own = -1
        self._noted: Set[int] = frozenset()
        self._next_tending = self._next_beat = -math.inf
        self.begin(1)

    def begin(self, start_number: int) -> None:
        """Before the first frame: how often this member's process has been started, this time included."""
        self.start_number, members = start_number, self.membership

        def sign(presence: Presence) -> bytes:
            return members.sign(presence.message(members.run, members.name))

        hard = self.rules.hard_deadline
        self.view = View(self.nodes, members.own, hard, start_number, sign, self.reservations)
        self.adopt(members)

    def share_noise(self, colluders: int, absentees: int) -> None:
        """Members share noise that cancels, against so many colluders; so many may be lost. Before the first frame."""
        self.shares_noise = self.counts_late = True
        if absentees:
            self.reservations = Reservations(self.nodes, self.own, colluders, absentees)
        self.begin(self.start_number)

    def adopt(self, membership: Membership) -> None:
        """The contract of a later revision: who was expelled counts no more, nor who is refused."""
        self.membership = membership
        expelled = {n for n, name in enumerate(membership.names) if name not in membership.active}
        self.view.ignored = frozenset(expelled | set(self.refused))
        if self.reservations is not None:
            self.reservations.adopt(membership.revision, expelled)

    # The fabric of a protocol

    def start(self, s: Tensor, common: bool) -> Link:
        self._rows = Rows(s[0], common)
        self._home = {phase: (self._rows.zero(), 0.0) for phase in (LEARNING, AVERAGING)}
        return {}

    def agree(self, terms: Terms) -> None:
        """What the contract makes of every row and share; before the first frame is taken in."""
        self._terms = terms
        self._last = terms.rounds + max(PATIENCE * averaging_rounds(terms.topology), LONGEST)
        self._rows.reach = terms.reach

    def push(self, exchange: Exchange, s: Tensor, a: Tensor, link: Link) -> None:
        if exchange.weights is None or exchange.present is not None:
            raise UsageError(
                "members come and go: a round in which all of them meet, or some are away by plan, needs another fabric"
            )
        if exchange.round <= self.pushed:
            raise RunError(
                f"round {exchange.round} was sent before: nothing was sent again; open the run anew, it goes "
                "on from what is on disk"
            )
        with self.lock:
            self._take_in()
            weights, enough = exchange.weights, not self.shares_noise or float(a[0]) >= ENOUGH
            parts = given(weights, self.own) if enough else {}
            self._await_room(exchange.round, parts)
            sources = weights.senders[
                (weights.receivers == self.own) & (weights.senders != self.own)
            ].tolist()
            self._push(LEARNING, exchange.round, parts, sources, s[0], float(a[0]))

    def gossip(self, steps: Sequence[Exchange], s: Tensor, a: Tensor, link: Link) -> Arrived:
        """A message, and the further rounds in which rows are passed on before the next one: these have numbers of their own, and
        nobody waits longer in them than in others."""
        numbered = [replace(step, round=step.round * len(steps) + k) for k, step in enumerate(steps)]
        return super().gossip(numbered, s, a, link)

    def scaled(self, base: Tensor, message: Tensor, a: Tensor) -> Tensor:
        """Updates scaled by their node's own a, which depends on the network alone: y moves by the update as it was released.
        Rows are public, so this is post-processing. Noise that members share must reach all of them alike, so there
        nothing is scaled."""
        if self.shares_noise:
            return message
        return base + a.to(base)[:, None] * (message - base)

    def collect(self, seconds: float | None = None) -> Arrived:
        with self.lock:
            self._collect(seconds)
            s, a = self.take(LEARNING)
        return Arrived(s[None], torch.tensor([a], dtype=torch.float64), {})

    def mean(self, x: Tensor, present: np.ndarray | None = None) -> Tensor:
        """This member's own estimate: nobody is asked."""
        return x.mean(0)

    def gather(self, v: Tensor) -> Tensor:
        raise UsageError(
            "members come and go, so not all of them can be asked: use the unit record or contribution"
        )

    # What is held here

    def hold(self, phase: int, row: Tensor, a: float) -> None:
        """Add a row to what is held, so that `keep` finds it.

        Nobody can hold more mass than all members have together. If a liar has made some up, its receiver takes the row
        with so much less of it: what it passes on is then what an honest member can have.
        """
        with self.lock:
            held, mass = self._home[phase]
            held, mass, most = held + row.double().cpu(), mass + a, float(self.nodes)
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

    # A round

    def _push(
        self,
        phase: int,
        round_: int,
        wanted: Mapping[int, float],
        sources: Sequence[int],
        row: Tensor,
        a: float,
    ) -> None:
        """Give parts of a row to those who can take them; the rest stays at home."""
        if phase == LEARNING and a > 0:
            self._rows.follow(row / a)
        parts = {node: weight for node, weight in wanted.items() if self._can_take(node, phase, round_)}
        self._give(phase, round_, row, a, parts, 1.0 - sum(parts.values()))
        self._waiting_for = phase, round_, sources

    def _can_take(self, node: int, phase: int, round_: int) -> bool:
        return node in self.partners() and self._outlets[node].ready(phase, round_)

    def _await_room(self, round_: int, parts: Mapping[int, float]) -> None:
        """Wait for those who are to get a part and have not said yet that they have the one before: slow is not gone.
        But who does not say so within the deadline is not waited for again until it has."""
        deadline = self.clock() + self.rules.soft_deadline
        while True:
            ready = {n for n in parts if self._outlets[n].ready(LEARNING, round_)}
            self._no_room -= ready
            slow = set(self.partners()) & set(parts) - ready - self._no_room - set(self._given_up)
            if not slow:
                return
            if self.clock() >= deadline:
                self._no_room |= slow
                self._silent |= slow
                return
            self.wait(deadline - self.clock())

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
        if phase == LEARNING:
            self._reserve(round_ // self._terms.mixes + 1)
        self._keep(phase)
        now = self.clock()
        self._send_due(now)
        for node in self._connected:
            if node not in parts:
                self._send(node)
        self._next_beat = now + self.rules.hard_deadline / 6

    def _forget_letters(self, newest: tuple[int, int]) -> None:
        """Rows that all have are not kept, and digests only of what a neighbour may still show."""
        outlets = self._outlets.values()
        needed = {sent.letter for outlet in outlets for sent in outlet.waiting}
        self._letters = {key: each for key, each in self._letters.items() if key in needed}
        shown = {newest}.union(*(outlet.letters() for outlet in outlets))
        self._digests = {key: digest for key, digest in self._digests.items() if key in shown}

    def _check_silence(self) -> None:
        if self.silenced is not None:
            raise self.silenced

    def _keep(self, phase: int) -> None:
        self.silenced = self.silenced or RunError(
            "the state was not put on disk, so nothing is sent any more: open the run anew"
        )
        self.keep(phase)
        self.silenced = None
        if self.reservations is not None:
            self.reservations.note()
        for inlet in self._inlets.values():
            inlet.kept = inlet.counted

    # Rounds reserved before they are released, where members share noise and may be lost

    def _reserve(self, round_: int) -> None:
        """This round, and a few more."""
        if self.reservations is not None:
            self.reservations.reserve(min(round_ + AHEAD, self._terms.rounds // self._terms.mixes - 1))

    def cleared(self, round_: int) -> bool:
        """Whether a round may be released: enough members have noted that it may be."""
        return self.reservations is None or self.reservations.allowed >= round_

    def reserve(self, round_: int) -> None:
        """Ask the others to note that this round may be released."""
        with self.lock:
            self._reserve(round_)
            self._note_reservations()

    def _note_reservations(self) -> None:
        """Where there is news, put on disk what was reserved, here and by others, and tell everybody. Members that compute do so, too:
        others wait for their word."""
        if self.reservations is not None and self.reservations.news and self.silenced is None:
            self.keep_reservations()
            self.reservations.note()
            self._tell_everybody()

    def lost(self) -> dict[int, int]:
        """By expelled member whose noise may be taken back, a round after which it has released nothing."""
        found: dict[int, int] = {}
        if self.reservations is not None:
            for revision, row in sorted(
                (revision, row) for row, revision in self.membership.expelled_in.items()
            ):
                last = self.reservations.last(row, revision)
                if (
                    last is None
                ):  # later ones wait: of how many noise is taken back is limited, and all take the same
                    break
                found[row] = last
        return found

    def _collect(self, seconds: float | None = None) -> frozenset[int]:
        """Wait for the parts of those who are here, at most until the deadline; who they came from."""
        assert self._waiting_for is not None, "push first"
        (phase, round_, sources), self._waiting_for = self._waiting_for, None
        deadline = self.clock() + (self.rules.soft_deadline if seconds is None else seconds)
        while missing := [node for node in sources if self._awaits(node, round_)]:
            if self.clock() >= deadline:
                self._given_up.update({node: self.view.pushed(node) for node in missing})
                self._silent.update(missing)
                self._late.update(missing)
                break
            self.wait(deadline - self.clock())
        seen = ((n, self._inlets[n].seen) for n in sources)
        came = {n for n, claim in seen if claim is not None and claim.order == (phase, round_)}
        found = frozenset(came | {self.own})
        if phase == LEARNING:
            for node in found:
                self._late.pop(node, None)
        return found

    def _awaits(self, node: int, round_: int) -> bool:
        """Whether a part of this round may still come soon. Who was late again and again, as long as the hard deadline in all, is
        not waited for: in learning until it is on time, in the average no more."""
        if self.view.pushed(node) >= round_ or node in self._given_up:
            return False
        patience = self.rules.hard_deadline / self.rules.soft_deadline
        return node in self.partners() and self._late[node] < patience

    def behind(self, round_: int, mixes: int = 1) -> int:
        """The round to go on with: a member that is more than one round behind the others goes where they are.

        Rounds are those in which something is released, where `mixes` of those in which rows are passed on belong to each.
        Where they are is the (lower) median of what those who are here have signed, so one of them alone takes nobody along; a single
        one is believed for a few rounds at a time.
        """
        rounds = [each // mixes for each in self.view.rounds(self.clock())]
        if not rounds:
            return round_
        others = rounds[(len(rounds) - 1) // 2]
        if len(rounds) == 1:
            others = min(others, round_ + JUMP)
        return others if others > round_ + 1 else round_

    # Who is here

    @property
    def here(self) -> list[str]:
        """Names of the members that are here, this one included."""
        return [self.membership.names[node] for node in self.view.here(self.clock())]

    def partners(self) -> list[int]:
        """Neighbours that take part and can be reached."""
        now, known = self.clock(), self.view.known
        here = (n for n in self._connected if n not in self.refused_by and self.view.is_here(n, now))
        return [n for n in here if known[n].state in ACTIVE]

    def _neighbours(self) -> set[int]:
        """All members that this one talks to, here or not."""
        return {self.membership.names.index(name) for name in self.membership.partners}

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
        return self._neighbours() - set(self.refused) <= self._greeted

    def doubtful(self) -> bool:
        """Whether somebody says that this member has sent more rounds than it knows of, and not all neighbours have answered yet:
        one that did receive them has this member's signature, which decides (`_check_seen`)."""
        return self._said_of_own > self.pushed and not self.answered()

    def status(self) -> list[Peer]:
        """Every member: name, state in words, last round, seconds since it was heard of."""
        now, found = self.clock(), list[Peer]()
        mixes = self._terms.mixes if hasattr(self, "_terms") else 1
        for node, (name, known) in enumerate(zip(self.membership.names, self.view.known, strict=True)):
            age = self.view.age(node, now)
            word = WORDS[known.state] if self.view.is_here(node, now) or known.state == LEFT else "away"
            if word == "here" and now - self._lost.get(node, now) > self.rules.soft_deadline:
                # rounds do not wait for it; whether it comes back is decided at the hard deadline
                word = "away"
            if name not in self.membership.active:
                word = "expelled"
            if node in self.refused:
                word = "refused"
            heard = 0.0 if node == self.own else age if math.isfinite(age) else None
            peer = Peer(name, word, known.pushed // mixes + 1, heard, node in self._connected)
            peer.why = self.refused.get(node) or self.refused_by.get(node, "")
            found.append(peer)
        return found

    # The average at the end

    def average(
        self, row: Tensor, first: int, fewest: int, *, before: Callable[[], None] = lambda: None
    ) -> tuple[Tensor, float | None]:
        """The average of everybody's `row`, by push-sum without noise; for rows made of what was released.

        Where members share noise it cancels in the sum of what they hold, so that is averaged, with its mass, instead of `row`; parts
        of rows that are still on their way count when they come (`counts_late`).

        In every round each member gives equal parts to all neighbours that it can reach,
        whatever the topology's direction: a member that is gone is simply not one of them.

        Args:
            row: this member's own. If it was away when the others began, it gets their average and adds nothing to it; if all that
                it can reach have finished, it gets what they have agreed on (`stay`).
            first: number of the first round, after all rounds of learning.
            fewest: how many rounds it takes if nothing fails.
            before: called before every round.

        It ends when every member that is here says that its neighbours are as near as can be asked for, or after many times the
        rounds that it takes if nothing fails; who is late in them is waited for as long as the hard deadline, in all of them together. A
        member to whom none of its neighbours gives anything ends after four times as long.

        Returns:
            The average, and how far (L2, relative) this member's neighbours were from it when they last told; None if there was
            nobody to average with.
        """
        self.state = HERE
        position, last = max(first, self.pushed + 1), first + max(PATIENCE * fewest, LONGEST)
        # from here on nobody pulls the average farther away than the contract allows, in all rounds together
        self._rows.follow(row)
        self._late.clear()
        vain = 0
        before()
        takes_part = position == first and self._on_time(first, fewest)
        if takes_part and not self.counts_late:
            self.hold(AVERAGING, row, 1.0)
        sums = self.counts_late and (takes_part or position > first)
        while position < last and vain * self.rules.soft_deadline < _VAIN * self.rules.hard_deadline:
            if not takes_part and self._final():
                self.state = HERE
                break
            self.state = NEAR if position >= first + fewest and self._agrees(position) else HERE
            if self.state == NEAR and self._all_near():
                break
            before()
            if not self.partners():
                break
            if sums:
                self.hold(AVERAGING, *self.take(LEARNING))
            z, b = self.take(AVERAGING)
            with self.lock:
                self._take_in()
                reached = [n for n in self.partners() if self._can_take(n, AVERAGING, position)]
                equal = dict.fromkeys(reached, 1 / (len(reached) + 1))
                self._push(AVERAGING, position, equal, self.partners(), z, b)
                if self._collect() == {self.own}:
                    vain = 0 if self._wait_for_mass(self._home[AVERAGING][1]) else vain + 1
            position = max(position + 1, min(self.behind(position + 1), last))
        finals = {} if self.state == NEAR else self._await_final()
        if finals:
            self.late = True
            return self._rows.middle(list(finals.values()), self.rules.gossip_clip)
        z, b = self._home[AVERAGING]
        mean = self._rows.narrow(z / b) if b > 0 else row
        return mean, self._rows.apart(mean, position - fewest)

    def _on_time(self, first: int, fewest: int) -> bool:
        """Whether this member's row can still be part of the average. Without it noise that it shares would not cancel, or what it has
        released not be counted: there it can until somebody has finished."""
        if self.counts_late:
            return not any(presence.state == DONE for presence in self.view.known)
        return self.behind(first) <= first + fewest // 3

    def estimate(self) -> Tensor:
        """The average, as far as this member has got with it; the row of nothing if it has no part in it."""
        z, b = self._home[AVERAGING]
        return self._rows.narrow(z / b if b > 0 else z)

    def _agrees(self, position: int) -> bool:
        """Whether all neighbours have told lately, and are as near as can be asked for; and nobody has just fallen silent."""
        (z, b), now = self._home[AVERAGING], self.clock()
        if b <= 0 or self.view.missing(now) or not self._rows.told(self.partners(), position - _LATELY):
            return False
        apart = self._rows.apart(z / b, position - _LATELY)
        return apart is not None and apart <= TOLERANCE

    def _all_near(self) -> bool:
        """Whether all who are here see no difference to their neighbours any more."""
        return all(self.view.known[node].state in (NEAR, DONE) for node in self.view.here(self.clock()))

    def _wait_for_mass(self, held: float) -> bool:
        """Until there is more than that, or nobody who could give it, at most as long as the soft deadline; whether it was no longer."""

        def done() -> bool:
            return self._home[AVERAGING][1] > held or not self.partners() or self._all_near()

        self._wait_until(done, self.rules.soft_deadline)
        return done()

    def over(self, doubted: bool = False) -> bool:
        """Whether the run has ended without this member: neighbours that can be reached have finished, none of them takes part
        any more, and that is not the word of one alone (`doubted`: it is)."""
        return bool(self._done()) and not self.partners() and self._ended() != doubted

    def ending(self) -> bool:
        """Whether this member has a part in the average, and a neighbour has finished, still here or not."""
        nodes, known = self._neighbours() - self.view.ignored, self.view.known
        return self._home[AVERAGING][1] > 0 and any(known[n].state == DONE for n in nodes)

    def _ended(self) -> bool:
        """Whether two members have signed that they have finished, here or not: one of them may be a liar. Where there is only one
        other member, its word must do."""
        known, gone = self.view.known, {self.own, *self.view.ignored}
        others = [n for n in range(self.nodes) if n not in gone and known[n].state != LEFT]
        return sum(known[n].state == DONE for n in others) >= max(1, min(2, len(others)))

    def _done(self) -> set[int]:
        """Neighbours that can be reached and have finished."""
        known = self.view.known
        return {n for n in self._connected if known[n].state == DONE and n not in self.view.ignored}

    def _final(self) -> dict[int, Tensor]:
        """The final average, as the neighbours say that have finished; nothing before it is sure that the run has ended."""
        if not self._ended():
            return {}
        known, ignored = self.view.known, self.view.ignored
        return {n: row for n, row in self._finals.items() if known[n].state == DONE and n not in ignored}

    def _await_final(self) -> dict[int, Tensor]:
        """The same, when neighbours that can be reached had time to say it: the hard deadline for the first of them, then the soft
        one for the rest."""
        if self._done() and self._ended():
            self._tell_everybody()
            self._wait_until(lambda: bool(self._final()) or not self._done(), self.rules.hard_deadline)
            if self._final():
                self._wait_until(lambda: self._done() <= set(self._final()), self.rules.soft_deadline)
        return self._final()

    # Finishing

    def finish(self) -> None:
        """All is done: put that on disk, and tell the others."""
        with self.lock:
            self._check_silence()
            self.state = DONE
            self._finals.clear()
            self._keep(AVERAGING)
            self._tell_everybody()

    def stay(self, mean: Tensor, *, ended: Callable[[], bool] = lambda: False) -> None:
        """Be there until all neighbours are done, too, at most as long as the hard deadline or until somebody wants this to end, and hand the
        average over to those who come back when it cannot be taken any more."""
        with self.lock:
            deadline = self.clock() + self.rules.hard_deadline
            while self.unfinished() and self.clock() < deadline and not ended():
                self._hand_on_average(mean)
                self.wait(deadline - self.clock())
                self._note_finished()
            self._note_finished()
            arriving = [self._outlets[n] for n in self._connected if self._outlets[n].gave(FINAL)]
            self._wait_until(lambda: not any(each.waiting for each in arriving), self.rules.soft_deadline)
            self._tell_everybody()

    def _note_finished(self) -> None:
        """Put on disk who has signed that it has finished: if this member is started once more, it shows that to latecomers."""
        if (done := self.view.finished()).keys() != self._noted:
            self._check_silence()
            self._keep(FINAL)
            self._noted = done.keys()

    def unfinished(self) -> list[str]:
        """Neighbours that have neither finished nor left, whether they are here or not; but for those who take nothing from this
        member, or it from them."""
        nodes = self._neighbours() - {*self.refused, *self.refused_by}
        return sorted(self.membership.names[n] for n in nodes if self.view.known[n].state in ACTIVE)

    def _hand_on_average(self, mean: Tensor) -> None:
        """Once to every neighbour; who is still averaging, and sees no difference to its neighbours, needs nothing."""
        round_, known = max(self.pushed, 0), self.view.known
        late = [n for n in self.partners() if known[n].state == HERE and n not in self._unheard]
        able = [n for n in late if not self._outlets[n].gave(FINAL) and self._can_take(n, FINAL, round_)]
        if able:
            self._give(FINAL, round_, mean, 1.0, dict.fromkeys(able, 1.0), 0.0)

    # Leaving

    def hand_over(self, row: Tensor, a: float, round_: int) -> list[str]:
        """Leave: tell everybody, then give all mass to a neighbour and wait until it is safe there.
        Returns its name if it has not said so."""
        with self.lock:
            self.state = LEFT
            self._tell_everybody()
            # parts that are on their way here still count
            self._wait_until(lambda: False, self.rules.soft_deadline)
            self.hold(LEARNING, row, a)
            self._wait_until(lambda: bool(self._heirs(round_)), self.rules.hard_deadline)
            if not self._bequeath(round_):
                self.state = HERE
                raise RunError(
                    "no neighbour can be reached to hand over to: nothing was given away; give the same dpps federation join again, and ask again when "
                    "one is connected"
                )
            return self._safe()

    def hand_on(self) -> list[str]:
        """The same in a new start of a member that was stopped while it left."""
        with self.lock:
            unsure = self._safe()
            self._wait_until(lambda: False, self.rules.soft_deadline)
            return self._safe() if not unsure and self._bequeath(self.pushed + 1) else unsure

    def _bequeath(self, round_: int) -> bool:
        """Give all that is held to a neighbour."""
        heirs = self._heirs(round_)
        if not heirs or not self._home[LEARNING][1]:
            return False
        row, a = self.take(LEARNING)
        self._give(LEARNING, round_, row, a, {heirs[0]: 1.0}, 0.0)
        return True

    def _heirs(self, round_: int) -> list[int]:
        return [n for n in self.partners() if self._can_take(n, LEARNING, round_)]

    def _safe(self) -> list[str]:
        """Wait until all that was given is safe, as long as the hard deadline; the name of who has not said so of the last row,
        with which all mass was handed over."""
        outlets = self._outlets
        self._wait_until(lambda: not any(each.waiting for each in outlets.values()), self.rules.hard_deadline)
        self._tell_everybody()
        last = LEARNING, self.pushed
        unsure = [n for n, each in outlets.items() if any(sent.letter == last for sent in each.waiting)]
        if not unsure:
            self._keep(LEARNING)  # the next start has nothing to do any more
        return [self.membership.names[node] for node in unsure]

    # Frames go out

    def wait(self, seconds: float) -> None:
        """Do what is due, and take in what arrives within so many seconds, or sooner (at most one frame)."""
        with self.lock:
            now = self.clock()
            self._tend(now)
            if found := self.post.receive(max(0.0, min(seconds, self._next_tending - now, _NOTICE))):
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
        """All frames that are here already, but so many that whoever floods this member does not stop it."""
        self._tend(self.clock())
        for found in islice(iter(lambda: self.post.receive(0.0), None), _AT_ONCE):
            self._handle(*found)

    def _tend(self, now: float) -> None:
        """Greet who is newly connected, send again what is due, show a sign of life."""
        partners, names = self.post.connected() & self.membership.partners, enumerate(self.membership.names)
        before, connected = (
            self._connected,
            {n: self.post.connection(name) for n, name in names if name in partners},
        )
        fresh = {node for node, number in connected.items() if before.get(node) != number}
        lost = self._lost | dict.fromkeys(before.keys() - connected.keys(), now)
        self._lost = {node: since for node, since in lost.items() if node not in connected}
        self._connected = connected
        self._unheard = (self._unheard | fresh) & connected.keys()
        for node in sorted(fresh):
            for sent in self._outlets[node].waiting:
                sent.at_once()
            self._send(node)
        if now >= self._next_tending or fresh:
            self._note_reservations()
            self._send_due(now)
            for node in sorted(
                connected.keys() - fresh - (self._greeted - self._unheard) - set(self.refused)
            ):
                self._send(node)  # it has not answered yet
            self._next_tending = now + min(self.rules.soft_deadline / 3, self.rules.hard_deadline / 6)
        if now >= self._next_beat:
            self._tell_everybody()
            self._next_beat = now + self.rules.hard_deadline / 6

    def _tell_everybody(self) -> None:
        for node in self._connected:
            self._send(node)

    def _send_due(self, now: float) -> None:
        """Shares that are due, but for those to who was not heard yet on this connection: it may have a signature that shows that
        this machine was put back to an earlier state, and what waits here is not what was sent then."""
        soft, hard = self.rules.soft_deadline, self.rules.hard_deadline
        for node in sorted(self._connected.keys() - self._unheard):
            if node not in self.refused:
                for sent in self._outlets[node].due(now, soft / 3, hard):
                    self._send(node, sent)

    def _send(self, node: int, sent: Sent | None = None) -> None:
        """A frame: how far this member is, a signed receipt for what has come last, and a share if there is one to send."""
        if self.silenced is not None:
            return
        inlet, share, members = self._inlets[node], None, self.membership
        run, name, other = members.run, members.name, members.names[node]
        if sent is not None:
            letter = self._letters[sent.letter]
            sent.signature = sent.signature or members.sign(sent.claim(letter).message(run, name, other))
            share = Share(sent.claim(letter), letter.data)
        if inlet.seen is not None and not inlet.receipt:
            inlet.receipt = members.sign(inlet.seen.receipt(run, other, name))
        data = Frame(
            run=run,
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
        self.post.send(other, data)

    # Frames come in

    def _handle(self, name: str, data: bytes) -> None:
        if name not in self.membership.partners:
            return
        node = self.membership.names.index(name)
        if node in self.refused:
            return
        try:
            self._hear(node, decode(data, self.membership.run, self.nodes, self._rows.size))
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
        self._said_of_own = max(self._said_of_own, frame.view[self.own].pushed)
        if self.shares_noise and self._said_of_own > self.pushed:
            self.silenced = self._older_copy(node, self._said_of_own)
            raise self.silenced
        why = _plain(frame.refusal)
        if why and node not in self.refused_by:
            name = self.membership.names[node]
            log.warning("%s refuses this member: it says that it was sent %s", name, why)
        if why:
            self.refused_by[node] = why
        else:
            self.refused_by.pop(node, None)
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
        if (
            frame.share is not None and frame.share.claim.number == inlet.counted + 1
        ):  # others were counted, or come again
            self._count(node, inlet, frame.share, frame.view[node].state)
        if frame.share is not None or frame.asks:
            self._send(node)
        if frame.asks:  # it has just been started: what it has forgotten is due at once
            self._next_tending = -math.inf

    def _count(self, node: int, inlet: Inlet, share: Share, state: int) -> None:
        """Add a share to what is held: now, and never again. A final average is added to nothing: it is kept apart, for the case
        that this member comes too late to take part in the average."""
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
            self._finals[node] = row.to(self._rows.dtype)
        else:
            if self.rules.gossip_clip > 0:
                row = self._rows.clipped(row, claim.a, self.rules.gossip_clip)
            if claim.phase == AVERAGING:
                self._rows.saw(node, row, claim)
            self.hold(claim.phase, claim.weight * row, claim.weight * claim.a)
        inlet.counted, inlet.seen, inlet.receipt = claim.number, claim, b""

    # What is not believed

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
            weight = terms.weight(claim.round, node, self.own) if not handed_over else 1.0
            right = claim.weight > 0 and math.isclose(claim.weight, weight)
        if not right:
            raise FrameError(
                f"{where} of weight {claim.weight:.6g} and a = {claim.a:.6g}, which no honest member gives"
            )
        if claim.a > self.nodes * (1 + 1e-9):
            raise FrameError(f"{where} with a = {claim.a:.6g}: all members have {self.nodes}")

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
            self.silenced = self._older_copy(node, seen.round)
            raise self.silenced

    def _older_copy(self, node: int, round_: int) -> RunError:
        """The refusal to go on: a neighbour has this member's signature under what is not on its disk."""
        stands = f"the run stands after round {self.pushed}" if round_ > self.pushed else "it is another"
        return RunError(
            f"{self.membership.names[node]} has this member's signed message of round {round_}, and on this disk {stands}: ledger and "
            "outbox were replaced by an older copy or begun anew, so what was spent is not known; restore them, or leave this run; "
            "nothing more was sent"
        )

    # To and from disk

    def tensors(self) -> dict[str, Tensor]:
        """Everything of this member's half of the links that changes, but for what is in `meta`."""
        named = {f"home/{phase}": row for phase, (row, _) in self._home.items()}
        named |= {f"voice/{node}": row for node, row in self._finals.items()}
        return named | {f"letter/{phase}/{r}": each.row for (phase, r), each in self._letters.items()}

    def meta(self) -> dict[str, Any]:
        """Numbers, claims and scalars."""
        return {
            "protocol": PROTOCOL,
            "start": self.start_number,
            "state": self.state,
            "pushed": self.pushed,
            "mass": {str(phase): a for phase, (_, a) in self._home.items()},
            "voices": list(self._finals),
            "finished": {str(n): presence.to_json() for n, presence in self.view.finished().items()},
            "letters": [[*key, each.a, each.digest] for key, each in self._letters.items()],
            "digests": [[*key, digest] for key, digest in self._digests.items()],
            "outlets": {str(node): outlet.to_json() for node, outlet in self._outlets.items()},
            "inlets": {str(node): inlet.to_json() for node, inlet in self._inlets.items()},
            "refused": {str(node): why for node, why in self.refused.items()},
            "evidence": {str(n): [part.hex() for part in parts] for n, parts in self.evidence.items()},
            "reservations": None if self.reservations is None else self.reservations.to_json(),
        }

    def load(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Take up what `tensors` and `meta` gave, in a new start of the process. RunError: they were written by a version whose
        messages are other ones."""
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
        for node, presence in meta["finished"].items():
            self.view.recall(int(node), Presence.from_json(presence, self.nodes))
        if self.reservations is not None:
            self.reservations.load(meta["reservations"])
        self._home = {phase: (tensors[f"home/{phase}"], meta["mass"][str(phase)]) for phase in self._home}
        self._finals = {node: tensors[f"voice/{node}"] for node in meta["voices"]}
        self._letters = {}
        for phase, round_, a, digest in meta["letters"]:
            row = tensors[f"letter/{phase}/{round_}"]
            self._letters[phase, round_] = Letter(row, a, digest, self._rows.encode(row))
        self._digests = {(phase, r): digest for phase, r, digest in meta["digests"]}
        self._outlets = {int(node): Outlet.from_json(saved) for node, saved in meta["outlets"].items()}
        self._inlets = {int(node): Inlet.from_json(saved) for node, saved in meta["inlets"].items()}


def averaging_rounds(topology: Topology) -> int:
    """Rounds in which every member gives equal parts to all its neighbours until differences have shrunk by `TOLERANCE`."""
    n = topology.nodes
    if n > _LARGEST:
        return _MOST
    graph = np.eye(n, dtype=bool)
    for i, j in linked(topology):
        graph[i, j] = graph[j, i] = True
    second = float(np.sort(np.abs(np.linalg.eigvals(graph / graph.sum(0))))[-2])
    if second < 1e-9:
        return _FEWEST
    return min(_MOST, max(_FEWEST, math.ceil(math.log(TOLERANCE) / math.log(second))))


def _plain(words: str) -> str:
    """A reason as it may be told to others and printed."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in words[:_LONGEST_REASON])
