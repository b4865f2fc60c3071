"""Per-example clipping: both ways agree, no random numbers, and one example counts at most the clip, whatever the rounding."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import dpps
from dpps.errors import UsageError
from dpps.learning import (
    Batched,
    Chains,
    OneByOne,
    Partition,
    PerExample,
    choose_per_example,
    is_chain,
)
from tests.support.learning import make_run, tiny

EXAMPLE = torch.zeros(6), torch.tensor(0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tiny(sizes=(6, 4, 5, 3)),
        lambda: dpps.models.MLPResidual(1, 6, 3),
        lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)),
    ],
)
def test_clipped_sums_of_both_ways_agree_and_each_example_counts_at_most_clip(make):
    torch.manual_seed(0)
    model = make()
    partition = Partition(model, [next(iter(model.named_parameters()))[0].split(".")[0]])
    s, l = partition.initial()
    y, local = s + torch.randn(4, len(s)), l + torch.randn(4, len(l))
    x, target, mask = torch.randn(4, 9, 6), torch.randint(0, 3, (4, 9)), torch.rand(4, 9) < 0.7
    quick = choose_per_example(partition, F.cross_entropy, (x[0, 0], target[0, 0]), clip=0.1)
    assert isinstance(quick, Chains) == is_chain(partition, 2)
    slow = OneByOne(partition, F.cross_entropy, 0.1)
    expected = slow.sums(y, local, x, target, mask)
    for way in (quick, Batched(partition, F.cross_entropy, 0.1)):
        for a, b in zip(way.sums(y, local, x, target, mask), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    alone = torch.zeros_like(mask)
    alone[:, 3] = True
    for way in (quick, slow):
        _, sum_s, sum_l = way.sums(y, local, x, target, alone)
        joint = torch.cat([sum_s, sum_l], 1).norm(dim=1)
        assert bool((joint <= 0.1).all())
        assert float(joint.max()) > 0.0999
    nobody = torch.zeros_like(mask)
    _, sum_s, sum_l = quick.sums(y, local, x, target, nobody)
    assert float(sum_s.abs().max()) == float(sum_l.abs().max()) == 0


def test_adding_one_example_moves_the_clipped_sum_by_at_most_clip():
    partition = Partition(tiny(), ["layer1"])
    s, l = partition.initial()
    x, target = torch.randn(1, 30, 6), torch.randint(0, 3, (1, 30))
    way = choose_per_example(partition, F.cross_entropy, (x[0, 0], target[0, 0]), clip=0.05)
    mask = torch.ones(1, 30, dtype=torch.bool)
    full = torch.cat(way.sums(s[None], l[None], x, target, mask)[1:], 1)
    for k in range(30):
        less = mask.clone()
        less[0, k] = False
        without = torch.cat(way.sums(s[None], l[None], x, target, less)[1:], 1)
        assert float((full - without).norm()) <= 0.05


class LowRank(nn.Linear):
    """A linear layer with two more parameters, as fine-tuning methods add them."""

    def __init__(self):
        super().__init__(6, 3)
        self.down, self.up = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(3, 2))

    def forward(self, x):
        return super().forward(x) + x @ self.down.T @ self.up.T


def tied():
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    return nn.Sequential(first, second)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(LowRank()),
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))),
        tied,
    ],
    ids=["low rank", "weight norm", "tied"],
)
def test_what_only_looks_like_a_chain_of_linear_layers_takes_the_general_way(make):
    model = make()
    way = choose_per_example(Partition(model, "all"), F.cross_entropy, EXAMPLE, clip=1.0)
    assert isinstance(way, Batched)


def test_an_example_that_is_not_finite_counts_as_zero_and_disturbs_nobody():
    partition = Partition(tiny(), ["layer1"])
    s, l = partition.initial()
    x, target = torch.randn(1, 6, 6), torch.randint(0, 3, (1, 6))
    for way in (kind(partition, F.cross_entropy, 1.0) for kind in (Chains, Batched, OneByOne)):
        mask = torch.tensor([[True] * 5 + [False]])
        mask[0, 2] = False
        expected = way.sums(s[None], l[None], x, target, mask)[1:]
        broken = x.clone()
        broken[0, 2], broken[0, 5] = float("inf"), float("nan")  # sampled below; padding
        mask[0, 2] = True
        for a, b in zip(way.sums(s[None], l[None], broken, target, mask)[1:], expected, strict=True):
            torch.testing.assert_close(a, b)


def test_other_errors_of_a_model_are_not_taken_for_randomness():
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.is_floating_point():
                raise RuntimeError("something else")
            return self.layer(x)

    way = OneByOne(Partition(Broken(), "all"), F.cross_entropy, 1.0)
    s, l = Partition(Broken(), "all").initial()
    with pytest.raises(RuntimeError, match="something else"):
        way.sums(
            s[None], l[None], torch.randn(1, 2, 6), torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2) > 0
        )


def aligned(batch: int) -> tuple[Partition, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Examples whose gradients all point the same way, each longer than the clip: rounding adds up, too."""
    partition = Partition(nn.Sequential(nn.Linear(3, 1, bias=False)), "all")
    y, _ = partition.initial()
    x = torch.tensor([0.3, 0.5, 0.7]).expand(1, batch, 3) * 100
    return partition, y[None], x, torch.ones(1, batch)


def linear(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs[:, 0] * targets).mean()


@pytest.mark.parametrize("way", [Chains, Batched])
@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (90, 100),
        (199, 100),
        (230, 100),
        (230, 200),
        (799, 500),
        (1_900, 1_000),
        (5_000, 100),
        (30_000, 30_000),
    ],
)
def test_one_example_more_moves_the_sum_by_at_most_clip_in_large_batches(way, batch, expected):
    partition, y, x, target = aligned(batch)
    own: PerExample = way(partition, linear, 0.1, expected)
    l = y.new_zeros(1, 0)
    full = torch.ones(1, batch, dtype=torch.bool)
    less = full.clone()
    less[0, batch // 3] = False
    more = own.sums(y, l, x, target, full)[1].double()
    moved = float((more - own.sums(y, l, x, target, less)[1].double()).norm())
    assert moved <= 0.1
    exact = 0.1 * (1 - own.margin) * batch
    assert float(more.norm()) == pytest.approx(exact, rel=own.margin / batch + 1e-7)


def test_the_margin_is_public_it_does_not_follow_the_batch_that_was_drawn():
    partition = Partition(nn.Linear(3, 1), "all")
    small, usual, large, huge = (OneByOne(partition, linear, 1.0, batch) for batch in (4, 100, 120, 20_000))
    assert small.margin < usual.margin <= 6.1e-3
    assert 1e-4 <= large.margin < 1.5e-3
    assert huge.margin == 1e-4
    assert (usual.narrow, large.narrow, huge.narrow) == (200, 240, 0)
    assert (large.piece, huge.piece) == (40, 0)


def test_a_sum_of_many_examples_keeps_its_digits_until_there_is_noise():
    """In float32 the sum of 20,000 examples moves by 0.001 clips more than it should when it is stored."""
    seen = []

    class Looks(dpps.Seeded):
        def release(self, mechanism, scale, out):
            seen.append(out.perturbation.dtype)
            return super().release(mechanism, scale, out)

        def for_local_part(self):
            return Looks(1)

    data = [TensorDataset(torch.randn(300, 4), torch.randint(0, 2, (300,)))] * 2
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    unit = dpps.Record(noise_multiplier=1.0)
    make_run(
        unit, shared=["0"], model=model, data=data, batch_size=300, topology=dpps.Ring(2), noise=Looks(0)
    ).start(epochs=1).step()
    assert seen == [torch.float64] * 2


@pytest.mark.parametrize("way", [Chains, Batched])
def test_squares_too_small_for_float32_let_no_gradient_pass_unclipped(way):
    """What comes back is 1e-23, whose square is 0 in float32, and what went in is 1e19: the gradient is 20 clips long."""
    model = nn.Sequential(nn.Linear(4, 200))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.zero_()
        model[0].bias[0] = 52.6
    partition, clip = Partition(model, "all"), 1e-4
    s, l = partition.initial()
    x = torch.tensor([[[1e19, 0.0, 0.0, 0.0]]])
    given = s[None], l[None], x, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool)
    assert float(way(partition, F.cross_entropy, clip).sums(*given)[1].norm()) <= clip
    assert float(way(partition, F.cross_entropy, 1.0).sums(*given)[1].norm()) > 0  # it is not left out


# One example after the other, failures and refusals


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
    leaves = dict(partition.model.named_parameters())
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
        Batched(Partition(own, "all"), F.cross_entropy, 0.1).sums(*moved, x, target, mask)
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

    way = Batched(Partition(Overwritten(), "all"), F.cross_entropy, 1.0)
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


@pytest.mark.parametrize("kind", [OneByOne, Batched])
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
    way = Batched(Partition(Squeamish(UsageError), "all"), F.cross_entropy, 1.0, batch=10)
    way.hides_failures = True
    hidden = sums(way, x, target)[1]
    torch.testing.assert_close(hidden, sums(way, x[[0, 2]], target[[0, 2]])[1])


@pytest.mark.parametrize("kind", [Chains, Batched, OneByOne])
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
    told = [r.getMessage() for r in caplog.records if "taught nothing" in r.getMessage()]
    assert [message.split()[:3] for message in told] == [["39", "of", "40"], ["390", "of", "400"]]
    if broken == "label":  # no mean over examples that were left out
        assert float(losses) > 0.3


def test_gradients_beyond_all_numbers_have_a_factor_of_zero():
    way = OneByOne(Partition(nn.Linear(2, 2), "all"), F.cross_entropy, 1.0)
    factors = way._factors(torch.tensor([1e78, 4.0, 0.25], dtype=torch.float64), torch.float32, None)
    assert factors.tolist() == pytest.approx([0.0, 0.5, 1.0], rel=1e-3)
