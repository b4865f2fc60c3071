"""One row here, the others at other organisations: push-sum without a barrier, over links that lose nothing.

A round pushes parts of the released row to those neighbours that can be reached and goes on with what has
arrived; parts of those who are late count whenever they come. A part that cannot be given stays at home,
so that the mass (the sum of all `a`, those on their way included) is N at all times.
Before anything of a round leaves, `keep` has put the whole state on disk.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from dpps.errors import RunError, UsageError
from dpps.peers.correspondence import Correspondence
from dpps.peers.frames import AVERAGING, FINAL, LEARNING
from dpps.peers.membership import Membership, Terms, given
from dpps.peers.post import Post
from dpps.peers.rows import Rows
from dpps.peers.view import ACTIVE, DONE, HERE, LEFT, NEAR
from dpps.topology import Topology, Weights
from dpps.transport import Alone, Arrived, Exchange, Fabric, Link

TOLERANCE = 1e-6
"""A member goes on averaging until its neighbours are as near as this (L2, relative to the norm of the average)."""
PATIENCE, LONGEST = 10, 200
"""It gives up after so many times the rounds that it takes when nothing fails, or after so many rounds if that is more."""
_FEWEST, _MOST = 6, 1000
_LARGEST = 400  # members of whom eigenvalues are computed; more of them get the most rounds
_LATELY = 4  # rounds
_VAIN = 4
"""Hard deadlines after which a member that gets nothing from anybody, though they are there, ends the average alone."""
JUMP = 8
"""Where a single other member is here, its word takes this one on by so many rounds at a time."""


class Peers(Correspondence, Fabric):
    """The row of one member, and its neighbours.

    Args:
        membership: the contract.
        post: carries frames to the others.
        clock: seconds, of any origin.
    """

    simulation = False
    meets = False

    def __init__(
        self, membership: Membership, post: Post, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(membership, post, clock)
        self.nodes, self.rows = len(membership.names), [membership.own]
        self.control = Alone()  # nobody stops the others: a member that stops is away
        self.late = False
        """Whether the average was taken over from neighbours that had finished."""
        self._noted: Set[int] = frozenset()
        self._waiting_for: tuple[int, int, Sequence[int]] | None = None
        self._columns = lru_cache(maxsize=64)(given)
        self._no_room: set[int] = set()
        self._late: Counter[int] = Counter()
        self._sources = lru_cache(maxsize=64)(self._row)

    # The fabric of a protocol

    def start(self, s: Tensor, common: bool) -> Link:
        self._prepare(Rows(s[0], common))
        return {}

    def agree(self, terms: Terms) -> None:
        """What the contract makes of every row and share; before the first frame is taken in."""
        self._terms = terms
        self._last = terms.rounds + max(PATIENCE * averaging_rounds(terms.topology), LONGEST)
        self._rows.bound(terms.reach)

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
            parts = self._columns(exchange.weights, self.membership.own)
            self._await_room(exchange.round, parts)
            self._push(LEARNING, exchange.round, parts, self._sources(exchange.weights), s[0], float(a[0]))

    def scaled(self, base: Tensor, message: Tensor, a: Tensor) -> Tensor:
        """Updates scaled by their node's own a, which depends on the network alone: y moves by the update as it was released.
        Rows are public, so this is post-processing."""
        return base + a.to(base)[:, None] * (message - base)

    def collect(self, seconds: float | None = None) -> Arrived:
        with self.lock:
            took_part = self._collect(seconds)
            s, a = self.take(LEARNING)
        return Arrived(s[None], torch.tensor([a], dtype=torch.float64), {}, took_part)

    def mean(self, x: Tensor, present: np.ndarray | None = None) -> Tensor:
        """This member's own estimate: nobody is asked."""
        return x.mean(0)

    def gather(self, v: Tensor) -> Tensor:
        raise UsageError(
            "members come and go, so not all of them can be asked: use the unit record or contribution"
        )

    # A round

    def _push(
        self,
        phase: int,
        round_: int,
        given: Mapping[int, float],
        sources: Sequence[int],
        row: Tensor,
        a: float,
    ) -> None:
        """Give parts of a row to those who can take them; the rest stays at home."""
        if phase == LEARNING and a > 0:
            self._rows.follow(row / a)
        now = self.clock()
        parts = {node: weight for node, weight in given.items() if self._can_take(node, phase, round_, now)}
        self._give(phase, round_, row, a, parts, 1.0 - sum(parts.values()))
        self._waiting_for = phase, round_, sources

    def _await_room(self, round_: int, parts: Mapping[int, float]) -> None:
        """Wait for those who are to get a part and have not said yet that they have the one before: slow is not gone.
        But who does not say so within the deadline is not waited for again until it has."""
        deadline = self.clock() + self.membership.soft
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

    def _collect(self, seconds: float | None = None) -> frozenset[int]:
        """Wait for the parts of those who are here, at most until the deadline; who they came from."""
        assert self._waiting_for is not None, "push first"
        (phase, round_, sources), self._waiting_for = self._waiting_for, None
        deadline = self.clock() + (self.membership.soft if seconds is None else seconds)
        while missing := [node for node in sources if self._awaits(node, round_)]:
            if self.clock() >= deadline:
                self._given_up.update({node: self.view.pushed(node) for node in missing})
                self._silent.update(missing)
                self._late.update(missing)
                break
            self.wait(deadline - self.clock())
        seen = {n: self._inlets[n].seen for n in sources}
        came = (n for n, claim in seen.items() if claim is not None and claim.order == (phase, round_))
        found = frozenset(came) | {self.membership.own}
        if phase == LEARNING:
            for node in found:
                self._late.pop(node, None)
        return found

    def _awaits(self, node: int, round_: int) -> bool:
        """Whether a part of this round may still come soon. Who was late again and again, as long as the hard deadline in all, is
        not waited for: in learning until it is on time, in the average no more."""
        if self.view.pushed(node) >= round_ or node in self._given_up:
            return False
        patience = self.membership.hard / self.membership.soft
        return node in self.partners() and self._late[node] < patience

    def _row(self, weights: Weights) -> list[int]:
        first, last = weights.indptr[self.membership.own : self.membership.own + 2]
        return [n for n in weights.senders[first:last].tolist() if n != self.membership.own]

    # The average at the end, and leaving

    def average(
        self, row: Tensor, first: int, fewest: int, *, before: Callable[[], None] = lambda: None
    ) -> tuple[Tensor, float | None]:
        """The average of everybody's `row`, by push-sum without noise; for rows made of what was released.

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
        takes_part = position == first and self.behind(first) <= first + fewest // 3
        if takes_part:
            self.hold(AVERAGING, row, 1.0)
        while position < last and vain * self.membership.soft < _VAIN * self.membership.hard:
            if not takes_part and self._final():
                self.state = HERE
                break
            self.state = NEAR if position >= first + fewest and self._agrees(position) else HERE
            if self.state == NEAR and self._all_near():
                break
            before()
            if not self.partners():
                break
            z, b = self.take(AVERAGING)
            with self.lock:
                self._take_in()
                reached = [n for n in self.partners() if self._can_take(n, AVERAGING, position, self.clock())]
                equal = dict.fromkeys(reached, 1 / (len(reached) + 1))
                self._push(AVERAGING, position, equal, self.partners(), z, b)
                if self._collect() == {self.membership.own}:
                    vain = 0 if self._wait_for_mass(self._home[AVERAGING][1]) else vain + 1
            position = max(position + 1, min(self.behind(position + 1), last))
        voices = {} if self.state == NEAR else self._await_final()
        if voices:
            self.late = True
            return self._rows.middle(list(voices.values()), self.membership.gossip_clip)
        z, b = self._home[AVERAGING]
        mean = self._rows.narrow(z / b) if b > 0 else row
        return mean, self._rows.apart(mean, position - fewest)

    def over(self) -> bool:
        """Whether the run has ended without this member: neighbours that can be reached have finished, none of them takes part
        any more, and that is not the word of one alone."""
        return bool(self._done()) and not self.partners() and self._ended()

    def doubted(self) -> bool:
        """Whether that is the word of one alone."""
        return bool(self._done()) and not self.partners() and not self._ended()

    def ending(self) -> bool:
        """Whether this member has a part in the average, and a neighbour has finished, still here or not."""
        known, names = self.view.known, self.membership.names
        nodes = {names.index(name) for name in self.membership.partners} - self.view.ignored
        return self._home[AVERAGING][1] > 0 and any(known[n].state == DONE for n in nodes)

    def _ended(self) -> bool:
        """Whether two members have signed that they have finished, here or not: one of them may be a liar. Where there is only one
        other member, its word must do."""
        known, gone = self.view.known, {self.membership.own, *self.view.ignored}
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
        return {n: row for n, row in self._voices.items() if known[n].state == DONE and n not in ignored}

    def _await_final(self) -> dict[int, Tensor]:
        """The same, when neighbours that can be reached had time to say it: the hard deadline for the first of them, then the soft
        one for the rest."""
        if self._done() and self._ended():
            self._tell_everybody()
            self._wait_until(lambda: bool(self._final()) or not self._done(), self.membership.hard)
            if self._final():
                self._wait_until(lambda: self._done() <= set(self._final()), self.membership.soft)
        return self._final()

    def _wait_for_mass(self, held: float) -> bool:
        """Until there is more than that, or nobody who could give it, at most as long as the soft deadline; whether it was no longer."""

        def done() -> bool:
            return self._home[AVERAGING][1] > held or not self.partners() or self._all_near()

        self._wait_until(done, self.membership.soft)
        return done()

    def _all_near(self) -> bool:
        """Whether all who are here see no difference to their neighbours any more."""
        return all(self.view.known[node].state in (NEAR, DONE) for node in self.view.here(self.clock()))

    def _agrees(self, position: int) -> bool:
        """Whether all neighbours have told lately, and are as near as can be asked for; and nobody has just fallen silent."""
        (z, b), now = self._home[AVERAGING], self.clock()
        if b <= 0 or self.view.missing(now) or not self._rows.told(self.partners(), position - _LATELY):
            return False
        apart = self._rows.apart(z / b, position - _LATELY)
        return apart is not None and apart <= TOLERANCE

    def behind(self, round_: int) -> int:
        """The round to go on with: a member that is more than one round behind the others goes where they are.

        Where they are is the (lower) median of what those who are here have signed, so one of them alone takes nobody along; a single
        one is believed for a few rounds at a time.
        """
        rounds = self.view.rounds(self.clock())
        if not rounds:
            return round_
        others = rounds[(len(rounds) - 1) // 2]
        if len(rounds) == 1:
            others = min(others, round_ + JUMP)
        return others if others > round_ + 1 else round_

    def hand_over(self, row: Tensor, a: float, round_: int) -> list[str]:
        """Leave: tell everybody, then give all mass to a neighbour and wait until it is safe there.
        Returns its name if it has not said so."""
        with self.lock:
            self.state = LEFT
            self._tell_everybody()
            # parts that are on their way here still count
            self._wait_until(lambda: False, self.membership.soft)
            self.hold(LEARNING, row, a)
            self._wait_until(lambda: bool(self._heirs(round_)), self.membership.hard)
            if not self._bequeath(round_):
                self.state = HERE
                raise RunError(
                    "no neighbour can be reached to hand over to: nothing was given away; give the same dpps join again, and ask again when "
                    "one is connected"
                )
            return self._safe()

    def hand_on(self) -> list[str]:
        """The same in a new start of a member that was stopped while it left."""
        with self.lock:
            unsure = self._safe()
            self._wait_until(lambda: False, self.membership.soft)
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
        return [n for n in sorted(self._connected) if self._can_take(n, LEARNING, round_, self.clock())]

    def _safe(self) -> list[str]:
        """Wait until all that was given is safe, as long as the hard deadline; the name of who has not said so of the last row,
        with which all mass was handed over."""
        outlets = self._outlets
        self._wait_until(lambda: not any(each.waiting for each in outlets.values()), self.membership.hard)
        self._tell_everybody()
        last = LEARNING, self.pushed
        unsure = [n for n, each in outlets.items() if any(sent.letter == last for sent in each.waiting)]
        if not unsure:
            self._keep(LEARNING)  # the next start has nothing to do any more
        return [self.membership.names[node] for node in unsure]

    def finish(self) -> None:
        """All is done: put that on disk, and tell the others."""
        with self.lock:
            self._check_silence()
            self.state = DONE
            self._voices.clear()
            self._keep(AVERAGING)
            self._tell_everybody()

    def stay(self, mean: Tensor, *, ended: Callable[[], bool] = lambda: False) -> None:
        """Be there until all neighbours are done, too, at most as long as the hard deadline, and hand the average over to those
        who come back when it cannot be taken any more.

        Args:
            mean: the average.
            ended: whether somebody wants this to end.
        """
        with self.lock:
            deadline = self.clock() + self.membership.hard
            while self.unfinished() and self.clock() < deadline and not ended():
                self._hand_on_average(mean)
                self.wait(deadline - self.clock())
                self._note_finished()
            self._note_finished()
            arriving = [self._outlets[n] for n in self._connected if self._outlets[n].gave(FINAL)]
            self._wait_until(lambda: not any(each.waiting for each in arriving), self.membership.soft)
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
        nodes = {name: self.membership.names.index(name) for name in self.membership.partners}
        known, refused = self.view.known, {*self.refused, *self.refused_by}
        return sorted(name for name, n in nodes.items() if known[n].state in ACTIVE and n not in refused)

    def _hand_on_average(self, mean: Tensor) -> None:
        """Once to every neighbour; who is still averaging, and sees no difference to its neighbours, needs nothing."""
        round_, now, known = max(self.pushed, 0), self.clock(), self.view.known
        late = [n for n in self.partners() if known[n].state == HERE and n not in self._unheard]
        able = [n for n in late if not self._outlets[n].gave(FINAL) and self._can_take(n, FINAL, round_, now)]
        if able:
            self._give(FINAL, round_, mean, 1.0, dict.fromkeys(able, 1.0), 0.0)


def averaging_rounds(topology: Topology) -> int:
    """Rounds in which every member gives equal parts to all its neighbours until differences have shrunk by `TOLERANCE`."""
    n = topology.nodes
    if n > _LARGEST:
        return _MOST
    linked = np.eye(n, dtype=bool)
    for t in range(topology.examined):
        weights = topology.weights(t)
        linked[weights.receivers, weights.senders] = linked[weights.senders, weights.receivers] = True
    sizes = np.sort(np.abs(np.linalg.eigvals(linked / linked.sum(0))))
    second = float(sizes[-2])
    if second < 1e-9:
        return _FEWEST
    return min(_MOST, max(_FEWEST, math.ceil(math.log(TOLERANCE) / math.log(second))))
