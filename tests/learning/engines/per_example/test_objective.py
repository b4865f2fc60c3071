"""From a model and a batch to one loss per example, whoever calls the model."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpps.learning import IrregularModel, ModelLoss, Objective

X, TARGET = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])


def both_ways(loss):
    """Of every example by itself, and of the batch at once."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    parameters, objective = dict(model.named_parameters()), Objective.of(loss)
    alone = [objective.whole(model, parameters, X[k : k + 1], TARGET[k : k + 1]) for k in range(4)]
    return torch.stack(alone), objective.each(model, parameters, X, TARGET, 4)


@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        ModelLoss(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])),
        ModelLoss(lambda model, batch: F.cross_entropy(model(batch[0]) + model(2 * batch[0]), batch[1])),
    ],
    ids=["of outputs", "calls the model", "calls it twice"],
)
def test_every_example_has_the_loss_of_a_batch_of_its_own(loss):
    torch.testing.assert_close(*both_ways(loss))


def asks(times_alone, times_together):
    def loss(model, batch):
        times = times_alone if len(batch[0]) == 1 else times_together
        return F.cross_entropy(sum(model(batch[0]) for _ in range(times)), batch[1])

    return ModelLoss(loss)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (asks(2, 1), "more often"),
        (asks(1, 2), "less often"),
        (ModelLoss(lambda model, batch: model(batch[0]).mean()), None),
    ],
)
def test_a_loss_must_ask_the_model_the_same_whatever_the_batch(loss, message):
    if message is None:
        torch.testing.assert_close(*both_ways(loss))
        return
    with pytest.raises(IrregularModel, match=message):
        both_ways(loss)


def test_an_answer_for_the_whole_batch_cannot_be_taken_apart():
    class Mean(nn.Linear):
        def forward(self, x):
            return super().forward(x).mean()

    model = Mean(3, 2)
    objective = Objective.of(ModelLoss(lambda m, batch: m(batch[0])))
    with pytest.raises(IrregularModel, match="logits"):
        objective.each(model, dict(model.named_parameters()), X, TARGET, 4)
