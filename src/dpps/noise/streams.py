"""Random numbers keyed by what they are for: (seed, purpose, node, round), never by process or by call order.

A key is the start state of numpy's SFC64 generator: words a = seed, b = purpose | round | node, c fixed, counter 1, and twelve
steps thrown away, as its author seeds it. Two different keys never give overlapping streams: one step is a bijection of the
state that adds 1 to the counter, so at the same counter (hence after the same number of steps) different starts are still
different. Whoever knows the seed can subtract the noise: these streams are for simulation and tests.
"""

import numpy as np

NOISE, SAMPLING, LOCAL_NOISE, DROPOUT, PAIRS = 0, 1, 2, 3, 5  # parts of keys: never renumbered

_NODES, _ROUNDS = 1 << 26, 1 << 34
_MASK = (1 << 64) - 1
_FIXED = 0x9E3779B97F4A7C15
_THROWN_AWAY = 12


def key(seed: int, purpose: int, node: int, round_: int) -> tuple[int, int]:
    """The two words of one stream: the seed, and purpose | round | node packed without overlap."""
    if not (0 <= node < _NODES and 0 <= round_ < _ROUNDS):
        raise OverflowError(f"node {node} or round {round_} is beyond what a stream key holds")
    return seed & _MASK, (purpose << 60) | (round_ << 26) | node


class Streams:
    """The streams of one seed and purpose; one generator, moved from key to key."""

    def __init__(self, seed: int, purpose: int) -> None:
        self.seed, self.purpose = seed, purpose
        self._bits = np.random.SFC64(0)
        self._state = self._bits.state | {"has_uint32": 0, "uinteger": 0}
        self.current = np.random.Generator(self._bits)
        """Goes on with the stream that `at` moved to last."""

    def at(self, node: int, round_: int) -> np.random.Generator:
        """The stream of (node, round); valid until the next call."""
        self._state["state"]["state"][:] = (*key(self.seed, self.purpose, node, round_), _FIXED, 1)
        self._bits.state = self._state  # numpy takes a copy
        self._bits.random_raw(_THROWN_AWAY)
        return self.current


def fresh_seed() -> int:
    """A seed nobody knows, from the operating system."""
    return int(np.random.SeedSequence().generate_state(1, np.uint64)[0])
