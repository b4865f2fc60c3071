"""Which noise the next message of one member carries when members come and go: a state machine without input or output.

A round's noise of a member is its own independent noise and its half of the noise of every pair. Three rules make the pair noise
cancel without anybody waiting for anybody (docs/cancelling-noise.md has the proof that they cost no privacy):

- every round's noise enters exactly one message: that of the round, or, for a round that the member missed, its next message;
- a pair's noise of the rounds that a lost partner can never have released is taken back, once, in the next message;
- with that partner nothing is shared in later rounds.

What must survive a crash is `to_json`: it is written together with the message, so a message and its noise exist both or not at all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpps.errors import RunError


@dataclass(frozen=True)
class Part:
    """Noise of one round in a message.

    Attributes:
        round: which noise it is.
        own: whether the independent noise of that round is part of it.
        pairs: (partner, sign) of the pair noise: a pair's first node adds it, the second subtracts it; taking back turns that round.
    """

    round: int
    own: bool
    pairs: tuple[tuple[int, int], ...]


class PairRounds:
    """The noise that one member has given out, and what it still owes.

    Args:
        own: its node.
        partners: the nodes it shares noise with.
        absentees: of how many lost partners noise is taken back; the noise is calibrated for so many (`Pairs`).

    Attributes:
        done: every round before this one has its noise in a message.
        lost: by partner that was removed, the last round that is shared with it.
    """

    def __init__(self, own: int, partners: Sequence[int], absentees: int = 0) -> None:
        self.own, self.partners, self.absentees = own, tuple(partners), absentees
        self.done = 0
        self.lost: dict[int, int] = {}
        self._to_take_back: list[int] = []

    def lose(self, partner: int, last: int) -> bool:
        """A partner was removed that has released nothing after the round `last`, and never will.

        Returns:
            Whether its noise is taken back: not of more partners than `absentees`, and never twice.
        """
        if partner not in self.partners or partner in self.lost or len(self.lost) >= self.absentees:
            return False
        self.lost[partner] = max(last, -1)
        self._to_take_back.append(partner)
        return True

    def owes(self, round_: int) -> bool:
        """Whether a message at the end of this round would carry noise."""
        return self.done <= round_ or any(self.lost[each] + 1 < self.done for each in self._to_take_back)

    def message(self, round_: int) -> list[Part]:
        """The noise of the message of a round: its own, that of all missed rounds, and what is taken back. It is given out with this call.

        Raises:
            RunError: the noise of this round was given out before.
        """
        if round_ < self.done:
            raise RunError(
                f"the pair noise of round {round_} was given out before and must never be under two messages: nothing was sent; "
                "open the run anew, it goes on from what is on disk"
            )
        return self._given_out(round_)

    def last_message(self, round_: int) -> list[Part]:
        """What is owed after the last round, in which nothing may have been missed."""
        return self._given_out(round_)

    def _given_out(self, round_: int) -> list[Part]:
        taken_back = [
            Part(earlier, False, ((partner, -self._sign(partner)),))
            for partner in self._to_take_back
            for earlier in range(self.lost[partner] + 1, self.done)
        ]
        due = [Part(each, True, self._shared(each)) for each in range(self.done, round_ + 1)]
        self._to_take_back, self.done = [], max(self.done, round_ + 1)
        return taken_back + due

    def _shared(self, round_: int) -> tuple[tuple[int, int], ...]:
        with_whom = (each for each in self.partners if self.lost.get(each, round_) >= round_)
        return tuple((each, self._sign(each)) for each in with_whom)

    def _sign(self, partner: int) -> int:
        return 1 if self.own < partner else -1

    def to_json(self) -> dict[str, Any]:
        """For the disk, in the same write as the message."""
        lost = [[partner, last] for partner, last in self.lost.items()]
        return {"done": self.done, "lost": lost, "to_take_back": list(self._to_take_back)}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `to_json` gave."""
        self.done = saved["done"]
        self.lost = dict(saved["lost"])
        self._to_take_back = list(saved["to_take_back"])
