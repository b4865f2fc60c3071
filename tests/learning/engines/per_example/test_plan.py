"""Plans: found on made-up examples, checked against autograd, and refused where a model does not keep examples apart."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpps.learning import (
    Batches,
    General,
    IrregularModel,
    Objective,
    Recorder,
    gradient_of_one,
    leaves_of,
    make_plan,
    run,
)

EXAMPLE = torch.zeros(4), torch.tensor(0)


class Model(nn.Module):
    """A linear layer and something done to what comes out."""

    def __init__(self, then):
        super().__init__()
        self.layer, self.scale, self.then = nn.Linear(4, 3), nn.Parameter(torch.rand(3)), then

    def forward(self, x):
        return self.then(self, self.layer(x))


def plan_of(then):
    torch.manual_seed(0)
    model = Model(then)
    return model, make_plan(
        model, Objective.of(F.cross_entropy), dict(model.named_parameters()), Batches.like(EXAMPLE)
    )


@pytest.mark.parametrize(
    ("then", "names"),
    [
        (lambda m, h: h * m.scale, ["linear", "mul"]),
        (lambda m, h: torch.logaddexp(h, m.scale), ["linear", "logaddexp"]),
        (lambda m, h: h @ m.layer.weight @ m.layer.weight.T, ["linear", "matmul", "T", "matmul"]),
    ],
    ids=["a rule", "no rule", "a weight used three times"],
)
def test_real_batches_give_what_autograd_gives(then, names):
    model, plan = plan_of(then)
    assert [site.name for site in plan.sites] == names
    assert any(isinstance(site.rule, General) for site in plan.sites) == ("logaddexp" in names)
    assert plan.numbers > 0
    objective, leaves = Objective.of(F.cross_entropy), leaves_of(dict(model.named_parameters()))
    x, target = torch.randn(5, 4), torch.randint(0, 3, (5,))
    found = run(model, objective, leaves, Recorder(leaves, plan.sites, 5, plan.fast_formats), x, target, 5)
    factors, expected = torch.rand(5), {}
    for k in range(5):
        loss, gradients = gradient_of_one(model, objective, leaves, x[k], target[k])
        squares = sum(g.double().square().sum() for g in gradients.values())
        torch.testing.assert_close(found.squares[k], squares, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.losses[k], loss)
        expected = {name: expected.get(name, 0) + factors[k] * g for name, g in gradients.items()}
    for name, total in found.totals(factors).items():
        torch.testing.assert_close(total, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("then", "message"),
    [
        (lambda m, h: h + m.scale * h.sum(0), "."),
        (lambda m, h: h - h.mean(0), "the others"),
        (lambda m, h: h * h.sum(), "the others"),
        (lambda m, h: (h[:2] * m.scale).repeat(len(h), 1)[: len(h)], "."),
        (lambda m, h: h * m.scale if len(h) == 2 else h, "number of"),
    ],
    ids=["a sum meets a weight", "a mean", "a sum", "the first two only", "another way for two"],
)
def test_models_that_mix_examples_have_no_plan(then, message):
    with pytest.raises(IrregularModel, match=message):
        plan_of(then)
