"""What ``validate`` finds out: whether the network connects, how wide it is, how fast it mixes."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dpps.errors import UsageError
from dpps.topology.base import Topology
from dpps.topology.weights import Weights, check_weights

if TYPE_CHECKING:
    from scipy.sparse import csr_array

EXACT_NODES = 1000
"""Up to this many nodes everything is exact; above it, some is sampled (see ``Report``)."""

EXACT = 1e-12
"""How close to 1/N the product must be to count as the exact average."""

CREEPING = 1e-8
"""A product that comes this close without being exact only converges, and will not become exact."""

Matrix = NDArray[np.float64]
Columns = list[NDArray[np.float64]]


@dataclass(frozen=True)
class Report:
    """The facts about a topology, over its period or, if it has none, its first ``examined`` rounds.

    Above 1000 nodes, unless all nodes play the same part (as in ``DOut``, ``Exponential``, ``Ring`` and
    ``Complete``), ``diameter`` is the longest of the ways to 16 nodes, ``contraction`` an iterative estimate
    from below, and ``exact_average_after`` is found with 8 random vectors.

    Attributes:
        nodes: N.
        period: Number of rounds after which the weights repeat, or None.
        degree: The largest number of others that a node sends to in a round.
        doubly_stochastic: Whether the rows, not only the columns, sum to 1.
        connected_within: The smallest B of Assumption 1: any B rounds in a row are strongly connected together.
        diameter: The largest diameter of the union of B rounds in a row.
        contraction: Second singular value of the product of the weights.
        exact_average_after: The number of rounds, from round 0, after which the product is 1/N, or None.
    """

    nodes: int
    period: int | None
    degree: int
    doubly_stochastic: bool
    connected_within: int
    diameter: int
    contraction: float
    exact_average_after: int | None

    def to_json(self) -> dict[str, int | float | bool | None]:
        """The fields by name, ready for ``json.dump``."""
        return asdict(self)


def analyse(topology: Topology) -> Report:
    """Checks every examined round and the connectivity; raises a UsageError at the first fault."""
    rounds = [topology.weights(t) for t in range(topology.examined)]
    for t, weights in enumerate(rounds):
        check_weights(weights, f"{topology!r}, round {t}", doubly_stochastic=topology.doubly_stochastic)
    repeats = topology.period is not None
    columns = _first_columns(rounds)
    connected_within = _connected_within(topology, rounds, repeats, circulant=columns is not None)
    return Report(
        nodes=topology.nodes,
        period=topology.period,
        degree=max(int(weights.out_degree.max()) for weights in rounds),
        doubly_stochastic=all(weights.doubly_stochastic for weights in rounds),
        connected_within=connected_within,
        diameter=_largest_diameter(rounds, connected_within, repeats, circulant=columns is not None),
        contraction=_contraction(rounds, columns),
        exact_average_after=_exact_average_after(rounds, repeats, columns),
    )


# Connectivity: unions of consecutive rounds


def check_connected(topology: Topology) -> None:
    """All examined rounds together must lead from everybody to everybody; raises a UsageError that names the parts."""
    rounds = [topology.weights(t) for t in range(topology.examined)]
    if _parts(_window(rounds, 0, len(rounds)))[0] > 1:
        raise UsageError(_never_connects(topology, rounds))


Window = dict[int, Weights]
"""The weights of some rounds in a row, each object once, by its id."""


def _window(rounds: list[Weights], start: int, length: int) -> Window:
    members = (rounds[t % len(rounds)] for t in range(start, start + length))
    return {id(weights): weights for weights in members}


def _union(window: Window) -> "csr_array":
    from scipy.sparse import csr_array

    nodes = next(iter(window.values())).nodes
    receivers = np.concatenate([weights.receivers for weights in window.values()])
    senders = np.concatenate([weights.senders for weights in window.values()])
    return csr_array((np.ones(receivers.size), (receivers, senders)), shape=(nodes, nodes))


def _steps_from_first(window: Window) -> NDArray[np.int64]:
    """In how many steps node 0 reaches each node (-1: never), for circulant rounds: every other node needs as many."""
    nodes = next(iter(window.values())).nodes
    ahead = np.unique(np.concatenate([-w.senders[: w.indptr[1]] % nodes for w in window.values()]))
    steps = np.full(nodes, -1)
    steps[0], newest, taken = 0, np.zeros(1, dtype=np.int64), 0
    while newest.size and (steps < 0).any():
        reached, taken = np.zeros(nodes, dtype=bool), taken + 1
        reached[(newest[:, None] + ahead) % nodes] = True
        newest = np.flatnonzero(reached & (steps < 0))
        steps[newest] = taken
    return steps


def _connected_within(topology: Topology, rounds: list[Weights], repeats: bool, *, circulant: bool) -> int:
    """The smallest B such that all windows of B rounds (that lie within the examined ones) connect.

    A window that contains a connected one is connected, so B only grows from one start to the next.
    """
    known: dict[frozenset[int], bool] = {}
    length = 1
    for start in range(len(rounds)):
        available = len(rounds) if repeats else len(rounds) - start
        while length <= available and not _connects(_window(rounds, start, length), known, circulant):
            length += 1
    if length > len(rounds):
        raise UsageError(_never_connects(topology, rounds))
    return length


def _connects(window: Window, known: dict[frozenset[int], bool], circulant: bool) -> bool:
    key = frozenset(window)
    if key not in known:
        if circulant:
            known[key] = bool((_steps_from_first(window) >= 0).all())
        else:
            known[key] = _parts(window)[0] == 1
    return known[key]


def _parts(window: Window) -> tuple[int, NDArray[np.int32]]:
    """How many parts the rounds together have, and each node's."""
    from scipy.sparse.csgraph import connected_components

    count, labels = connected_components(_union(window), connection="strong")
    return int(count), labels


def _never_connects(topology: Topology, rounds: list[Weights]) -> str:
    parts, labels = _parts(_window(rounds, 0, len(rounds)))
    stranger = int(np.flatnonzero(labels != labels[0])[0])
    return (
        f"{topology!r} never connects: its {len(rounds)} examined round(s) together have {parts} separate parts, "
        f"nodes 0 and {stranger} cannot reach each other both ways; add links between the parts"
    )


# Diameter


def _largest_diameter(rounds: list[Weights], length: int, repeats: bool, *, circulant: bool) -> int:
    starts = len(rounds) if repeats else len(rounds) - length + 1
    windows = [_window(rounds, start, length) for start in range(starts)]
    different = {frozenset(window): window for window in windows}
    if circulant:
        return max(int(_steps_from_first(window).max()) for window in different.values())
    return max(_diameter(_union(window)) for window in different.values())


def _diameter(union: "csr_array") -> int:
    from scipy.sparse.csgraph import shortest_path

    nodes = union.shape[0]
    starts = np.arange(nodes) if nodes <= EXACT_NODES else np.linspace(0, nodes - 1, 16).astype(np.int64)
    return int(shortest_path(union, method="D", unweighted=True, indices=starts).max())


# Mixing: the product of the weights over the rounds


def _contraction(rounds: list[Weights], columns: Columns | None) -> float:
    if columns is not None:
        # The Fourier transform diagonalises all circulant matrices, and so their product.
        spectrum = np.abs(np.prod([np.fft.fft(column) for column in columns], axis=0))
    elif rounds[0].nodes <= EXACT_NODES:
        spectrum = _singular_values(_product(rounds, np.eye(rounds[0].nodes)))
    else:
        spectrum = _leading_singular_values(rounds)
    return float(np.sort(spectrum)[-2])


def _singular_values(x: Matrix) -> NDArray[np.float64]:
    return np.linalg.svd(x, compute_uv=False).astype(np.float64)


def _product(rounds: list[Weights], x: Matrix) -> Matrix:
    for weights in rounds:
        if x.shape[1] == 1:
            taken = weights.values * x[weights.senders, 0]
            x = np.bincount(weights.receivers, taken, weights.nodes).astype(np.float64)[:, None]
        else:
            x = weights.matrix() @ x
    return x


def _transposed_product(rounds: list[Weights], x: Matrix) -> Matrix:
    for weights in reversed(rounds):
        x = weights.matrix().T @ x
    return x


def _leading_singular_values(rounds: list[Weights]) -> NDArray[np.float64]:
    """Four of them by subspace iteration; each value grows towards the true one."""
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((rounds[0].nodes, 4)))[0]
    values: NDArray[np.float64] = np.zeros(4)
    for _ in range(500):
        image = _product(rounds, basis)
        before, values = values, _singular_values(image)
        if np.abs(values - before)[:2].max() <= 1e-10:
            break
        basis = np.linalg.qr(_transposed_product(rounds, image))[0]
    return values


def _exact_average_after(rounds: list[Weights], repeats: bool, columns: Columns | None) -> int | None:
    """Looks for it over two periods: a product of rounds that is exact may begin late in the first."""
    x = _probes(rounds[0].nodes, circulant=columns is not None)
    average = x.mean(axis=0)
    for t, weights in enumerate(rounds * 2 if repeats else rounds):
        x = _product([weights], x)
        error = np.abs(x - average).max()
        if error <= EXACT:
            return t + 1
        if error <= CREEPING:
            return None
    return None


def _probes(nodes: int, *, circulant: bool) -> Matrix:
    """Vectors that W averages exactly if and only if it is 1/N; of a circulant W one column says all."""
    if circulant:
        return np.eye(nodes, 1)
    if nodes <= EXACT_NODES:
        return np.eye(nodes)
    return np.random.default_rng(0).standard_normal((nodes, 8))


# Symmetry: W[i, j] that depends on (i - j) mod N alone


def _first_columns(rounds: list[Weights]) -> Columns | None:
    """The first column of each round's W, if all rounds are circulant: all nodes then play the same part."""
    columns = []
    for weights in rounds:
        column = _first_column(weights)
        if column is None:
            return None
        columns.append(column)
    return columns


def _first_column(weights: Weights) -> NDArray[np.float64] | None:
    width, more = divmod(len(weights.values), weights.nodes)
    if more or (np.diff(weights.indptr) != width).any():
        return None
    ahead = ((weights.receivers - weights.senders) % weights.nodes).reshape(weights.nodes, width)
    order = np.argsort(ahead, axis=1)
    ahead = np.take_along_axis(ahead, order, axis=1)
    values = np.take_along_axis(weights.values.reshape(ahead.shape), order, axis=1)
    if (ahead != ahead[0]).any() or (values != values[0]).any():
        return None
    column = np.zeros(weights.nodes)
    column[ahead[0]] = values[0]
    return column
