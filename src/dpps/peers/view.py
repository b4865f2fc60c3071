"""Who is here: what a member has heard of the others, directly or from those in between."""

from collections.abc import Sequence
from dataclasses import replace

from dpps.peers.frames import Presence

HERE, DONE, LEFT, NEAR = 0, 1, 2, 3
"""What a member is doing: taking part; finished, with the average in hand; gone for good,
its mass handed over; taking part, and at the end of its averaging as far as it can see."""
ACTIVE = (HERE, NEAR)
WORDS = {HERE: "here", DONE: "finished", LEFT: "left", NEAR: "here"}

_STARTS = 1 << 32


class View:
    """All members as one of them sees them.

    A member that goes on showing signs of life is here; one of which nothing new was heard for `hard` seconds is away. Signs are
    counted by their owner, so a sign that arrives by a detour, late or twice is told from a new one.

    Args:
        nodes: how many members there are.
        own: which of them this is.
        hard: seconds of silence after which a member is away.
        start: how often this member's process has been started.

    Attributes:
        expelled: members that count no more, whatever is heard of them.
    """

    def __init__(self, nodes: int, own: int, hard: float, start: int) -> None:
        self.own, self.hard = own, hard
        self.expelled: frozenset[int] = frozenset()
        self.known = [Presence(0, -1, HERE) for _ in range(nodes)]
        self._since: list[float | None] = [None] * nodes
        self._told: dict[int, tuple[float, Presence]] = {}
        self.known[own] = Presence(start * _STARTS, -1, HERE)

    def beat(self, pushed: int, state: int) -> tuple[Presence, ...]:
        """A new sign of life of this member's own; everybody, for a frame."""
        own = self.known[self.own]
        self.known[self.own] = Presence(own.beats + 1, pushed, state)
        return tuple(self.known)

    def hear(self, sender: int, told: Sequence[Presence], now: float) -> None:
        """Take in what a frame says: of the sender itself, and what is newer of those whom this member does not hear."""
        of_itself = told[sender]
        if sender not in self._told or of_itself.beats > self._told[sender][1].beats:
            # a member that has forgotten rounds is told of them
            if of_itself.pushed < (earlier := self.pushed(sender)):
                of_itself = replace(of_itself, pushed=earlier)
            self._told[sender] = now, of_itself
            self.known[sender], self._since[sender] = of_itself, now
        for node, presence in enumerate(told):
            heard = node in self._told and now - self._told[node][0] <= self.hard
            if node not in (self.own, sender) and not heard and presence.beats > self.known[node].beats:
                self.known[node], self._since[node] = presence, now

    def age(self, node: int, now: float) -> float | None:
        """Seconds since the last sign of life; None: never heard of."""
        since = self._since[node]
        return None if since is None else now - since

    def is_here(self, node: int, now: float) -> bool:
        """Whether a member takes part, or is finished and still there."""
        if node == self.own:
            return True
        age = self.age(node, now)
        gone = node in self.expelled or self.known[node].state == LEFT
        return age is not None and age <= self.hard and not gone

    def here(self, now: float) -> list[int]:
        """Who is here, this member included."""
        return [node for node in range(len(self.known)) if self.is_here(node, now)]

    def missing(self, now: float) -> list[int]:
        """Who takes part and has fallen silent, though not long enough to count as away."""
        ages = ((node, self.age(node, now)) for node in self.taking_part())
        return [node for node, age in ages if age is not None and self.hard / 2 < age <= self.hard]

    def taking_part(self) -> list[int]:
        """Who has neither finished nor left nor was expelled, as far as is known; this member included."""
        return [n for n, known in enumerate(self.known) if known.state in ACTIVE and n not in self.expelled]

    def pushed(self, node: int) -> int:
        """The last round of which a member has itself said that its shares are out; -1: none."""
        return self._told[node][1].pushed if node in self._told else -1

    def others_round(self, now: float) -> int:
        """The round in which the others are: the (lower) median of what those who are here have said of themselves. Hearsay moves
        nobody, nor does one member among several in touch; a single one in touch is believed. -1: nobody is here."""
        told = sorted(
            presence.pushed
            for node, (when, presence) in self._told.items()
            if now - when <= self.hard and presence.state != LEFT and node not in self.expelled
        )
        return told[(len(told) - 1) // 2] if told else -1
