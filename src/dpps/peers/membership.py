"""What a member has to know of its federation to take part: names, deadlines, and how signatures are made and checked."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Membership:
    """The contract, as one member's half of the protocol needs it.

    Attributes:
        run: what tells this run from any other; frames of another one are refused.
        names: of all members, node k of the topology being the k-th.
        own: which of them this is.
        sign: this member's signature under a message.
        verify: whether a member (by name) has signed: (name, signature, message).
        active: names of those who may take part; by default all.
        neighbours: names of those whom it talks to; by default all who may take part.
        min_members: the run waits while fewer are there.
        soft: seconds that a round waits for a neighbour.
        hard: seconds of silence after which a member counts as away.
        start: seconds that the first round waits for members who have not come yet.
        gossip_clip: how far (L2) a neighbour's parameters may lie from one's own to count in full; 0: no limit.
    """

    run: str
    names: tuple[str, ...]
    own: int
    sign: Callable[[bytes], bytes]
    verify: Callable[[str, bytes, bytes], bool]
    active: frozenset[str] | None = None
    neighbours: frozenset[str] | None = None
    min_members: int = 2
    soft: float = 30.0
    hard: float = 300.0
    start: float = 3600.0
    gossip_clip: float = 0.0

    @property
    def name(self) -> str:
        """Of this member."""
        return self.names[self.own]

    @property
    def present(self) -> frozenset[str]:
        """Names of those who may take part."""
        return frozenset(self.names) if self.active is None else self.active

    @property
    def partners(self) -> frozenset[str]:
        """Names of those whom this member talks to."""
        found = self.present if self.neighbours is None else self.present & self.neighbours
        return found - {self.name}
