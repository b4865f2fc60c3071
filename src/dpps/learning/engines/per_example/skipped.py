"""Examples that count as nothing: told to the node's own operator, and to nobody else."""

import logging
from collections import Counter

from dpps.learning.engines.calling import in_short

_log = logging.getLogger(__name__)

NOT_FINITE = "their gradient is not finite"


class Skipped:
    """How many examples were left out and why.

    A line goes to the log when a reason is met first, and again whenever ten times as many examples have met it. It names what
    the last error said, which may be about the data: the log is the node's own and is not sent.
    """

    def __init__(self) -> None:
        self.drawn = 0
        """Examples so far; one that is drawn in two rounds counts twice."""
        self.counts: Counter[str] = Counter()
        """How many were left out, by the kind of reason."""
        self._told: dict[str, int] = {}
        self._words: dict[str, str] = {}
        self._new: list[tuple[str, str, int]] = []  # appended to by several threads, read by one

    def failed(self, error: Exception) -> None:
        """The model, or its backward pass, raised something for one example."""
        kind = type(error).__name__
        self._new.append((kind, f"the model fails on them ({kind}: {in_short(error)})", 1))

    def not_finite(self, count: int) -> None:
        """So many gradients were not finite."""
        if count:
            self._new.append((NOT_FINITE, NOT_FINITE, count))

    def forget(self) -> None:
        """What was noted of the batch so far: it is worked off once more in another way."""
        self._new.clear()

    def report(self, drawn: int) -> None:
        """At the end of a batch of so many examples."""
        self.drawn += drawn
        new, self._new = self._new, []
        for kind, words, count in new:
            self.counts[kind] += count
            self._words[kind] = words
        for kind in {kind for kind, _, _ in new}:
            if self.counts[kind] >= 10 * self._told.get(kind, 0):
                self._told[kind] = self.counts[kind]
                _log.warning(
                    "%d of %d examples drawn so far taught nothing: %s; look at these examples and their labels",
                    self.counts[kind],
                    self.drawn,
                    self._words[kind],
                )
