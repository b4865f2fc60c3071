"""Pictures of topologies: one panel per phase."""

from math import ceil, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpps.errors import UsageError, needs_extra, unknown
from dpps.topology import Topology, Weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".svg", ".png")
"""The file endings ``draw`` understands."""

SHOWN_ROUNDS = 4
"""How many rounds are drawn of a topology that never repeats."""

LABELLED_NODES = 50
"""Up to this many nodes carry numbers and links carry arrow heads; beyond it they would only blot."""

PRESENT, ABSENT, LINK = "#1f5fa8", "#8c8c8c", "#555555"


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

    # A fixed salt and no date: the same topology gives the same file.
    with mpl.rc_context({"svg.hashsalt": "dpps", "svg.fonttype": "none"}):
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        _figure(topology).savefig(path, dpi=150, metadata=metadata)


def _figure(topology: Topology) -> "Figure":
    from matplotlib.figure import Figure

    panels = topology.period or SHOWN_ROUNDS
    columns = ceil(sqrt(panels))
    rows = ceil(panels / columns)
    figure = Figure(figsize=(3.4 * columns, 3.6 * rows + 0.5), layout="constrained")
    figure.suptitle(repr(topology), wrap=True)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for t, axis in enumerate(axes):
        axis.set_axis_off()
        if t < panels:
            axis.set_title(f"round {t}" if topology.period is None else f"phase {t}", fontsize=10)
            _panel(axis, topology, t)
    return figure


def _panel(axis: Any, topology: Topology, t: int) -> None:
    import networkx as nx

    graph, widths = _graph(topology.weights(t))
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


def _graph(weights: Weights) -> tuple[Any, list[float]]:
    """The links between different nodes, and how thick to draw each: the largest weight is 1.5 points."""
    import networkx as nx

    graph = nx.from_scipy_sparse_array(weights.matrix.T, create_using=nx.DiGraph)
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    values = [value for _, _, value in graph.edges(data="weight")]
    largest = max(values, default=1.0)
    return graph, [0.3 + 1.2 * value / largest for value in values]
