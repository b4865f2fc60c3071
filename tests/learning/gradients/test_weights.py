"""Weights of examples after the clip: they count, all engines agree, and no weight makes an example's part longer than the clip."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import dpps
from dpps.learning import Batched, Chains, OneByOne, Partition
from dpps.models import linear
from dpps.tasks import Classification

CLIP, NODES, BATCH, INPUTS = 0.3, 3, 8, 4


def batch(seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(NODES, BATCH, INPUTS, generator=generator)
    target = torch.randint(0, 2, (NODES, BATCH), generator=generator)
    mask = torch.arange(BATCH).expand(NODES, -1) < torch.tensor([[8], [5], [1]])
    return x, target, mask


def rows(partition: Partition) -> tuple[torch.Tensor, torch.Tensor]:
    s, l = partition.initial()
    return s.repeat(NODES, 1), l.repeat(NODES, 1)


def models() -> list[tuple[type, nn.Module]]:
    torch.manual_seed(0)
    mixed = nn.Sequential(nn.Linear(INPUTS, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2))
    return [(Chains, linear(INPUTS, 2)), (Batched, mixed), (OneByOne, mixed)]


@pytest.mark.parametrize(("kind", "model"), models(), ids=lambda v: getattr(v, "__name__", ""))
def test_every_engine_multiplies_the_clipped_gradient_by_its_weight(kind: type, model: nn.Module) -> None:
    partition = Partition(model, "all")
    x, target, mask = batch()
    task = Classification(("a", "b"), weights=(1.0, 4.0))
    found = kind(partition, F.cross_entropy, CLIP, BATCH, task.weigh).sums(*rows(partition), x, target, mask)
    plain = kind(partition, F.cross_entropy, CLIP, BATCH)
    parts = [
        plain.sums(*rows(partition), x, target, mask & (target == c))[1].double() * w
        for c, w in enumerate((0.25, 1.0))
    ]
    torch.testing.assert_close(found[1].double(), sum(parts), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("kind", "model"), models(), ids=lambda v: getattr(v, "__name__", ""))
@pytest.mark.parametrize("weight", [100.0, -5.0, float("nan"), float("inf")])
def test_no_weight_lets_an_example_move_the_sum_by_more_than_the_clip(
    kind: type, model: nn.Module, weight: float
) -> None:
    partition = Partition(model, "all")
    x, target, mask = batch()
    way = kind(partition, F.cross_entropy, CLIP, BATCH, lambda t: torch.full(t.shape, weight))
    for e in range(BATCH):
        less = mask.clone()
        less[:, e] = False
        with_it, without = (way.sums(*rows(partition), 50 * x, target, m)[1].double() for m in (mask, less))
        assert float((with_it - without).norm(dim=1).max()) <= CLIP


def test_a_rare_class_is_found_with_weights_and_not_without() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 200, INPUTS, generator=generator)
    target = (x[..., 0] + 0.7 * torch.randn(4, 200, generator=generator) > 1.6).long()
    nodes = [TensorDataset(*part) for part in zip(x, target, strict=True)]
    recalls = []
    for weights in (None, (1.0, 8.0)):
        task = Classification(("no", "yes"), weights=weights)
        algorithm = dpps.PartPSP(linear(INPUTS, 2), "all", lr_shared=0.3, batch_size=100, task=task)
        unit = dpps.Record(noise_multiplier=1.0, clip=0.1)
        run = dpps.Run(algorithm, nodes, topology="exp", privacy=unit, seed=0).fit(20)
        with torch.no_grad():
            found = run.models()[0](x.flatten(0, 1)).argmax(1)
        recalls.append(float((found[target.flatten() == 1] == 1).double().mean()))
    assert recalls[1] > recalls[0] + 0.3


def test_without_clipping_one_by_one_the_loss_is_weighted() -> None:
    x, target, _ = batch()
    task = Classification(("no", "yes"), weights=(1.0, 5.0))
    nodes = [TensorDataset(*part) for part in zip(x, target, strict=True)]
    own = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0]), reduction="none")
    ends = []
    for how in ({"task": task}, {"loss": own}):
        algorithm = dpps.SGP(linear(INPUTS, 2), "all", lr_shared=0.3, batch_size=BATCH, **how)
        ends.append(dpps.Run(algorithm, nodes, topology="exp", seed=0).fit(5).shared)
    torch.testing.assert_close(*ends)
