"""One example after the other: what every other way is compared with."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpps.errors import UsageError
from dpps.learning import (
    BookKeeping,
    Chains,
    Objective,
    OneByOne,
    Partition,
    add_to,
    gradient_of_one,
    leaves_of,
)
from tests.support.learning import tiny


class Squeamish(nn.Module):
    """Does not like negative numbers."""

    def __init__(self, says=ValueError):
        super().__init__()
        self.layer, self.says = nn.Linear(6, 3), says

    def forward(self, x):
        if bool((x < 0).any()):
            raise self.says("negative")
        return self.layer(x)


def sums(way, x, target):
    s, l = way.partition.initial()
    return way.sums(s[None], l[None], x[None], target[None], torch.ones(1, len(x), dtype=torch.bool))


def test_without_a_clip_the_sum_is_the_gradient_of_the_summed_loss():
    torch.manual_seed(0)
    partition = Partition(tiny(), ["layer1"])
    x, target = torch.randn(5, 6), torch.randint(0, 3, (5,))
    losses, sum_s, sum_l = sums(OneByOne(partition, F.cross_entropy, 1e6), x, target)
    leaves = leaves_of(partition.views(*partition.initial()))
    loss = F.cross_entropy(torch.func.functional_call(partition.model, leaves, (x,)), target, reduction="sum")
    expected = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    for slots, row in ((partition.shared, sum_s[0]), (partition.local, sum_l[0])):
        for slot in slots:
            found = row[slot.start : slot.stop]
            torch.testing.assert_close(found.float(), expected[slot.name].flatten(), rtol=1e-3, atol=1e-5)
    assert float(losses) == pytest.approx(float(loss.detach()) / 5, rel=1e-5)


@pytest.mark.parametrize("says", [ValueError, ZeroDivisionError, OverflowError, OSError])
def test_an_example_on_which_the_model_fails_is_hidden_only_where_that_is_asked_for(says):
    x, target = torch.rand(3, 6), torch.tensor([0, 1, 2])
    x[1] = -1.0
    way = OneByOne(Partition(Squeamish(says), "all"), F.cross_entropy, 1.0, batch=10)
    with pytest.raises(says, match="negative"):
        sums(way, x, target)
    way.hides_failures = True
    hidden = sums(way, x, target)[1]
    torch.testing.assert_close(hidden, sums(way, x[[0, 2]], target[[0, 2]])[1])


class Random(Squeamish):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.5))


def test_random_numbers_are_refused_also_where_failures_are_hidden():
    """They are the model's fault and not an example's: otherwise every example would silently count as none."""
    way = OneByOne(Partition(Random(), "all"), F.cross_entropy, 1.0)
    way.hides_failures = True
    with pytest.raises(UsageError, match="dropout"):
        sums(way, torch.rand(3, 6), torch.tensor([0, 1, 2]))


class Remembering(Squeamish):
    """Keeps the mean of what it has seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        self.seen += x.mean(0)
        return super().forward(x - self.seen / 1e6)


def test_a_model_that_keeps_something_of_its_examples_is_refused():
    """One that does not run on made-up examples is found out here only: what it keeps would carry an example into all others."""
    way = OneByOne(Partition(Remembering(), "all"), F.cross_entropy, 1.0)
    with pytest.raises(UsageError, match=r"seen: .*buffers"):
        sums(way, 1 + torch.rand(3, 6), torch.tensor([0, 1, 2]))


def test_a_loss_that_depends_on_no_parameter_has_gradient_zero():
    model = nn.Linear(2, 1)
    objective = Objective.of(lambda outputs, _: outputs.detach().sum())
    leaves = leaves_of(dict(model.named_parameters()))
    _, gradients = gradient_of_one(model, objective, leaves, torch.ones(2), torch.tensor(0))
    assert not any(bool(g.any()) for g in gradients.values())


def test_parameters_are_added_at_their_places():
    partition = Partition(nn.Linear(2, 1), "all")
    row = torch.ones(3)
    add_to(partition.shared, row, {"bias": torch.tensor([5.0])})
    assert sorted(row.tolist()) == [1.0, 1.0, 6.0]


def test_a_model_that_drops_an_axis_of_one_example_sees_the_example_twice():
    class Squeezes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            h = self.layer(x).squeeze()
            assert h.ndim == 2
            return h

    torch.manual_seed(0)
    model = Squeezes()
    x, target, objective = torch.randn(6), torch.tensor(1), Objective.of(F.cross_entropy)
    leaves = leaves_of(dict(model.named_parameters()))
    loss, gradients = gradient_of_one(model, objective, leaves, x, target)
    plain = gradient_of_one(
        model.layer, objective, leaves_of(dict(model.layer.named_parameters())), x, target
    )
    torch.testing.assert_close(loss, plain[0])
    torch.testing.assert_close(gradients["layer.weight"], plain[1]["weight"])


class Checkpointed(nn.Module):
    """Runs its layers forward again during the backward pass."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(6, 6), nn.Linear(6, 3), reentrant

    def forward(self, x):
        h = torch.tanh(checkpoint(self.first, x, use_reentrant=False))
        return checkpoint(self.second, h, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_run_again_with_the_parameters_of_the_node(reentrant):
    torch.manual_seed(0)
    model = Checkpointed(reentrant)
    plain = nn.Sequential(model.first, nn.Tanh(), model.second)
    x, target, mask = torch.randn(1, 4, 6), torch.randint(0, 3, (1, 4)), torch.ones(1, 4, dtype=torch.bool)
    moved = [(part + 0.5)[None] for part in Partition(model, "all").initial()]
    found, expected = (
        BookKeeping(Partition(own, "all"), F.cross_entropy, 0.1).sums(*moved, x, target, mask)
        for own in (model, plain)
    )
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-6)


def test_what_autograd_cannot_differentiate_is_refused_in_one_line():
    class Overwritten(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            h = torch.exp(self.first(x))
            return self.second(h) + h.add_(1).sum(1, keepdim=True)

    way = BookKeeping(Partition(Overwritten(), "all"), F.cross_entropy, 1.0)
    with pytest.raises(UsageError, match=r"Overwritten.*inplace"):
        sums(way, torch.randn(4, 6), torch.zeros(4, dtype=torch.int64))


class Backwards(nn.Module):
    """Its backward pass does not like negative numbers; forward it takes everything."""

    class Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, back):
            (x,) = ctx.saved_tensors
            if bool((x < 0).any()):
                raise ValueError("negative")
            return back

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x) + 0 * self.Step.apply(x + 0 * self.layer.weight.sum()).sum(1, keepdim=True)


@pytest.mark.parametrize("kind", [OneByOne, BookKeeping])
def test_a_failing_backward_pass_counts_as_zero_where_failures_are_hidden(kind, caplog):
    x, target = torch.rand(3, 6), torch.tensor([0, 1, 2])
    x[1] = -1.0
    way = kind(Partition(Backwards(), "all"), F.cross_entropy, 1.0, batch=10)
    with pytest.raises(UsageError, match="Backwards"):
        sums(way, x, target)
    way.hides_failures = True
    caplog.clear()
    losses, hidden, _ = sums(way, x, target)
    torch.testing.assert_close(hidden, sums(way, x[[0, 2]], target[[0, 2]])[1])
    assert torch.isfinite(losses).all()
    assert way.skipped.counts == {"GradientError": 1}
    assert [r for r in caplog.records if r.name.startswith("dpps.") and "1 of 3 " in r.getMessage()]


def test_an_error_of_dpps_is_an_examples_own_where_made_up_ones_were_fine():
    x, target = torch.rand(3, 6), torch.tensor([0, 1, 2])
    x[1] = -1.0
    way = BookKeeping(Partition(Squeamish(UsageError), "all"), F.cross_entropy, 1.0, batch=10)
    way.hides_failures = True
    hidden = sums(way, x, target)[1]
    torch.testing.assert_close(hidden, sums(way, x[[0, 2]], target[[0, 2]])[1])


@pytest.mark.parametrize("kind", [Chains, BookKeeping, OneByOne])
@pytest.mark.parametrize("broken", ["label", "input"])
def test_the_log_says_how_many_examples_were_left_out_once_and_when_they_are_many_more(kind, broken, caplog):
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    way = kind(Partition(model, "all"), F.cross_entropy, 1.0, batch=10)
    way.hides_failures = True
    x, target = torch.rand(40, 6), torch.zeros(40, dtype=torch.int64)
    if broken == "label":
        target[1:] = 17
    else:
        x[1:] = torch.nan
    for _ in range(20):
        losses = sums(way, x, target)[0]
    assert sum(way.skipped.counts.values()) == 20 * 39
    assert way.skipped.drawn == 20 * 40
    told = [r.getMessage() for r in caplog.records if r.name.endswith("per_example.skipped")]
    assert [message.split()[:3] for message in told] == [["39", "of", "40"], ["390", "of", "400"]]
    if broken == "label":  # no mean over examples that were left out
        assert float(losses) > 0.3
