"""One loss per example, of losses that are means over a batch."""

import logging

import pytest
import torch
import torch.nn.functional as F

from dpps.learning import ExampleLosses


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
