"""How models are called: inputs by position and by name, parameters in place of the model's own, wrapped logits."""

import logging
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpps.errors import UsageError
from dpps.learning import ModelLoss, call_model, in_short, logits_of, loss_of, pick, tensors_in, unwritten
from dpps.learning.gradients.calling import ExampleLosses


class Added(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, a, b):
        return self.scale * (a + b)


A, B = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])


@pytest.mark.parametrize("x", [(A, B), [A, B], {"a": A, "b": B}, {"b": B, "a": A}])
def test_inputs_go_by_position_or_by_name_with_the_parameters_that_are_given(x):
    model = Added()
    assert call_model(model, {"scale": torch.full((1,), 2.0)}, x).tolist() == [22.0, 44.0]
    assert model.scale.tolist() == [1.0]


def test_wrapped_logits_are_the_outputs():
    assert logits_of(SimpleNamespace(logits=A)) is A
    other = SimpleNamespace(logits="no tensor")
    assert logits_of(other) is other
    assert logits_of(A) is A


def test_a_loss_may_call_the_model_itself_and_then_has_no_value_for_outputs():
    model, tensors = Added(), {"scale": torch.full((1,), 3.0)}
    by_itself = ModelLoss(lambda m, batch: m(*batch[0]).sum() - batch[1])
    assert float(loss_of(model, tensors, (A, B), torch.tensor(9.0), by_itself)) == 3 * 33 - 9
    assert float(loss_of(model, tensors, (A, B), A, F.mse_loss)) == float(F.mse_loss(3 * (A + B), A))
    with pytest.raises(TypeError, match="ModelLoss"):
        by_itself(A, B)


def test_parts_and_tensors_of_nested_batches():
    batch = {"x": torch.arange(6).view(3, 2), "rest": (torch.arange(3), "text")}
    assert pick(batch, 1)["x"].tolist() == [2, 3]
    assert pick(batch, slice(1, 3))["rest"][0].tolist() == [1, 2]
    assert pick(batch, 0)["rest"][1] == "text"
    assert [part.ndim for part in tensors_in(batch)] == [2, 1]


def test_a_model_that_writes_over_its_parameters_is_refused():
    table, other = torch.ones(3, 2), torch.ones(2)
    with unwritten((table, other)):
        F.embedding(torch.tensor([1]), table)
    with pytest.raises(UsageError, match="max_norm"), unwritten((table, other)):
        F.embedding(torch.tensor([1]), table, max_norm=0.5)


def test_an_error_that_says_nothing_goes_by_its_name():
    assert in_short(AssertionError()) == "AssertionError"
    assert in_short(ValueError("one\ntwo")) == "one"


def one_by_one(loss, outputs, target):
    return torch.stack([loss(outputs[k : k + 1], target[k : k + 1]) for k in range(len(outputs))])


@pytest.mark.parametrize(
    ("loss", "outputs", "target"),
    [
        (F.cross_entropy, torch.randn(5, 3), torch.randint(0, 3, (5,))),
        (F.cross_entropy, torch.randn(5, 3, 4), torch.randint(0, 3, (5, 4))),
        (F.mse_loss, torch.randn(5, 2, 3), torch.randn(5, 2, 3)),
        (F.binary_cross_entropy_with_logits, torch.randn(5), torch.rand(5)),
        (
            lambda o, t: F.cross_entropy(o, t) + o.square().mean(),
            torch.randn(5, 3),
            torch.randint(0, 3, (5,)),
        ),
    ],
    ids=["classes", "classes by position", "squares", "logits", "own"],
)
def test_every_example_has_the_loss_of_a_batch_of_its_own(loss, outputs, target):
    found = ExampleLosses(loss)(outputs, target, 5)
    torch.testing.assert_close(found, one_by_one(loss, outputs, target))


def test_outputs_and_targets_may_be_nested():
    outputs, target = (
        {"a": torch.randn(4, 3), "b": torch.randn(4)},
        (torch.randint(0, 3, (4,)), torch.randn(4)),
    )

    def loss(o, t):
        return F.cross_entropy(o["a"], t[0]) + F.mse_loss(o["b"], t[1])

    expected = (
        F.cross_entropy(outputs["a"], target[0], reduction="none") + (outputs["b"] - target[1]).square()
    )
    torch.testing.assert_close(ExampleLosses(loss)(outputs, target, 4), expected)


def test_a_loss_that_looks_at_its_values_is_asked_for_one_example_after_the_other_with_one_notice(caplog):
    def loss(o, t):
        return o.square().mean() if float(t.sum()) > 0 else o.abs().mean()

    outputs, target = torch.randn(4, 3), torch.tensor([1.0, -1.0, 1.0, -1.0])
    losses = ExampleLosses(loss)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            torch.testing.assert_close(losses(outputs, target, 4), one_by_one(loss, outputs, target))
    assert len(caplog.records) == 1
