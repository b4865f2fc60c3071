r"""How much better one model is than another, measured on the same examples, and how much of it may be chance.

An example's difference $d_e$ is 1 where only the second model is right, -1 where only the first is, and 0 where both are
right or both wrong. Two models are right on mostly the same examples, so the mean of these paired differences is far more certain than
the difference of two accuracies measured apart.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

CONFIDENCE = 1.96
"""Standard errors to either side of an estimate that cover the truth in 95 % of cases."""


@dataclass(frozen=True)
class Change:
    """The change of an accuracy from one model to another, in percentage points."""

    points: float
    standard_error: float
    examples: int
    """How many examples it was measured on."""

    @property
    def margin(self) -> float:
        """Half the width of the 95 % interval."""
        return CONFIDENCE * self.standard_error

    @property
    def shown(self) -> bool:
        """Whether the 95 % interval excludes zero."""
        return abs(self.points) > self.margin

    def __str__(self) -> str:
        return f"{self.points:+.1f} ± {self.margin:.1f} points"


@dataclass(frozen=True)
class Comparison:
    """Of all nodes: their mean, which counts every node the same, and the pool, which counts every example the same."""

    mean: Change
    pooled: Change
    by_node: Sequence[Change]
    """Empty where all nodes are measured on one common test set."""

    def to_json(self) -> dict[str, Any]:
        """For summary.json."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Comparison":
        """What `to_json` wrote."""
        by_node = tuple(Change(**each) for each in found["by_node"])
        return cls(Change(**found["mean"]), Change(**found["pooled"]), by_node)


def change(before: ArrayLike, after: ArrayLike) -> Change:
    r"""The change on one set of examples.

    With $S_1 = \sum_e d_e$ and $S_2 = \sum_e d_e^2$ the variance of the mean difference is
    $\left[\frac{S_2 + 1}{n + 2} - \left(\frac{S_1}{n + 2}\right)^2\right] / n$. The two examples added, of which one is a gain or a
    loss, keep it above zero where two models agree on every one of a few examples.

    Args:
        before: for every example whether the first model is right; or the share of several models that are.
        after: the same for the second model.
    """
    differences = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    n, added = len(differences), len(differences) + 2
    mean_square, mean = (np.square(differences).sum() + 1) / added, differences.sum() / added
    error = math.sqrt((mean_square - mean**2) / n)
    return Change(100 * float(differences.mean()), 100 * error, n)


def compare_by_node(before: Sequence[ArrayLike], after: Sequence[ArrayLike]) -> Comparison:
    """Two models of every node, each on examples of that node's own."""
    nodes = [change(*pair) for pair in zip(before, after, strict=True)]
    sizes = [node.examples for node in nodes]
    return Comparison(
        _weighted(nodes, [1 / len(nodes)] * len(nodes)),
        _weighted(nodes, [size / sum(sizes) for size in sizes]),
        tuple(nodes),
    )


def compare_on_one_set(before: Sequence[ArrayLike], after: Sequence[ArrayLike]) -> Comparison:
    """Two models of every node, all on the same examples. An example is drawn once for all of them, so its differences are averaged first."""
    first, second = (np.mean(np.asarray(right, dtype=np.float64), axis=0) for right in (before, after))
    found = change(first, second)
    return Comparison(found, found, ())


def _weighted(nodes: Sequence[Change], weights: Sequence[float]) -> Change:
    """Nodes hold different people, so their errors are independent."""
    points = math.fsum(w * node.points for w, node in zip(weights, nodes, strict=True))
    variance = math.fsum((w * node.standard_error) ** 2 for w, node in zip(weights, nodes, strict=True))
    return Change(points, math.sqrt(variance), sum(node.examples for node in nodes))
