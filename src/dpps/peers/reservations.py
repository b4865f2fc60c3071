"""Which rounds a member can have released: needed before noise that was shared with a lost member is taken back.

Taking back reveals what hides the lost member's messages, so it may touch only rounds that this member has never released and
never will. Nobody can ask it, and those who say that they have nothing of it may lie. So a member *reserves* rounds before it
releases them: its signed signs of life name the last round that it has reserved, everybody notes that on disk and repeats it in
signs of life of its own, and a member releases a round only when `quorum` others have repeated a reservation that covers it.

A member that adopts a revision without the lost one notes no further reservation of it. When so many have signed that they are
at this revision that any `quorum` of the others has more of them than there can be liars, one honest member is in both: the
largest reservation among those is not below any round that the lost member has released, whoever cut it off from whom.

There is no input or output here; :mod:`dpps.peers.gossip` puts it on the wire and on disk.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Any

from dpps.errors import RunError, UsageError

AHEAD = 4
"""A member reserves so many rounds beyond the one that it is in, so that no round waits for the others' answers."""


def quorum(members: int, colluders: int, absentees: int) -> int:
    """How many others must have noted a reservation before a round is released.

    At least C + A, so that those who are left when A are lost can say what a lost one has released; at most N - 1 - A, so that a
    member can go on without them. In between, the middle.

    Raises:
        UsageError: there is no such number.
    """
    least, most = colluders + absentees, members - 1 - absentees
    if least > most:
        raise UsageError(
            f"--colluders {colluders} and --absentees {absentees} with {members} members: C + 2 A must be {members - 1} or less, "
            "so that enough members are left to say what a lost one has sent; use fewer"
        )
    return max(1, least, min(most, (members - 1 + colluders) // 2))


class Reservations:
    """What one member has reserved, and what it knows of the others.

    Attributes:
        known: the last round that each member has reserved, as far as was heard here. It never grows for a member that is expelled in
            the adopted revision.
        revision: of the contract, as adopted.
        kept: what was known when it was last put on disk: what this member signs.
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
        """A later revision, without these members."""
        self.revision, self._gone = max(revision, self.revision), self._gone | gone

    def reserve(self, last: int) -> None:
        """This member may release rounds up to this one, when enough others have noted it."""
        self.known[self.own] = max(self.known[self.own], last)

    def hear(self, member: int, revision: int, kept: Sequence[int]) -> None:
        """The newest that another member has signed."""
        if member not in self._gone:
            self._said[member] = revision, tuple(kept)
            self.known[member] = max(self.known[member], kept[member])

    @property
    def news(self) -> bool:
        """Whether something was heard, reserved or adopted that is not on disk."""
        return (tuple(self.known), self.revision) != (self.kept, self.kept_revision)

    def note(self) -> None:
        """What is known is on disk."""
        self.kept, self.kept_revision = tuple(self.known), self.revision

    @property
    def allowed(self) -> int:
        """The last round that this member may release; -1: none."""
        noted = sorted((kept[self.own] for _, kept in self._said.values()), reverse=True)
        return min(noted[self.quorum - 1], self.kept[self.own]) if len(noted) >= self.quorum else -1

    def last(self, lost: int, removed_in: int) -> int | None:
        """A round after which a member, expelled in this revision, has released nothing and never will; None: not known yet."""
        told = [
            kept[lost]
            for member, (revision, kept) in self._said.items()
            if revision >= removed_in and member != lost
        ]
        if self.kept_revision >= removed_in:
            told.append(self.kept[lost])
        return max(told) if len(told) + self.quorum >= self.members + self.colluders else None

    def to_json(self) -> dict[str, Any]:
        """For the disk; `note` when it is there."""
        return {"known": list(self.known), "revision": self.revision}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `to_json` gave: the larger of this and what is known.

        Raises:
            RunError: the contract that is used now is older than the one that was adopted then.
        """
        if saved["revision"] > self.revision:
            raise RunError(
                f"the run has adopted revision {saved['revision']} of the federation file and this is {self.revision}: give the newest file"
            )
        self.known = [max(both) for both in zip(self.known, saved["known"], strict=True)]
        self.note()
