"""How models are called: inputs by position and by name, parameters in place of the model's own, wrapped logits."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpps.errors import UsageError
from dpps.learning import ModelLoss, call_model, in_short, logits_of, loss_of, pick, tensors_in, unwritten


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
