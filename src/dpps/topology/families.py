"""Topologies given by a formula, a matrix, a networkx graph, or a list of these; and any of them with absent nodes."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, diags_array, issparse
from scipy.sparse.csgraph import connected_components

from dpps.errors import UsageError, is_number
from dpps.topology.base import TOPOLOGIES, Topology, Weights, check_weights, node_count, random_bits, whole


class Circulant(Topology):
    """Everybody sends the same weight to the nodes that lie so many steps ahead, itself among them."""

    @abstractmethod
    def steps(self, t: int) -> Items[int]:
        """How far ahead the receivers of round t are; different mod N."""

    def build(self, t: int) -> Weights:
        steps = np.asarray(self.steps(t))
        senders = np.repeat(np.arange(self.nodes), steps.size)
        receivers = (senders + np.tile(steps, self.nodes)) % self.nodes
        return Weights.from_entries(self.nodes, receivers, senders, np.full(senders.size, 1.0 / steps.size))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.nodes})"


@TOPOLOGIES.register("exp")
class Exponential(Circulant):
    """Node i sends to itself and to (i + 2^(t mod P)) mod N, weight 1/2 each (the paper's EXP graph).

    P = floor(log2(N - 1)) + 1, the number of binary digits of N - 1, so that every step is smaller than N.
    """

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes, period=(node_count(nodes) - 1).bit_length())

    def steps(self, t: int) -> Items[int]:
        return 0, 1 << t


@TOPOLOGIES.register("K-out")
class DOut(Circulant):
    """Node i sends to i, i+1, ..., i+d-1 mod N, weight 1/d each (the paper's d-Out graph)."""

    def __init__(self, nodes: int, d: int) -> None:
        super().__init__(nodes, period=1)
        self.d = whole(
            "d", d, low=1, high=self.nodes, remedy="a node sends to itself and d - 1 of the others"
        )

    def steps(self, t: int) -> Items[int]:
        return range(self.d)

    def __repr__(self) -> str:
        return f"DOut({self.nodes}, {self.d})"


@TOPOLOGIES.register("ring")
class Ring(Circulant):
    """Node i sends to itself and to both neighbours, i-1 and i+1 mod N, weight 1/3 each (two nodes: 1/2)."""

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes, period=1)

    def steps(self, t: int) -> Items[int]:
        return sorted({0, 1, self.nodes - 1})


@TOPOLOGIES.register("complete")
class Complete(Circulant):
    """Every node sends to every node, weight 1/N. One round gives the exact average."""

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes, period=1)

    def steps(self, t: int) -> Items[int]:
        return range(self.nodes)


@TOPOLOGIES.register("random")
class OnePeerRandom(Topology):
    """A new random cycle through all nodes in each round. Each node keeps 1/2 and sends 1/2 to the next.

    Round t depends on ``seed`` and t alone, so every process computes the same cycle. No node sends only to
    itself, and every other node is equally likely to be the next.
    """

    def __init__(self, nodes: int, seed: int = 0) -> None:
        super().__init__(nodes, period=None)
        self.seed = whole("seed", seed, low=0, remedy="choose any number")

    def build(self, t: int) -> Weights:
        circle = np.argsort(random_bits("one-peer", self.seed, t, self.nodes), kind="stable")
        everyone = np.arange(self.nodes)
        receivers = np.concatenate([everyone, np.roll(circle, -1)])
        senders = np.concatenate([everyone, circle])
        return Weights.from_entries(self.nodes, receivers, senders, np.full(2 * self.nodes, 0.5))

    def __repr__(self) -> str:
        return f"OnePeerRandom({self.nodes}, {self.seed})"


class Static(Topology):
    """The same matrix W in every round, dense or scipy.sparse. W[i, j] is the weight with which receiver i
    counts sender j.

    The columns must sum to 1; if the rows do not, ``doubly_stochastic`` is False.
    """

    def __init__(self, matrix: Any) -> None:
        try:
            numbers = matrix if issparse(matrix) else np.asarray(matrix, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"the matrix is not a table of numbers ({error}): give N rows of N weights"
            ) from error
        shape = numbers.shape
        if len(shape) != 2 or shape[0] != shape[1]:
            raise UsageError(f"the matrix has shape {shape}, must be square: one row and one column per node")
        self._weights = Weights(numbers)
        check_weights(self._weights, "the matrix", doubly_stochastic=False)
        super().__init__(self._weights.nodes, period=1, doubly_stochastic=self._weights.doubly_stochastic)

    def build(self, t: int) -> Weights:
        return self._weights

    def __repr__(self) -> str:
        return f"Static(<{self.nodes} x {self.nodes} matrix, {len(self._weights.values)} weights>)"


class Sequence(Topology):
    """Topologies or matrices in turn, each for one whole period, repeated."""

    def __init__(self, parts: Items[Any]) -> None:
        self.parts = [part if isinstance(part, Topology) else Static(part) for part in parts]
        if not self.parts:
            raise UsageError("the sequence is empty: give it one topology or matrix, or more")
        nodes, self._rounds = self.parts[0].nodes, list[tuple[Topology, int]]()
        for part in self.parts:
            if part.nodes != nodes:
                raise UsageError(
                    f"{part!r} has {part.nodes} nodes, the first of the sequence {nodes}: make them equal"
                )
            if part.period is None:
                raise UsageError(
                    f"{part!r} never repeats and cannot be part of a sequence: "
                    "use parts with a period, and with_dropouts on the whole sequence"
                )
            self._rounds += [(part, phase) for phase in range(part.period)]
        doubly_stochastic = all(part.doubly_stochastic for part in self.parts)
        super().__init__(nodes, period=len(self._rounds), doubly_stochastic=doubly_stochastic)

    def build(self, t: int) -> Weights:
        part, phase = self._rounds[t]
        return part.weights(phase)

    def __repr__(self) -> str:
        return f"Sequence({self.parts!r})"


# Graphs of networkx

BALANCING_STEPS = 100_000
"""How often rows and columns are scaled at most to make a directed graph's weights doubly stochastic."""


def from_networkx(graph: Any) -> Static:
    """Create a topology from a networkx graph, with doubly stochastic weights. Node i is the i-th of
    ``graph.nodes``.

    Undirected: Metropolis weights 1 / (1 + the larger degree of the two). Directed: the weights on the edges
    and self-loops of the graph whose rows and columns sum to 1 (Sinkhorn). Self-loops are added, parallel edges
    count once, and edge attributes are not read.
    """
    import networkx as nx  # a quarter of a second to load, and few ask

    if not isinstance(graph, nx.Graph):
        raise UsageError(f"from_networkx got {type(graph).__name__}: it needs a networkx Graph or DiGraph")
    labels = list(graph.nodes)
    number = {label: i for i, label in enumerate(labels)}
    nodes = node_count(len(labels))
    links = {(number[v], number[u]) for u, v in graph.edges() if u != v}
    if not graph.is_directed():
        receivers, senders = _columns(links | {(j, i) for i, j in links})
        degree = np.bincount(receivers, minlength=nodes)
        values = 1.0 / (1.0 + np.maximum(degree[receivers], degree[senders]))
        return Static(Weights.symmetric(nodes, receivers, senders, values).matrix)
    receivers, senders = _columns(links | {(i, i) for i in range(nodes)})
    pattern = csr_array((np.ones(receivers.size), (receivers, senders)), shape=(nodes, nodes))
    # with self-loops, doubly stochastic weights exist if and only if every edge lies on a cycle
    _, component = connected_components(pattern, directed=True, connection="strong")
    one_way = np.flatnonzero(component[receivers] != component[senders])
    if one_way.size:
        sender, receiver = labels[senders[one_way[0]]], labels[receivers[one_way[0]]]
        raise UsageError(
            f"the directed graph cannot be balanced: it is not strongly connected, no way leads back from "
            f"{receiver!r} to {sender!r}, so doubly stochastic weights cannot use the edge {sender!r} -> "
            f"{receiver!r}; add a way back, or use Static with weights whose columns alone sum to 1"
        )
    rows, columns = _sinkhorn(pattern)
    return Static(diags_array(rows) @ pattern @ diags_array(columns))


def _sinkhorn(pattern: csr_array) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Scales of rows and columns with which both sum to 1, by making now the ones and now the others so."""
    transposed = pattern.T.tocsr()
    rows = np.ones(pattern.shape[0])
    for _ in range(BALANCING_STEPS):
        columns = 1.0 / (transposed @ rows)
        error = np.abs(rows * (pattern @ columns) - 1.0).max()
        if error <= 1e-12:
            return rows, columns
        rows = 1.0 / (pattern @ columns)
    raise UsageError(
        f"the directed graph did not balance in {BALANCING_STEPS} steps, a row sum is still {error:.1g} off 1: "
        f"add edges, or give the weights yourself with Static"
    )


def _columns(links: set[tuple[int, int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    table = np.array(sorted(links), dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


# Nodes that are away in some rounds: the others route around them


class Dropouts(Topology):
    """Another topology with nodes away in some rounds; an absent node keeps its row (W[j, j] = 1)."""

    def __init__(self, inner: Topology) -> None:
        if isinstance(inner, Dropouts):
            raise UsageError(f"{inner!r} has dropouts already: put all of them into one schedule")
        super().__init__(inner.nodes, period=None, doubly_stochastic=inner.doubly_stochastic)
        self.inner = inner

    @abstractmethod
    def away(self, t: int) -> NDArray[np.bool_]:
        """Which nodes are away in round t; never all of them."""

    def present(self, t: int) -> NDArray[np.bool_] | None:
        away = self.away(self._phase(t))
        return ~away if away.any() else None

    def build(self, t: int) -> Weights:
        away = self.away(t)
        weights = self.inner.weights(t)
        return route_around(weights, away) if away.any() else weights


class RandomDropouts(Dropouts):
    """Each node is away in each round with the same probability, independently, keyed by (seed, round)."""

    def __init__(self, inner: Topology, probability: float, seed: int) -> None:
        super().__init__(inner)
        if not (is_number(probability) and 0 <= probability < 1):
            raise UsageError(
                f"dropout probability is {probability!r}, must be from 0 up to but not including 1: "
                "choose e.g. 0.1, or give a schedule {round: nodes away}"
            )
        self.probability = float(probability)
        self.seed = whole("seed", seed, low=0, remedy="choose any number")

    def away(self, t: int) -> NDArray[np.bool_]:
        """Draws who is away; should that be everybody, the node with the largest draw stays."""
        draws = (random_bits("dropouts", self.seed, t, self.nodes) >> np.uint64(11)) * 2.0**-53
        away: NDArray[np.bool_] = draws < self.probability
        if away.all():
            away[np.argmax(draws)] = False
        return away

    def __repr__(self) -> str:
        return f"{self.inner!r}.with_dropouts({self.probability}, seed={self.seed})"


class ScheduledDropouts(Dropouts):
    """The nodes away are given for each round; in a round not named everybody is there."""

    def __init__(self, inner: Topology, schedule: Mapping[int, Iterable[int]]) -> None:
        super().__init__(inner)
        self.schedule = {
            whole("round", t, low=0, remedy="rounds count from 0"): self._checked(t, nodes)
            for t, nodes in schedule.items()
        }

    @property
    def examined(self) -> int:
        return max(self.schedule, default=-1) + 1 + self.inner.examined

    def away(self, t: int) -> NDArray[np.bool_]:
        mask = np.zeros(self.nodes, dtype=np.bool_)
        mask[list(self.schedule.get(t, ()))] = True
        return mask

    def _checked(self, t: int, nodes: Iterable[int]) -> tuple[int, ...]:
        if not isinstance(nodes, Iterable):
            raise UsageError(
                f"round {t} of the schedule is {nodes!r}: give the nodes away as a list, [{nodes!r}]"
            )
        name, remedy = f"node away in round {t}", "name nodes of this topology"
        away = sorted({whole(name, node, low=0, high=self.nodes - 1, remedy=remedy) for node in nodes})
        if len(away) == self.nodes:
            raise UsageError(
                f"everybody is away in round {t} of the schedule: leave one of {self.nodes} nodes or more"
            )
        return tuple(away)

    def __repr__(self) -> str:
        if len(self.schedule) <= 4:
            return f"{self.inner!r}.with_dropouts({self.schedule})"
        return f"{self.inner!r}.with_dropouts(<schedule of {len(self.schedule)} rounds>)"


def route_around(weights: Weights, away: NDArray[np.bool_]) -> Weights:
    """W without the absent nodes B: whoever would have sent to B sends to where B would have sent it.

    With A the nodes present, W' = W_AA + W_AB (I - W_BB)^-1 W_BA: the chain W seen only while it is in A.
    Rows and columns of W' sum to 1 if those of W do, since 1' W_AB = 1' (I - W_BB), and likewise for rows. The
    diagonal only grows. Absent nodes from which nothing leads back to A would swallow what they get: there the
    sender keeps it. (With doubly stochastic W they get nothing.)
    """
    W = weights.matrix
    here, gone = np.flatnonzero(~away), np.flatnonzero(away)
    way_out = _way_out(W[here][:, gone], W[gone][:, gone])
    kept = (W[here][:, here] + way_out @ W[gone][:, here]).tocoo()
    swallowed = np.maximum(0.0, 1.0 - np.bincount(kept.col, weights=kept.data, minlength=here.size))
    return Weights.from_entries(
        weights.nodes,
        np.concatenate([here[kept.row], here, gone]),
        np.concatenate([here[kept.col], here, gone]),
        np.concatenate([kept.data, swallowed, np.ones(gone.size)]),
    )


def _way_out(W_AB: csr_array, W_BB: csr_array) -> csr_array:
    """W_AB (I - W_BB)^-1 = W_AB (I + W_BB) (I + W_BB^2) (I + W_BB^4)...: where what B gets ends up in A.

    Only sums of positive numbers, so nothing cancels, and as sparse as the groups of absent neighbours are
    small. 64 factors are 2^64 steps within B, more than float64 can tell apart.
    """
    total, power = W_AB, W_BB
    for _ in range(64):
        more = total @ power
        if more.nnz == 0 or more.max() < 1e-18:
            break
        total, power = total + more, power @ power
    return total
