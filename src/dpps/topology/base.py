"""A topology: N nodes and, for each round, a sparse matrix W of who sends how much to whom; and what must hold for it."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array

from dpps.errors import UsageError
from dpps.registry import Registry

if TYPE_CHECKING:
    from dpps.topology.analysis import Report


TOLERANCE = 1e-9
"""How far a row or column sum may be from 1."""


class Weights:
    """The N x N matrix W of one round, dense or scipy.sparse; W[i, j] is what receiver i takes of sender j. It is copied.

    Stored by receiver: the entries of receiver i are ``indptr[i]:indptr[i + 1]``, senders ascending.
    """

    def __init__(self, matrix: Any) -> None:
        self.matrix = csr_array(matrix, dtype=np.float64, copy=True)
        self.matrix.sum_duplicates()
        self.matrix.eliminate_zeros()
        self.nodes: int = self.matrix.shape[0]
        self.indptr: NDArray[np.int64] = self.matrix.indptr.astype(np.int64)
        self.senders: NDArray[np.int64] = self.matrix.indices.astype(np.int64)
        self.values: NDArray[np.float64] = self.matrix.data

    @classmethod
    def from_entries(cls, nodes: int, receivers: Any, senders: Any, values: Any) -> Self:
        """W from its entries in any order; entries of the same place add up. ValueError: one lies outside."""
        return cls(coo_array((values, (receivers, senders)), shape=(nodes, nodes)))

    @classmethod
    def symmetric(cls, nodes: int, receivers: Any, senders: Any, values: Any) -> Self:
        """W from its entries off the diagonal; each node keeps for itself what is missing to 1."""
        everyone = np.arange(nodes)
        rest = 1.0 - np.bincount(receivers, weights=values, minlength=nodes)
        return cls.from_entries(
            nodes,
            np.concatenate([receivers, everyone]),
            np.concatenate([senders, everyone]),
            np.concatenate([values, rest]),
        )

    def dense(self) -> NDArray[np.float64]:
        """W with all its zeros, N x N numbers; for analysis and tests."""
        return self.matrix.toarray()  # type: ignore[no-any-return]

    @cached_property
    def receivers(self) -> NDArray[np.int64]:
        """The receiver of every entry, in the order of ``senders`` and ``values``."""
        return np.repeat(np.arange(self.nodes), np.diff(self.indptr))

    @cached_property
    def row_sums(self) -> NDArray[np.float64]:
        return self.matrix.sum(axis=1)  # type: ignore[no-any-return]

    @cached_property
    def column_sums(self) -> NDArray[np.float64]:
        return self.matrix.sum(axis=0)  # type: ignore[no-any-return]

    @cached_property
    def doubly_stochastic(self) -> bool:
        """Whether all rows and all columns sum to 1, up to 1e-9."""
        return _all_one(self.row_sums) and _all_one(self.column_sums)

    @cached_property
    def out_degree(self) -> NDArray[np.int64]:
        """To how many others each node sends."""
        return np.bincount(self.senders[self.receivers != self.senders], minlength=self.nodes)

    def __repr__(self) -> str:
        return f"<Weights of {self.nodes} nodes, {len(self.values)} entries>"


def _all_one(sums: NDArray[np.float64]) -> bool:
    return bool(np.all(np.abs(sums - 1.0) <= TOLERANCE))


def check_weights(weights: Weights, where: str, *, doubly_stochastic: bool) -> None:
    """Refuses weights the protocol cannot run on, naming the first entry, row or column at fault. ``where`` says what they are.
    The columns must always sum to 1: W conserves the sum."""
    bad = np.flatnonzero(~np.isfinite(weights.values) | (weights.values < 0))
    if bad.size:
        i, j, value = weights.receivers[bad[0]], weights.senders[bad[0]], weights.values[bad[0]]
        raise UsageError(f"{where}: W[{i}, {j}] is {value:g}; weights must be finite and not negative")
    missing = np.flatnonzero(weights.matrix.diagonal() <= 0)
    if missing.size:
        node = missing[0]
        raise UsageError(f"{where}: node {node} has no self-loop; give W[{node}, {node}] a positive weight")
    if not _all_one(weights.column_sums):
        hint = "make each column sum to 1: W[i, j] is what receiver i takes of sender j"
        if _all_one(weights.row_sums):
            hint = "the rows do: pass the transpose, W[i, j] is what receiver i takes of sender j"
        raise UsageError(f"{where}: column {_first_off(weights.column_sums)}; {hint}")
    if doubly_stochastic and not _all_one(weights.row_sums):
        raise UsageError(f"{where}: row {_first_off(weights.row_sums)}; make each row sum to 1")


def _first_off(sums: NDArray[np.float64]) -> str:
    worst = int(np.flatnonzero(np.abs(sums - 1.0) > TOLERANCE)[0])
    return f"{worst} sums to {sums[worst]:.12g}, not 1"


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
        from dpps.topology.families import RandomDropouts, ScheduledDropouts

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
    return np.random.PCG64(np.random.SeedSequence([crc32(purpose.encode()), seed, t])).random_raw(count)
