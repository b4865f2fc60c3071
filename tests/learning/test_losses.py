"""Losses: class weights count in every unit, and a loss that would lose them in the unit record is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import dpps
from dpps.errors import UsageError
from dpps.learning import one_number, refuse_inseparable

WEIGHT = torch.tensor([1.0, 1.0, 5.0])


def weighted_mean(outputs, targets):
    return F.cross_entropy(outputs, targets, weight=WEIGHT)


def weighted_each(outputs, targets):
    return F.cross_entropy(outputs, targets, weight=WEIGHT, reduction="none")


def weighted_sum(outputs, targets):
    return F.cross_entropy(outputs, targets, weight=WEIGHT, reduction="sum")


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


def test_one_weight_among_a_thousand_classes_is_found():
    weight = torch.ones(1000)
    weight[777] = 1.5
    with pytest.raises(UsageError, match='reduction="none"'):
        refuse_inseparable(nn.CrossEntropyLoss(weight), nn.Linear(4, 1000), torch.zeros(4), torch.tensor(0))


@pytest.mark.parametrize(
    ("loss", "model", "target"),
    [
        (F.cross_entropy, nn.Linear(4, 3), torch.tensor(1)),
        (nn.CrossEntropyLoss(label_smoothing=0.1), nn.Linear(4, 3), torch.tensor(1)),
        (weighted_each, nn.Linear(4, 3), torch.tensor(1)),
        (weighted_sum, nn.Linear(4, 3), torch.tensor(1)),
        (F.mse_loss, nn.Linear(4, 2), torch.zeros(2)),
        (nn.HuberLoss(), nn.Linear(4, 2), torch.zeros(2)),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0])), nn.Linear(4, 1), torch.zeros(1)),
        (nn.BCELoss(), nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()), torch.zeros(1)),
        (
            lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()),
            nn.Unflatten(1, (2, 2)),
            torch.zeros(2).long(),
        ),
    ],
)
def test_means_sums_and_single_losses_are_accepted(loss, model, target, caplog):
    refuse_inseparable(loss, model, torch.zeros(4), target)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("loss", "model", "target"),
    [
        (nn.CrossEntropyLoss(ignore_index=0), nn.Linear(4, 3), torch.tensor(1)),  # the mean of the others
        (F.mse_loss, nn.Linear(4, 1), torch.tensor(0.0)),  # broadcast: every output against every target
        (lambda o, t: (o - o.mean(0) - t).square().mean(), nn.Linear(4, 2), torch.zeros(2)),
        (lambda o, t: F.mse_loss(o, t).sqrt(), nn.Linear(4, 2), torch.zeros(2)),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_what_mixes_examples_is_refused(loss, model, target):
    with pytest.raises(UsageError, match='reduction="none"'):
        refuse_inseparable(loss, model, torch.zeros(4), target)


def test_the_trial_says_nothing_about_the_data_and_what_cannot_be_tried_is_said(caplog):
    seen = []

    def loss(outputs, targets):
        seen.append((outputs, targets))
        return F.mse_loss(outputs, targets)

    refuse_inseparable(loss, nn.Linear(4, 2), torch.full((4,), torch.nan), torch.full((2,), torch.nan))
    assert all(bool(torch.isfinite(v).all()) for pair in seen for v in pair)
    model = nn.Linear(4, 2)
    refuse_inseparable(lambda o, t: o["logits"].mean(), model, torch.zeros(4), torch.tensor(1))
    assert "too many indices" in caplog.text
    assert model.training


def test_losses_that_engines_know_stay_themselves():
    assert one_number(F.cross_entropy) is F.cross_entropy
    assert float(one_number(weighted_each)(torch.zeros(2, 3), torch.tensor([0, 2]))) == pytest.approx(
        3 * float(torch.log(torch.tensor(3.0)))
    )
