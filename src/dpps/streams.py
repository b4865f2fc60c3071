"""Random numbers keyed by what they are for: (seed, purpose, node, round), never by process or by call order.

The key goes straight into numpy's Philox counter generator, so two different keys give two different streams by
construction (a hashed seed could collide), and a simulation and a distributed run with the same seed draw the same numbers.
Whoever knows the seed can subtract the noise: these streams are for simulation and tests.
"""

from collections.abc import Sequence

import numpy as np

NOISE, SAMPLING, LOCAL_NOISE, DROPOUT, AUDIT = range(5)

_NODES, _ROUNDS = 1 << 26, 1 << 34
_MASK = (1 << 64) - 1


def key(seed: int, purpose: int, node: int, round_: int) -> tuple[int, int]:
    """The 128-bit Philox key of one stream: the seed, and purpose | round | node packed without overlap."""
    if not (0 <= node < _NODES and 0 <= round_ < _ROUNDS):
        raise OverflowError(f"node {node} or round {round_} is beyond what a stream key holds")
    return seed & _MASK, (purpose << 60) | (round_ << 26) | node


def stream(seed: int, purpose: int, node: int, round_: int) -> np.random.Generator:
    """The generator of one (seed, purpose, node, round)."""
    return np.random.Generator(
        np.random.Philox(key=np.array(key(seed, purpose, node, round_), dtype=np.uint64))
    )


class Streams:
    """One generator moved from key to key: what `stream` gives, without building an object per node and round."""

    def __init__(self, seed: int, purpose: int) -> None:
        self.seed, self.purpose = seed, purpose
        self._bits = np.random.Philox(key=np.zeros(2, dtype=np.uint64))
        self._state = self._bits.state
        self._generator = np.random.Generator(self._bits)

    def at(self, node: int, round_: int) -> np.random.Generator:
        """The stream of (node, round); valid until the next call."""
        self._state["state"]["key"][:] = key(self.seed, self.purpose, node, round_)
        self._bits.state = self._state  # a copy is taken: counter 0, empty buffer
        return self._generator


def fresh_seed() -> int:
    """A seed nobody knows, from the operating system."""
    entropy: int | Sequence[int] | None = np.random.SeedSequence().entropy
    assert isinstance(entropy, int)
    return entropy & _MASK
