"""docs/figures/units.svg: what two situations each unit makes look alike."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Circle, Rectangle

INK, MARK, PALE = "#33415c", "#d1495b", "#c9d3e3"
NODES = ((0.5, 0.72), (0.2, 0.3), (0.8, 0.3))


def node(axis: Axes, x: float, y: float, examples: int, marked: set[int], whole: bool) -> None:
    """A node with its examples; marked ones may differ between the two situations."""
    axis.add_patch(
        Circle((x, y), 0.15, facecolor=MARK if whole else "white", alpha=0.25 if whole else 1, zorder=2)
    )
    axis.add_patch(
        Circle((x, y), 0.15, fill=False, edgecolor=MARK if whole else INK, linewidth=1.6, zorder=3)
    )
    for k in range(examples):
        dx, dy = (k % 3 - 1) * 0.07, (0.5 - k // 3) * 0.08
        colour = MARK if whole or k in marked else PALE
        axis.add_patch(Rectangle((x + dx - 0.022, y + dy - 0.022), 0.044, 0.044, facecolor=colour, zorder=4))


def panel(axis: Axes, title: str, caption: str, marked: dict[int, set[int]], whole: int | None) -> None:
    """Three nodes that talk to each other."""
    for (x0, y0), (x1, y1) in ((NODES[a], NODES[b]) for a, b in ((0, 1), (1, 2), (2, 0))):
        arrow = {"arrowstyle": "-|>", "color": INK, "shrinkA": 26, "shrinkB": 26, "linewidth": 1.2}
        axis.annotate("", (x1, y1), (x0, y0), arrowprops=arrow)
    for k, (x, y) in enumerate(NODES):
        node(axis, x, y, 6, marked.get(k, set()), whole == k)
    axis.set_title(title, fontsize=12, color=INK, fontweight="bold")
    axis.text(0.5, -0.02, caption, ha="center", va="top", fontsize=9, color=INK)
    axis.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    axis.axis("off")


def main() -> None:
    """Draw the three panels."""
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.9))
    panel(axes[0], "record", "one example more or less:\nall messages and models look alike", {1: {4}}, None)
    panel(axes[1], "contribution", "all data of one node replaced:\nall messages look alike", {}, 1)
    panel(axes[2], "node-swap (the paper)", "who sent this message?", {}, None)
    for k in (1, 2):
        x, y = NODES[k]
        axes[2].text(
            x, y, "?", ha="center", va="center", fontsize=24, color=MARK, fontweight="bold", zorder=5
        )
    out = Path(__file__).parent.parent / "docs" / "figures" / "units.svg"
    figure.savefig(out, bbox_inches="tight", metadata={"Date": None})
    print(out)


if __name__ == "__main__":
    main()
