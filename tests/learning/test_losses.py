"""Losses: class weights count in every unit, and a loss that would lose them in the unit record is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import dpps
from dpps.errors import UsageError
from dpps.learning import one_number

WEIGHT = torch.tensor([1.0, 1.0, 5.0])


def weighted_mean(outputs, targets):
    return F.cross_entropy(outputs, targets, weight=WEIGHT)


def weighted_each(outputs, targets):
    return F.cross_entropy(outputs, targets, weight=WEIGHT, reduction="none")


def step(loss, unit, target: int, engine="auto", model=None) -> torch.Tensor:
    """How far the shared parameters move in one round on examples of one class; no noise to speak of."""
    torch.manual_seed(0)
    own = model or nn.Linear(4, 3)
    x = torch.tensor([0.1, -0.2, 0.3, 0.05]).repeat(8, 1)
    data = [TensorDataset(x, torch.full((8,), target))] * 2
    algorithm = dpps.PartPSP(own, loss=loss, batch_size=8, lr_shared=1.0)
    options = {"topology": dpps.Complete(2), "privacy": unit, "seed": 0, "engine": engine}
    learner = dpps.Run(algorithm, data, **options).start(epochs=1)
    before = learner.state.shared.s.clone()
    learner.step()
    return learner.state.shared.s[0] - before[0]


UNITS = [
    None,
    dpps.Record(noise_multiplier=1e-7, clip=1e3),
    dpps.Contribution(clip=1e3, round_epsilon=1e9),
    dpps.NodeSwap(budget=1e9),
]


@pytest.mark.parametrize("unit", UNITS, ids=lambda u: u.name if u else "none")
@pytest.mark.parametrize("model", [None, lambda: nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))])
def test_class_weights_work_in_every_unit(unit, model):
    plain, heavy = (step(loss, unit, 2, model=model and model()) for loss in (F.cross_entropy, weighted_each))
    if model:  # two different starts: compare within one model
        torch.manual_seed(1)
        built = model()
        plain, heavy = (step(loss, unit, 2, model=built) for loss in (F.cross_entropy, weighted_each))
    assert float(plain.norm()) > 0.01
    torch.testing.assert_close(heavy, 5 * plain, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("engine", ["loop", "vectorised"])
def test_one_loss_per_example_is_averaged_by_every_engine(engine):
    torch.testing.assert_close(
        step(weighted_each, None, 2, engine), step(weighted_mean, None, 2, engine) * 5, rtol=1e-4, atol=1e-6
    )


def test_a_weighted_mean_is_refused_in_the_unit_record_with_the_remedy():
    for loss in (weighted_mean, nn.CrossEntropyLoss(weight=WEIGHT)):
        with pytest.raises(UsageError, match='reduction="none"'):
            step(loss, UNITS[1], 2)
        step(loss, UNITS[2], 2)  # elsewhere it is what it always was


def test_losses_that_engines_know_stay_themselves():
    assert one_number(F.cross_entropy) is F.cross_entropy
    assert float(one_number(weighted_each)(torch.zeros(2, 3), torch.tensor([0, 2]))) == pytest.approx(
        3 * float(torch.log(torch.tensor(3.0)))
    )
