"""Making it faster changes no result: short seeded runs end where they ended before anything was made faster.

`seeded_runs.json` was written by this file (`python tests/test_same_results.py > tests/seeded_runs.json`) at commit
c441f42, before gradients of chains, convolutions of few pixels and per-example sums were written out.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpps
from dpps.models import SHARED

NODES, ROUNDS, BATCH = 4, 6, 20
UNITS: dict[str, Callable[[], Any]] = {
    "node-swap": lambda: dpps.NodeSwap(budget=5, sensitivity=dpps.Paper(0.78, 0.55)),
    "contribution": lambda: dpps.Contribution(clip=30.0, round_epsilon=100.0),
    "record": lambda: dpps.Record(clip=1.0, epsilon=8.0),
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": dpps.models.MLP,
    "mlp-residual": lambda: dpps.models.MLPResidual(1),
    "resnet18": dpps.models.ResNet18,
    "vit": dpps.models.ViT,
}
RUNS = [(m, u) for m in ("mlp", "mlp-residual") for u in UNITS] + [
    ("resnet18", "node-swap"),
    ("vit", "contribution"),
]


def _data(shape: tuple[int, ...], batch: int) -> list[TensorDataset]:
    generator = torch.Generator().manual_seed(5)
    centres, sets = torch.rand(10, *shape, generator=generator), []
    for _ in range(NODES):
        labels = torch.randint(0, 10, (ROUNDS * batch,), generator=generator)
        noise = 0.3 * torch.randn(len(labels), *shape, generator=generator)
        sets.append(TensorDataset(centres[labels] + noise, labels))
    return sets


def outcome(model: str, unit: str) -> dict[str, list[float]]:
    """Losses of every round, and where the parameters ended."""
    torch.manual_seed(1)
    large = not model.startswith("mlp")
    shape, batch = ((1, 28, 28), BATCH) if not large else ((3, 32, 32), 16)
    algorithm = dpps.PartPSP(
        MODELS[model](), SHARED[model]["1"], dpps.Exponential(NODES), UNITS[unit](), batch_size=batch, seed=3
    )
    run = algorithm.start(_data(shape, batch), epochs=1)
    losses = [float(run.round()[1].mean()) for _ in range(2 if large else ROUNDS)]
    ends = [float(part.double().norm()) for part in (run.state.s, run.local)]
    ends += [float(part.double().abs().sum()) for part in (run.state.s, run.local)]
    return {"losses": losses, "ends": ends}


@pytest.mark.parametrize(("model", "unit"), RUNS)
def test_a_seeded_run_ends_where_it_did(model: str, unit: str) -> None:
    before = json.loads((Path(__file__).parent / "seeded_runs.json").read_text())[f"{model} {unit}"]
    now = outcome(model, unit)
    assert now["losses"] == pytest.approx(before["losses"], rel=1e-4)
    assert now["ends"] == pytest.approx(before["ends"], rel=1e-4)


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump({f"{m} {u}": outcome(m, u) for m, u in RUNS}, sys.stdout, indent=1)
