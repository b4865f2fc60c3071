"""Per-example clipping: both ways agree, no random numbers, and one example counts at most the clip, whatever the rounding."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import dpps
from dpps.errors import UsageError
from dpps.learning import (
    BookKeeping,
    Chains,
    OneByOne,
    Partition,
    PerExample,
    is_chain,
    per_example,
    squared_norms,
)
from tests.support.learning import tiny


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
    quick = per_example(partition, F.cross_entropy, 0.1, x[0, 0])
    assert isinstance(quick, Chains) == is_chain(partition, 2)
    slow = OneByOne(partition, F.cross_entropy, 0.1)
    expected = slow.sums(y, local, x, target, mask)
    for way in (quick, BookKeeping(partition, F.cross_entropy, 0.1)):
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
    way = per_example(partition, F.cross_entropy, 0.05, x[0, 0])
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


class Centre(nn.Module):
    """Mixes the examples of a batch, below an innocent container."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        h = self.inner(x)
        return h - h.mean(0)


def tied():
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    return nn.Sequential(first, second)


def hooked():
    model = nn.Sequential(nn.Linear(6, 3))
    model[0].register_forward_hook(lambda _, __, out: out - out.mean(0))
    return model


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
    way = per_example(Partition(model, "all"), F.cross_entropy, 1.0, torch.randn(6))
    assert isinstance(way, BookKeeping)


def test_an_example_that_is_not_finite_counts_as_zero_and_disturbs_nobody():
    partition = Partition(tiny(), ["layer1"])
    s, l = partition.initial()
    x, target = torch.randn(1, 6, 6), torch.randint(0, 3, (1, 6))
    for way in (kind(partition, F.cross_entropy, 1.0) for kind in (Chains, BookKeeping, OneByOne)):
        mask = torch.tensor([[True] * 5 + [False]])
        mask[0, 2] = False
        expected = way.sums(s[None], l[None], x, target, mask)[1:]
        broken = x.clone()
        broken[0, 2], broken[0, 5] = float("inf"), float("nan")  # sampled below; padding
        mask[0, 2] = True
        for a, b in zip(way.sums(s[None], l[None], broken, target, mask)[1:], expected, strict=True):
            torch.testing.assert_close(a, b)


class Mixes(nn.Module):
    """Mixes the examples of a batch before its only layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x - x.mean(0))


@pytest.mark.parametrize(
    "make",
    [Mixes, hooked, lambda: nn.Sequential(Centre(), nn.Linear(6, 3))],
    ids=["by itself", "by a hook", "below a container"],
)
def test_models_that_mix_examples_are_refused(make):
    with pytest.raises(UsageError, match="GroupNorm"):
        per_example(Partition(make(), "all"), F.cross_entropy, 1.0, torch.randn(6))


class Functional(nn.Module):
    """Dropout that no layer announces."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(F.dropout(x, 0.5, self.training))


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, dropout=dropout, batch_first=True)
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x[:, None]
        return self.layer(self.attention(h, h, h)[0][:, 0])


class FunctionalAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.view(-1, 1, 3, 2)
        return self.layer(F.scaled_dot_product_attention(h, h, h, dropout_p=0.3).flatten(1))


@pytest.mark.parametrize("make", [Functional, lambda: Attention(0.3), FunctionalAttention])
def test_random_numbers_in_the_model_are_refused_before_anything_is_sent(make):
    data = [TensorDataset(torch.randn(20, 6), torch.randint(0, 3, (20,)))] * 2
    unit = dpps.Record(noise_multiplier=1.0)
    run = dpps.Run(dpps.PartPSP(make(), batch_size=10), data, topology=dpps.Ring(2), privacy=unit, seed=0)
    with pytest.raises(UsageError, match=r"dropout.* 0 "):
        run.start(epochs=1).step()


def test_attention_without_dropout_is_accepted():
    data = [TensorDataset(torch.randn(20, 6), torch.randint(0, 3, (20,)))] * 2
    unit = dpps.Record(noise_multiplier=1.0)
    dpps.Run(
        dpps.PartPSP(Attention(0.0), "all", batch_size=10), data, topology=dpps.Ring(2), privacy=unit, seed=0
    ).start(epochs=1).step()


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


@pytest.mark.parametrize("way", [Chains, BookKeeping])
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


@pytest.mark.parametrize("d", [5, 8192, 1_000_000, 11_000_000])
@pytest.mark.parametrize("kind", ["constant", "random"])
def test_norms_of_millions_of_numbers_are_right_to_a_tenth_of_the_margin(d, kind):
    g = torch.full((1, 1, d), 0.0123) if kind == "constant" else torch.randn(1, 1, d)
    exact = float(torch.linalg.vector_norm(g, dtype=torch.float64))
    assert float(squared_norms(g).sqrt()) == pytest.approx(exact, rel=1e-5)


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
    dpps.Run(
        dpps.PartPSP(model, ["0"], batch_size=300), data, topology=dpps.Ring(2), privacy=unit, noise=Looks(0)
    ).start(epochs=1).step()
    assert seen == [torch.float64] * 2


@pytest.mark.parametrize("way", [Chains, BookKeeping])
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
