"""The control plane: what the processes of a run tell each other beside the rows.

At the start and at resume every process tells a few numbers about itself; a request to stop travels on the rows. Nobody waits
for anybody because of it: who asks says after which round everybody stops, and that is late enough for all to have heard.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from dpps.errors import PeerError
from dpps.topology import Weights
from dpps.transport.wire import SMALL, Message, Wire


class Control(ABC):
    """What one process knows and says beside its rows.

    Attributes:
        rank: of this process.
        processes: how many there are.
        stop_after: the round after which all processes stop; None: nobody has asked, as far as is known here.
    """

    rank: int = 0
    processes: int = 1
    stop_after: int | None = None

    @abstractmethod
    def everybody(self, value: float) -> list[float]:
        """One number of every process, by rank. All processes call it at the same point of the run."""

    @abstractmethod
    def rounds_until_heard(self, rounds: Iterable[Weights | None]) -> int | None:
        """How many of the coming rounds it takes until what this process says on its rows is known to all; None: never.

        Args:
            rounds: the weights of each; None for one in which everybody hears everybody.
        """

    def ask_to_stop(self, after: int) -> None:
        """Let everybody stop after this round. Of several requests the earliest counts, and all hear of it in time."""
        self.stop_after = after if self.stop_after is None else min(after, self.stop_after)


class Alone(Control):
    """Of a run in a single process."""

    def everybody(self, value: float) -> list[float]:
        return [value]

    def rounds_until_heard(self, rounds: Iterable[Weights | None]) -> int:
        return 0


class Between(Control):
    """Of a run in several processes: numbers go straight from each to each.

    Args:
        wire: the connections of this process.
        held: the nodes of each process.
    """

    def __init__(self, wire: Wire, held: Sequence[range]) -> None:
        self._wire, self._blocks = wire, held
        self.rank, self.processes = wire.rank, wire.size

    def everybody(self, value: float) -> list[float]:
        found = torch.full((self.processes,), float(value), dtype=torch.float64, device=self._wire.device)
        own = found[self.rank : self.rank + 1].clone()
        peers = self._wire.peers
        self._wire.exchange(
            [Message(p, SMALL, own) for p in peers], [Message(p, SMALL, found[p : p + 1]) for p in peers]
        )
        numbers: list[float] = found.tolist()
        for rank, number in enumerate(numbers):
            if not math.isfinite(number):
                raise PeerError(f"rank {rank} says {number} where a finite number was expected: refused")
        return numbers

    def rounds_until_heard(self, rounds: Iterable[Weights | None]) -> int | None:
        return rounds_until_heard(rounds, self._blocks, self.rank)


_MOST_ROUNDS = 10_000


def rounds_until_heard(rounds: Iterable[Weights | None], blocks: Sequence[range], rank: int) -> int | None:
    """`Control.rounds_until_heard` where process p holds the nodes `blocks[p]` and a process passes on all that it has heard."""
    holder = np.repeat(np.arange(len(blocks)), [len(block) for block in blocks])
    heard = np.arange(len(blocks)) == rank
    for count, weights in enumerate(rounds):
        if heard.all():
            return count
        if count == _MOST_ROUNDS:
            return None
        if weights is None:
            return count + 1
        told = holder[weights.receivers[heard[holder[weights.senders]]]]
        heard = heard.copy()
        heard[told] = True
    return None
