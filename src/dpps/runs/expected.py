"""Which accuracy to expect of a run: read off curves that were measured with the rule's settings, where there are some.

`measured.csv` beside this file is the one place that has them: accuracies in percent over several seeds, with the commit that was
measured. Each line is of `dpps train --data D --features F --model M --shared all --unit record --epsilon E
--seed K` with all other options left open; scripts/recipes.py runs them.
"""

import csv
import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpps.runs.config import TrainConfig

_FILE = Path(__file__).with_name("measured.csv")


@dataclass(frozen=True)
class Expected:
    """A range of accuracies in percent.

    Attributes:
        low: of the seeds that were measured, or of the next smaller epsilon.
        high: of the seeds that were measured, or of the next larger epsilon.
        why: what it rests on.
    """

    low: float
    high: float
    why: str


@dataclass(frozen=True)
class Point:
    """What was measured at one epsilon."""

    epsilon: float
    mean: float
    lowest: float
    highest: float
    seeds: int
    commit: str


@cache
def curves() -> dict[tuple[str, str, str, int], tuple[Point, ...]]:
    """By data set, features, model and number of nodes: points in the order of epsilon."""
    found: dict[tuple[str, str, str, int], list[Point]] = {}
    with _FILE.open(newline="") as file:
        for row in csv.DictReader(file):
            key = row["data"], row["features"], row["model"], int(row["nodes"])
            epsilon, mean, low, high = (float(row[name]) for name in ("epsilon", "mean", "lowest", "highest"))
            found.setdefault(key, []).append(
                Point(epsilon, mean, low, high, int(row["seeds"]), row["commit"])
            )
    return {key: tuple(sorted(points, key=lambda p: p.epsilon)) for key, points in found.items()}


def expected(config: "TrainConfig", epsilon: float) -> Expected | None:
    """What runs with these options came to, or lay between; None where nothing alike was measured.

    Args:
        config: as the user gave it, so that it shows what was left to the rule.
        epsilon: total.
    """
    points = curves().get((config.data, config.features, config.model, config.nodes))
    by_rule = (config.batch_size, config.epochs, config.clip, config.momentum, config.lr_shared) == (
        None,
    ) * 5
    alike = config.unit == "record" and config.shared == "all" and config.split == "iid"
    plain = config.topology == "exp" and config.trust == "nobody" and not config.dropouts
    if points is None or not by_rule or not alike or not plain or config.declared_sizes is not None:
        return None
    for point in points:
        if math.isclose(point.epsilon, epsilon, rel_tol=0.05):
            return Expected(
                point.lowest,
                point.highest,
                f"{point.seeds} seeds at epsilon {point.epsilon:g}, commit {point.commit}",
            )
    for below, above in pairwise(points):
        if below.epsilon < epsilon < above.epsilon:
            why = f"measured at epsilon {below.epsilon:g} and {above.epsilon:g}, commit {above.commit}"
            return Expected(below.lowest, above.highest, why)
    first, last = points[0], points[-1]
    if epsilon > last.epsilon:
        return Expected(
            last.lowest, 100.0, f"nothing was measured beyond epsilon {last.epsilon:g}, commit {last.commit}"
        )
    return Expected(
        0.0, first.highest, f"nothing was measured below epsilon {first.epsilon:g}, commit {first.commit}"
    )
