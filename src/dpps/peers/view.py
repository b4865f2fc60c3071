"""Who is here: what a member has heard of the others, directly or from those in between."""

from collections.abc import Callable, Sequence

from dpps.peers.frames import Presence

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

    Args:
        nodes: how many members there are.
        own: which of them this is.
        hard: seconds of silence after which a member is away.
        start: how often this member's process has been started.
        sign: this member's signature under a presence of its own.

    Attributes:
        known: the newest presence of everybody.
        ignored: members that count no more, whatever is heard of them.
    """

    def __init__(
        self,
        nodes: int,
        own: int,
        hard: float,
        start: int,
        sign: Callable[[Presence], bytes] = lambda presence: b"",
    ) -> None:
        self.own, self.hard, self._sign = own, hard, sign
        self.ignored: frozenset[int] = frozenset()
        self.known = [Presence(0, -1, HERE) for _ in range(nodes)]
        self._farthest = list(self.known)
        self._since: list[float | None] = [None] * nodes
        self.known[own] = Presence(start * STARTS, -1, HERE)

    def beat(self, pushed: int, state: int, to: int | None = None) -> tuple[Presence, ...]:
        """A new sign of life of this member's own; everybody, for a frame.
        The one it goes `to` hears how far it once was: if it has forgotten rounds, it is told of them."""
        unsigned = Presence(self.known[self.own].beats + 1, pushed, state)
        signature = self._sign(unsigned)
        self.known[self.own] = Presence(unsigned.beats, pushed, state, signature)
        return tuple(self._farthest[n] if n == to else each for n, each in enumerate(self.known))

    def news(self, node: int, presence: Presence) -> bool:
        """Whether this says more of another member than is known."""
        return node not in (self.own, *self.ignored) and presence.beats > self.known[node].beats

    def hear(self, told: Sequence[Presence], now: float) -> None:
        """Take in what a frame says, its signatures checked."""
        for node, presence in enumerate(told):
            if self.news(node, presence):
                self.known[node], self._since[node] = presence, now
                if presence.pushed >= self._farthest[node].pushed:
                    self._farthest[node] = presence

    def finished(self) -> dict[int, Presence]:
        """Of the other members, those that have signed that they have finished; for the disk."""
        return {n: known for n, known in enumerate(self.known) if known.state == DONE and n != self.own}

    def recall(self, node: int, presence: Presence) -> None:
        """What an earlier start of this process has heard of a member; whether it is here is another question."""
        self.known[node] = self._farthest[node] = presence

    def age(self, node: int, now: float) -> float | None:
        """Seconds since the last sign of life; None: never heard of."""
        since = self._since[node]
        return None if since is None else now - since

    def is_here(self, node: int, now: float) -> bool:
        """Whether a member takes part, or is finished and still there."""
        if node == self.own:
            return True
        age = self.age(node, now)
        gone = node in self.ignored or self.known[node].state == LEFT
        return age is not None and age <= self.hard and not gone

    def here(self, now: float) -> list[int]:
        """Who is here, this member included."""
        return [node for node in range(len(self.known)) if self.is_here(node, now)]

    def missing(self, now: float) -> list[int]:
        """Who takes part and has fallen silent, though not long enough to count as away."""
        ages = ((node, self.age(node, now)) for node in self.taking_part())
        return [node for node, age in ages if age is not None and self.hard / 2 < age <= self.hard]

    def taking_part(self) -> list[int]:
        """Who has neither finished nor left nor is ignored, as far as is known; this member included."""
        return [n for n, known in enumerate(self.known) if known.state in ACTIVE and n not in self.ignored]

    def pushed(self, node: int) -> int:
        """The last round of which a member has said that its shares are out; -1: none."""
        return self._farthest[node].pushed

    def rounds(self, now: float) -> list[int]:
        """The last rounds of the other members that are here, in order."""
        return sorted(self.pushed(node) for node in self.here(now) if node != self.own)
