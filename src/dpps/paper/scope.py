"""How much of a table or figure is asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dpps.errors import UsageError, unknown
from dpps.paper.cells import Cell

SEEDS = (2024, 2025, 2026)
MODELS = ("mlp", "resnet18", "vit")


@dataclass(frozen=True)
class Scope:
    """full: as in the paper. quick: minutes, on the embedded data set. smallest: seconds, to see that it works at all."""

    size: Literal["full", "quick", "smallest"] = "full"
    seeds: Sequence[int] = SEEDS
    models: Sequence[str] = MODELS
    bandwidth: float = 1e9
    """Bits a second."""

    def __post_init__(self) -> None:
        for model in self.models:
            if model not in MODELS:
                raise unknown("model", model, MODELS)
        if not self.seeds:
            raise UsageError("--seeds is 0: it must be 1 or more")
        if not 0 < self.bandwidth < float("inf"):
            raise UsageError(f"--bandwidth is {self.bandwidth}: it must be positive, in bits a second")

    @property
    def mark(self) -> str:
        """What must be said wherever numbers of this size stand compared with the authors'; nothing of the full one."""
        return (
            "" if self.size == "full" else f"{self.size} run on mnist-mini, not the paper's data and rounds"
        )

    def fit(self, cells: Sequence[Cell]) -> list[Cell]:
        """The cells at this size. A quick cell has as many rounds as a full one of two epochs, on the embedded data."""
        if self.size == "full":
            return list(cells)
        if self.size == "quick":
            return [replace(c, **_quick(c)) for c in cells]
        small: dict[str, Any] = {"data": "mnist-mini", "batch_size": 5, "tests": 20, "epochs": 1}
        return [replace(c, **small, examples=10 * c.nodes) for c in cells]


def _quick(cell: Cell) -> dict[str, Any]:
    """The embedded data; of the large models three rounds only."""
    if cell.model.startswith("mlp"):
        return {"data": "mnist-mini", "epochs": 12}
    few = {"epochs": 1, "examples": 3 * cell.nodes * cell.batch_size}
    return {"data": "mnist-mini", **few, "tests": 0 if cell.tests == 0 else 200}
