"""What every topology is: N nodes and, for each round, who sends how much to whom."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from dpps.errors import UsageError
from dpps.registry import Registry
from dpps.topology.weights import Weights

if TYPE_CHECKING:
    from dpps.topology.analysis import Report

KEPT_ROUNDS = 64
"""How many rounds' weights a topology that never repeats keeps; the oldest go first."""

EXAMINED_ROUNDS = 64
"""How many rounds ``validate`` examines of a topology that never repeats."""


class Topology(ABC):
    """Who sends to whom in round t, with which weights.

    A topology of your own implements ``build`` and passes its facts to ``__init__``.

    Attributes:
        nodes: N.
        period: ``weights(t)`` equals ``weights(t % period)``; None if it never repeats.
        doubly_stochastic: Whether rows and columns sum to 1; otherwise only the columns do.
    """

    def __init__(self, nodes: int, period: int | None, *, doubly_stochastic: bool = True) -> None:
        self.nodes = node_count(nodes)
        self.period = period
        self.doubly_stochastic = doubly_stochastic
        self._built: dict[int, Weights] = {}

    @abstractmethod
    def build(self, t: int) -> Weights:
        """The weights of round t, made anew; t < period if there is one."""

    def weights(self, t: int) -> Weights:
        """The weights of round t; the same phase gives the same object."""
        phase = self._phase(t)
        if phase not in self._built:
            if len(self._built) >= (self.period or KEPT_ROUNDS):
                del self._built[next(iter(self._built))]
            self._built[phase] = self.build(phase)
        return self._built[phase]

    def present(self, t: int) -> NDArray[np.bool_] | None:
        """The nodes that take part in round t. None: all."""
        self._phase(t)
        return None

    @property
    def examined(self) -> int:
        """How many rounds ``validate`` examines: the period, or the first 64 rounds if there is none."""
        return self.period or EXAMINED_ROUNDS

    def validate(self) -> "Report":
        """Checks self-loops, sums and connectivity (Assumption 1), and measures how fast it mixes."""
        from dpps.topology.analysis import analyse

        return analyse(self)

    def check_connected(self) -> None:
        """Refuses a network that is not connected."""
        from dpps.topology.analysis import check_connected

        check_connected(self)

    def with_dropouts(self, away: float | Mapping[int, Iterable[int]], seed: int = 0) -> "Topology":
        """A copy in which nodes are absent in some rounds; weights are adjusted.

        ``away`` is the probability of a node to be away in a round (drawn with ``seed``), or a schedule: round -> nodes away.
        """
        from dpps.topology.dropouts import RandomDropouts, ScheduledDropouts

        if isinstance(away, Mapping):
            return ScheduledDropouts(self, away)
        return RandomDropouts(self, away, seed)

    def _phase(self, t: int) -> int:
        if t < 0:
            raise UsageError(f"round {t} does not exist: rounds count from 0")
        return int(t) if self.period is None else int(t) % self.period


TOPOLOGIES: Registry[Callable[..., Topology]] = Registry("topology", "dpps.topology")
"""Topologies by name, for the command line. An entry is called with the number of nodes, and K where its name has one."""


def parse(text: str, nodes: int) -> Topology:
    """The topology called ``text`` on ``nodes`` nodes, such as ``exp``, ``4-out`` or ``base-2``."""
    make, numbers = TOPOLOGIES.find(text)
    return make(nodes, *numbers)


def node_count(nodes: object) -> int:
    """``nodes`` as a number of nodes, at least 2."""
    return whole("nodes", nodes, low=2, remedy="a network needs two nodes or more")


def whole(name: str, value: object, *, low: int, high: int | None = None, remedy: str) -> int:
    """``value`` as an int between ``low`` and ``high``, or a UsageError with the range and the remedy."""
    allowed = f"{low} or more" if high is None else f"from {low} to {high}"
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{name} is {value!r}, must be a whole number, {allowed}: {remedy}") from None
    if number < low or (high is not None and number > high):
        raise UsageError(f"{name} is {number}, must be {allowed}: {remedy}")
    return number


def random_bits(purpose: str, seed: int, t: int, count: int) -> NDArray[np.uint64]:
    """``count`` random 64-bit numbers of round t, keyed by (purpose, seed, t): the same in every process and on every machine.

    Raw output of PCG64: NumPy promises to keep it, unlike that of its distributions and permutations.
    """
    key = np.random.SeedSequence([crc32(purpose.encode()), seed, t])
    bits: NDArray[np.uint64] = np.random.PCG64(key).random_raw(count)
    return bits
