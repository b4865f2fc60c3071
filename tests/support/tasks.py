"""Tasks for tests: made-up tables in which the first input tells of the target, and the task that a page shows as one file."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpps.tasks import Task

INPUTS = 5


def _of_page() -> Any:
    """`Count` of docs/architecture.md, without its registration."""
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = next(b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Count(Task)" in b)
    names: dict[str, Any] = {"__name__": __name__}
    exec(block.partition("\n\n\ntask")[0].replace('@TASKS.register("count")', ""), names)
    return names["Count"]


Count = _of_page()


def made_up(task: Task, sizes: Sequence[int], seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of nodes of these sizes. Numbers are around 20, and lower where the first input is high; the last value of a
    category is the more likely the higher it is."""
    rng, nodes = np.random.default_rng(seed), []
    for size in sizes:
        x = rng.normal(size=(size, INPUTS))
        found = []
        for target in task.columns:
            if target.kind == "number":
                found.append(20 * np.exp(-0.7 * x[:, 0] + 0.2 * rng.normal(size=size)).round(3))
            else:
                found.append(
                    np.clip(x[:, 0] + 0.5 * rng.normal(size=size) + 0.5, 0, len(target.values) - 1).round()
                )
        nodes.append((torch.from_numpy(x).float(), task.targets(found)))
    return nodes
