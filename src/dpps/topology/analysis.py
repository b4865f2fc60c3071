"""A look at a topology: whether it connects, how wide it is, how fast it mixes (``validate``); and a picture of it."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import ceil, sqrt
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components, shortest_path

from dpps.errors import UsageError, needs_extra, unknown
from dpps.topology.base import Topology, Weights, check_weights

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXACT_NODES = 1000
"""Up to this many nodes everything is exact; above it, some is sampled (see ``Report``)."""
EXACT = 1e-12
"""How close to 1/N the product must be to count as the exact average."""
CREEPING = 1e-8
"""A product that comes this close without being exact only converges, and will not become exact."""
FORMATS = (".svg", ".png")
"""The file endings ``draw`` understands."""
SHOWN_ROUNDS = 4
"""How many rounds are drawn of a topology that never repeats."""
LABELLED_NODES = 50
"""Up to this many nodes carry numbers and links carry arrow heads; beyond it they would only blot."""
PRESENT, ABSENT, LINK = "#1f5fa8", "#8c8c8c", "#555555"

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Report:
    """The facts about a topology, over its period or, if it has none, its first ``examined`` rounds.

    Above 1000 nodes ``diameter`` is the longest of the ways from 16 nodes, ``contraction`` an iterative estimate from below, and
    ``exact_average_after`` is found with 8 random vectors.

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
        return asdict(self)


def analyse(topology: Topology) -> Report:
    """Checks every examined round and the connectivity; raises a UsageError at the first fault."""
    rounds = [topology.weights(t) for t in range(topology.examined)]
    for t, weights in enumerate(rounds):
        check_weights(weights, f"{topology!r}, round {t}", doubly_stochastic=topology.doubly_stochastic)
    repeats = topology.period is not None
    connected_within = _connected_within(topology, rounds, repeats)
    return Report(
        nodes=topology.nodes,
        period=topology.period,
        degree=max(int(weights.out_degree.max()) for weights in rounds),
        doubly_stochastic=all(weights.doubly_stochastic for weights in rounds),
        connected_within=connected_within,
        diameter=_largest_diameter(rounds, connected_within, repeats),
        contraction=_contraction(rounds),
        exact_average_after=_exact_average_after(rounds, repeats),
    )


# Connectivity: unions of consecutive rounds


def check_connected(topology: Topology) -> None:
    """Raises a UsageError unless all examined rounds together lead from everybody to everybody."""
    rounds = [topology.weights(t) for t in range(topology.examined)]
    parts, labels = connected_components(_union(rounds, range(len(rounds))), connection="strong")
    if parts > 1:
        stranger = int(np.flatnonzero(labels != labels[0])[0])
        raise UsageError(
            f"{topology!r} never connects: its {len(rounds)} examined round(s) together have {parts} separate parts, "
            f"nodes 0 and {stranger} cannot reach each other both ways; add links between the parts"
        )


def _union(rounds: list[Weights], window: Iterable[int]) -> csr_array:
    """All links of some rounds."""
    first, *others = (rounds[t].matrix for t in window)
    return sum(others, first)


def _window(rounds: list[Weights], start: int, length: int) -> frozenset[int]:
    """The numbers of some rounds in a row; after the last one comes the first again."""
    return frozenset(t % len(rounds) for t in range(start, start + length))


def _connected_within(topology: Topology, rounds: list[Weights], repeats: bool) -> int:
    """The smallest B such that all windows of B rounds (that lie within the examined ones) connect.

    A window that contains a connected one is connected, so B only grows from one start to the next.
    """
    check_connected(topology)
    length = 1
    for start in range(len(rounds)):
        available = len(rounds) if repeats else len(rounds) - start
        while length <= available:
            union = _union(rounds, _window(rounds, start, length))
            if connected_components(union, connection="strong", return_labels=False) == 1:
                break
            length += 1
    return length


def _largest_diameter(rounds: list[Weights], length: int, repeats: bool) -> int:
    nodes, windows = rounds[0].nodes, len(rounds) if repeats else len(rounds) - length + 1
    starts = np.arange(nodes) if nodes <= EXACT_NODES else np.linspace(0, nodes - 1, 16).astype(np.int64)
    unions = (_union(rounds, w) for w in {_window(rounds, first, length) for first in range(windows)})
    return max(int(shortest_path(u, method="D", unweighted=True, indices=starts).max()) for u in unions)


# Mixing: the product of the weights over the rounds


def _contraction(rounds: list[Weights]) -> float:
    """The second singular value of the product; of many nodes by subspace iteration, from below. scipy's svds does not end where
    many singular values are nearly 1, as those of a long ring are."""
    nodes, matrices = rounds[0].nodes, [weights.matrix for weights in rounds]
    if nodes <= EXACT_NODES:
        return float(np.linalg.svd(_product(matrices, np.eye(nodes)), compute_uv=False)[1])
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((nodes, 4)))[0]
    values: NDArray[np.float64] = np.zeros(4)
    for _ in range(500):
        image = _product(matrices, basis)
        before, values = values, np.linalg.svd(image, compute_uv=False).astype(np.float64)
        if np.abs(values - before)[:2].max() <= 1e-10:
            break
        basis = np.linalg.qr(_product([matrix.T for matrix in reversed(matrices)], image))[0]
    return float(values[1])


def _product(matrices: Iterable[csr_array], x: Matrix) -> Matrix:
    for matrix in matrices:
        x = matrix @ x
    return x


def _exact_average_after(rounds: list[Weights], repeats: bool) -> int | None:
    """Looks for it over two periods: a product of rounds that is exact may begin late in the first."""
    nodes = rounds[0].nodes
    x = np.eye(nodes) if nodes <= EXACT_NODES else np.random.default_rng(0).standard_normal((nodes, 8))
    average = x.mean(axis=0)
    for t, weights in enumerate(rounds * 2 if repeats else rounds):
        x = weights.matrix @ x
        error = np.abs(x - average).max()
        if error <= EXACT:
            return t + 1
        if error <= CREEPING:
            return None
    return None


# Pictures


def draw(topology: Topology, file: str | Path) -> None:
    """Draws who sends to whom, one panel per phase (or the first 4 rounds), to an SVG or PNG file.

    Nodes stand on a circle, counted clockwise from the top; the thicker an arrow, the larger its weight;
    self-loops are not drawn; absent nodes are grey.
    """
    path = Path(file)
    if path.suffix.lower() not in FORMATS:
        raise unknown("picture format", path.suffix, FORMATS)
    if not path.parent.is_dir():
        raise UsageError(f"the directory {str(path.parent)!r} of the picture does not exist: create it first")
    with needs_extra("plots"):
        import matplotlib as mpl
        from matplotlib.figure import Figure

    panels = topology.period or SHOWN_ROUNDS
    columns = ceil(sqrt(panels))
    rows = ceil(panels / columns)
    # A fixed salt and no date: the same topology gives the same file.
    with mpl.rc_context({"svg.hashsalt": "dpps", "svg.fonttype": "none"}):
        figure = Figure(figsize=(3.4 * columns, 3.6 * rows + 0.5), layout="constrained")
        figure.suptitle(repr(topology), wrap=True)
        for t, axis in enumerate(figure.subplots(rows, columns, squeeze=False).ravel()):
            axis.set_axis_off()
            if t < panels:
                axis.set_title(f"round {t}" if topology.period is None else f"phase {t}", fontsize=10)
                _draw_round(axis, topology, t)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)


def _draw_round(axis: "Axes", topology: Topology, t: int) -> None:
    import networkx as nx

    graph = nx.from_scipy_sparse_array(topology.weights(t).matrix.T, create_using=nx.DiGraph)
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    values = [value for _, _, value in graph.edges(data="weight")]
    largest = max(values, default=1.0)
    widths = [0.3 + 1.2 * value / largest for value in values]  # in points
    angles = 2.0 * np.pi * np.arange(topology.nodes) / topology.nodes
    places = {node: (float(np.sin(angle)), float(np.cos(angle))) for node, angle in enumerate(angles)}
    present = topology.present(t)
    colours = [PRESENT if present is None or present[node] else ABSENT for node in graph.nodes]
    few = topology.nodes <= LABELLED_NODES
    size = 260 if topology.nodes <= 20 else 110 if few else 8
    nx.draw_networkx_nodes(graph, places, ax=axis, node_color=colours, node_size=size, linewidths=0)
    style = {"arrowsize": 9, "node_size": size, "connectionstyle": "arc3,rad=0.08"} if few else {}
    nx.draw_networkx_edges(graph, places, ax=axis, arrows=few, width=widths, edge_color=LINK, **style)
    if few:
        font = {"font_size": 8 if topology.nodes <= 20 else 5, "font_color": "white"}
        nx.draw_networkx_labels(graph, places, ax=axis, **font)
    axis.set_aspect("equal")
    axis.set(xlim=(-1.2, 1.2), ylim=(-1.2, 1.2))
