"""Draws Figure 1 of the paper anew: full against partial communication. Writes docs/figures/communication.svg."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

TARGET = Path(__file__).parent.parent / "docs" / "figures" / "communication.svg"
SHARED, LOCAL, EDGE = "#9ec5ec", "#f4e3c1", "#333333"
LAYERS, WIDTH, HEIGHT = 4, 1.1, 0.5
PLACES = {1: (0.0, 0.0), 2: (3.4, 0.0), 3: (1.7, 3.1)}
LINKS = [(1, 2), (2, 3), (3, 1)]


def draw(path: Path) -> None:
    """Both panels, to an SVG that is the same at every run."""
    with mpl.rc_context({"svg.hashsalt": "dpps", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 4.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        panel(
            left,
            LAYERS,
            "full communication: $d_s = d$\nevery parameter is sent, so every parameter gets noise",
        )
        panel(
            right, 1, "partial communication: $d_s < d$\nlocal parameters stay at their node, without noise"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})


def panel(axis: Any, shared: int, title: str) -> None:
    """Three nodes in a circle; the lowest `shared` layers of each are sent."""
    axis.set_axis_off()
    axis.set_title(title, fontsize=10)
    axis.set(xlim=(-0.6, 5.1), ylim=(-0.6, 5.8), aspect="equal")
    for node, place in PLACES.items():
        column(axis, node, place, shared)
    for sender, receiver in LINKS:
        arrow(axis, sender, receiver, shared)


def column(axis: Any, node: int, place: tuple[float, float], shared: int) -> None:
    """A node: its layers from input (bottom) to output."""
    x, y = place
    for layer in range(LAYERS):
        sent = layer < shared
        box = (x, y + layer * HEIGHT)
        axis.add_patch(Rectangle(box, WIDTH, HEIGHT, facecolor=SHARED if sent else LOCAL, edgecolor=EDGE))
        text = f"$s_{node} + \\gamma_n n_{node}$" if sent else f"$l_{node}$"
        axis.text(x + WIDTH / 2, box[1] + HEIGHT / 2, text, ha="center", va="center", fontsize=8)
    axis.text(x + WIDTH / 2, y + LAYERS * HEIGHT + 0.08, f"node {node}", ha="center", va="bottom", fontsize=9)


def arrow(axis: Any, sender: int, receiver: int, shared: int) -> None:
    """From the shared part of one node to that of another; the more is sent, the thicker."""
    middle = shared * HEIGHT / 2
    (x0, y0), (x1, y1) = PLACES[sender], PLACES[receiver]
    start = (x0 + (WIDTH if x1 > x0 else 0), y0 + middle)
    end = (x1 + (0 if x1 > x0 else WIDTH), y1 + middle)
    line = FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, shrinkA=2, shrinkB=2)
    line.set(linewidth=0.8 * shared, color="#1f5fa8")
    axis.add_patch(line)


if __name__ == "__main__":
    draw(TARGET)
