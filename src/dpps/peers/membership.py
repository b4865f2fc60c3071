"""What a member has to know of its federation to take part: names, deadlines, and how signatures are made and checked."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from dpps.topology import Topology, Weights


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


class Terms:
    """What the contract makes of every row and share: each member computes it for itself, and believes nobody else about it.

    Args:
        topology: who sends to whom.
        rounds: of learning.
        reach: how far (L2) clip, rates and noise can take an honest member's parameters from the start in all rounds together;
            infinite: not known.
        clock: the topology's round of a round of learning; by default the same.
    """

    def __init__(
        self,
        topology: Topology,
        rounds: int,
        reach: float = math.inf,
        clock: Callable[[int], int] = lambda round_: round_,
    ) -> None:
        self.topology, self.rounds, self.reach = topology, rounds, reach
        self._clock = clock
        self._given = lru_cache(maxsize=256)(given)

    def weight(self, round_: int, sender: int, receiver: int) -> float:
        """Of the part of its row that one member gives another in a round of learning; 0: none."""
        return self._given(self.topology.weights(self._clock(round_)), sender).get(receiver, 0.0)

    @cached_property
    def neighbours(self) -> list[int]:
        """How many others each member exchanges messages with."""
        linked: list[set[int]] = [set() for _ in range(self.topology.nodes)]
        for t in range(self.topology.examined):
            weights = self.topology.weights(t)
            for one, other in zip(weights.senders.tolist(), weights.receivers.tolist(), strict=True):
                linked[one].add(other)
                linked[other].add(one)
        return [len(others - {node}) for node, others in enumerate(linked)]


def given(weights: Weights, sender: int) -> dict[int, float]:
    """The weights with which one member gives parts of its row to others."""
    mine = (weights.senders == sender) & (weights.receivers != sender)
    return dict(zip(weights.receivers[mine].tolist(), weights.values[mine].tolist(), strict=True))
