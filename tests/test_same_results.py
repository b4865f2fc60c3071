"""Making it faster changes no result: a seeded run with every shortcut ends where the plain way ends, in the same process.

Nothing here is compared with a stored number: what a convolution gives differs between processors, and two rounds of noise make
more of it.
"""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpps
from dpps.learning import OneByOne
from dpps.models import shared_prefixes

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
    "vit": lambda: dpps.models.ViT(layers=1, width=32, mlp=64),  # one of its equal layers
}
SMALL = [(m, u) for m in ("mlp", "mlp-residual") for u in UNITS]
LARGE = [("resnet18", "node-swap"), ("vit", "contribution")]


def _data(shape, batch, dtype):
    generator = torch.Generator().manual_seed(5)
    centres, sets = torch.rand(10, *shape, generator=generator), []
    for _ in range(NODES):
        labels = torch.randint(0, 10, (ROUNDS * batch,), generator=generator)
        noise = 0.3 * torch.randn(len(labels), *shape, generator=generator)
        sets.append(TensorDataset((centres[labels] + noise).to(dtype), labels))
    return sets


@contextmanager
def _threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _plain():
    """One thread, and every example differentiated by itself."""
    ways = {
        name: mock.patch(f"dpps.learning.gradients.choose.{name}", OneByOne) for name in ("Chains", "Batched")
    }
    with _threads(1), ways["Chains"], ways["Batched"]:
        yield


def outcome(model, unit, dtype, engine):
    """Losses of every round, and where the parameters ended."""
    torch.manual_seed(1)
    large = not model.startswith("mlp")
    shape, batch = ((1, 28, 28), BATCH) if not large else ((3, 32, 32), 4)
    run = dpps.Run(
        dpps.PartPSP(MODELS[model]().to(dtype), shared_prefixes(model, "1"), batch_size=batch),
        _data(shape, batch, dtype),
        topology=dpps.Exponential(NODES),
        privacy=UNITS[unit](),
        seed=3,
        engine=engine,
    ).start(epochs=1)
    rounds = range(2 if large else ROUNDS)
    losses = torch.stack([run.algorithm.step(run.nodes, run.state).losses for _ in rounds])
    return {"losses": losses, "shared": run.state.shared.s.clone(), "local": run.local.clone()}


def _compare(model, unit, dtype, tolerance):
    with _threads(2):
        fast = outcome(model, unit, dtype, "auto")
    with _plain():
        plain = outcome(model, unit, dtype, "loop")
    for name, found in fast.items():
        assert found.dtype == dtype
        apart = float((found - plain[name]).norm() / plain[name].norm())
        assert apart < tolerance, name


@pytest.mark.parametrize(("model", "unit"), SMALL + LARGE)
def test_a_fast_run_ends_where_the_plain_one_does(model, unit):
    _compare(model, unit, torch.float64, 1e-9)


@pytest.mark.parametrize(("model", "unit"), SMALL)
def test_the_same_in_single_precision_which_has_shortcuts_of_its_own(model, unit):
    _compare(model, unit, torch.float32, 1e-4)


def test_the_plain_way_is_another_way():
    """Otherwise the tests above would compare a run with itself."""
    fast = outcome("mlp", "record", torch.float32, "auto")
    with _plain():
        plain = outcome("mlp", "record", torch.float32, "loop")
    assert not torch.equal(fast["losses"], plain["losses"])
