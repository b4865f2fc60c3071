"""Every model of the zoo against plain autograd, example by example, in float64."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpps.errors import UsageError
from dpps.learning import (
    BookKeeping,
    Chains,
    General,
    ModelLoss,
    OneByOne,
    Partition,
    per_example,
    pick,
    tensors_in,
)
from tests.support.zoo import (
    BATCH,
    NODES,
    SHARED,
    ZOO,
    Named,
    Regression,
    UNet,
    floats,
    tokens,
)


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def rows(partition):
    """Different parameters for every node."""
    s, l = (part.double() for part in partition.initial())
    return (part + 0.1 * torch.randn(NODES, len(part)) for part in (s, l))


def compare(model, x, target, loss, *, shared="all", clip=None, mask=None, way=None):
    """The engine that is chosen against one example after the other; gives the engine."""
    partition = Partition(model, shared)
    y, l = rows(partition)
    mask = torch.ones(NODES, BATCH, dtype=torch.bool) if mask is None else mask
    chosen = way or per_example(partition, loss, 1.0, pick(x, (0, 0)))
    kind = type(chosen)
    if clip is None:  # half of the examples are clipped
        norms = [OneByOne(partition, loss, 1e9).sums(y, l, x, target, only)[1:] for only in _each(mask)]
        clip = float(torch.stack([torch.cat(n, 1).norm(dim=1) for n in norms]).flatten().median())
    found = kind(partition, loss, clip).sums(y, l, x, target, mask)
    expected = OneByOne(partition, loss, clip).sums(y, l, x, target, mask)
    for a, b in zip(found, expected, strict=True):
        # norms by Gram matrices are enlarged by the root of float64's rounding
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8 * max(1.0, clip))
    torch.testing.assert_close(found.clipped, expected.clipped)
    return chosen


def _each(mask):
    for k in range(mask.shape[1]):
        only = torch.zeros_like(mask)
        only[:, k] = mask[:, k]
        yield only


@pytest.mark.parametrize("name", ZOO)
def test_the_clipped_sums_are_those_of_plain_autograd(name, caplog):
    make, inputs = ZOO[name]
    mask = torch.tensor([[True] * BATCH, [True, False, True, False]])
    with caplog.at_level(logging.WARNING):
        way = compare(
            make(),
            inputs(),
            torch.randint(0, 3, (NODES, BATCH)),
            F.cross_entropy,
            shared=SHARED.get(name, "all"),
            mask=mask,
        )
    assert isinstance(way, Chains if name == "mlp" else BookKeeping)
    assert not caplog.records, "no notice of a slower way"


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN", "cnn", "tied language model", "vision transformer"])
def test_known_functions_go_by_their_rules(name):
    make, inputs = ZOO[name]
    x, target = inputs(), torch.randint(0, 3, (NODES, BATCH))
    partition = Partition(make(), "all")
    y, l = rows(partition)
    plan = BookKeeping(partition, F.cross_entropy, 1.0).plan(pick(x, (0, 0)), target[0, 0], y, l)
    assert plan is not None
    assert not [site.name for site in plan.sites if isinstance(site.rule, General)]


def test_regression_has_a_mean_over_the_numbers_of_an_example():
    compare(Regression(), floats(4, 3), floats(), F.mse_loss)


def test_a_loss_per_pixel_is_a_mean_over_the_pixels_of_an_example():
    compare(UNet(), floats(1, 6, 6), torch.randint(0, 3, (NODES, BATCH, 6, 6)), F.cross_entropy)


def two_heads(outputs, target):
    return F.cross_entropy(outputs[0], target["class"]) + F.mse_loss(outputs[1], target["value"])


def test_inputs_by_name_and_several_outputs():
    x = {"ids": tokens(5), "seen": floats(6, 5)}
    target = {"class": torch.randint(0, 3, (NODES, BATCH)), "value": floats()}
    compare(Named(), x, target, two_heads)


def test_a_loss_that_calls_the_model_itself_is_asked_for_every_example():
    def loss(model, batch):
        x, target = batch
        outputs = model(x)
        weight = target.double() + 1  # a mean over the batch that weighs examples: no sum of parts
        return (F.cross_entropy(outputs, target, reduction="none") * weight).sum() / weight.sum()

    make, inputs = ZOO["cnn"]
    compare(make(), inputs(), torch.randint(0, 3, (NODES, BATCH)), ModelLoss(loss))


def test_a_loss_that_counts_over_the_batch_is_taken_per_example():
    """With ignored targets the mean of a batch is no mean of the examples' losses."""
    target = torch.randint(0, 3, (NODES, BATCH, 6, 6))
    target[:, 0, :5] = -100
    compare(UNet(), floats(1, 6, 6), target, F.cross_entropy)


def test_a_loss_that_vmap_cannot_run_is_computed_one_by_one(caplog):
    def loss(outputs, target):
        return F.cross_entropy(outputs, target) * (2.0 if float(outputs.detach().max()) > 0 else 1.0)

    compare(
        ZOO["cnn"][0](),
        floats(1, 8, 8),
        torch.randint(0, 3, (NODES, BATCH)),
        loss,
    )
    assert "torch.vmap" in caplog.text


class Functional(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.inner, self.out, self.function = nn.Linear(6, 6), nn.Linear(6, 3), function

    def forward(self, x):
        return self.out(self.function(self.inner(x)))


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.out(x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)),
            "1: BatchNorm",
        ),
        (lambda: Functional(lambda h: F.batch_norm(h, None, None, training=True)), "Functional.*GroupNorm"),
        (lambda: Functional(lambda h: h - h.mean(0)), "Functional.*GroupNorm"),
        (lambda: Functional(lambda h: h / h.detach().abs().max()), "Functional.*GroupNorm"),
        (lambda: Functional(lambda h: h.softmax(0)), "Functional.*GroupNorm"),
        (lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1), nn.Linear(6, 3)), "1: dropout"),
        (lambda: Functional(lambda h: F.dropout(h, 0.2)), "random numbers"),
        (lambda: Functional(lambda h: h + torch.randn_like(h)), "random numbers"),
        (lambda: Functional(lambda h: h.sum(0, keepdim=True)), "Functional"),
        (Remembers, "mean: .*buffers"),
    ],
)
def test_what_mixes_examples_or_draws_numbers_is_refused(make, message):
    with pytest.raises(UsageError, match=message):
        per_example(Partition(make(), "all"), F.cross_entropy, 1.0, torch.randn(6))


class Strange(nn.Module):
    """A parameter that goes through a function torch cannot see into."""

    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx, d):
            x, weight = ctx.saved_tensors
            return d * weight, (d * x).sum(0)

    def __init__(self):
        super().__init__()
        self.scale, self.out = nn.Parameter(torch.rand(6) + 0.5), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.Hidden.apply(x, self.scale))


class Moody(nn.Module):
    """Takes another way for some data."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        largest = float(x.detach().abs().max())  # where the trial on made-up examples does not look
        return torch.relu(self.a(x)) + self.b(x) if 1.001 < largest < 5 else self.a(x)


def test_what_cannot_be_seen_into_is_found_and_runs_one_example_after_the_other(caplog):
    compare(Strange(), floats(6), torch.randint(0, 3, (NODES, BATCH)), F.cross_entropy)
    assert "Strange: " in caplog.text


def test_a_model_that_takes_another_way_for_some_data_runs_one_example_after_the_other(caplog):
    compare(Moody(), floats(6), torch.randint(0, 3, (NODES, BATCH)), F.cross_entropy)
    assert "linear" in caplog.text


def test_a_function_that_vmap_cannot_run_is_called_for_one_example_after_the_other_with_a_notice(caplog):
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.both, self.out = nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 3)

        def forward(self, x):
            return self.out(torch.tanh(torch.cdist(x[:, None], self.both))[:, 0])

    compare(Picky(), floats(6), torch.randint(0, 3, (NODES, BATCH)), F.cross_entropy)


def test_nobody_and_somebody_alone():
    make, inputs = ZOO["cnn"]
    mask = torch.zeros(NODES, BATCH, dtype=torch.bool)
    mask[0, 2] = True
    compare(make(), inputs(), torch.randint(0, 3, (NODES, BATCH)), F.cross_entropy, mask=mask, clip=0.1)
    partition = Partition(make(), "all")
    y, l = rows(partition)
    nothing = BookKeeping(partition, F.cross_entropy, 1.0).sums(
        y, l, inputs(), torch.randint(0, 3, (NODES, BATCH)), torch.zeros_like(mask)
    )
    assert [float(part.abs().sum()) for part in nothing] == [0, 0, 0]


def test_small_parts_give_the_same_as_the_whole(monkeypatch):
    make, inputs = ZOO["resnet with GroupNorm"]
    monkeypatch.setattr("dpps.learning.engines.per_example.book._NUMBERS", 1)
    compare(make(), inputs(), torch.randint(0, 3, (NODES, BATCH)), F.cross_entropy)


@pytest.mark.parametrize("name", ["cnn", "resnet with GroupNorm", "LSTM", "tied language model"])
def test_nodes_in_threads_give_the_same_as_one_after_the_other(name):
    make, inputs = ZOO[name]
    partition = Partition(make(), "all")
    y, l = rows(partition)
    x, target, mask = (
        inputs(),
        torch.randint(0, 3, (NODES, BATCH)),
        torch.ones(NODES, BATCH, dtype=torch.bool),
    )
    way = BookKeeping(partition, F.cross_entropy, 0.1)
    torch.set_num_threads(1)
    expected = way.sums(y, l, x, target, mask)
    assert way._workers is None
    torch.set_num_threads(2)
    found = way.sums(y, l, x, target, mask)
    assert way._workers is not None
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "name", ["cnn", "vision transformer", "LSTM", "tied, large vocabulary", "linear on sequences"]
)
def test_no_example_counts_more_than_clip_in_float32(name):
    torch.set_default_dtype(torch.float32)
    make, inputs = ZOO[name]
    partition = Partition(make(), "all")
    x, target = inputs(), torch.randint(0, 3, (NODES, BATCH))
    y = partition.initial()[0].repeat(NODES, 1)
    l = y[:, :0]
    way = per_example(partition, F.cross_entropy, 0.01, pick(x, (0, 0)))
    for only in _each(torch.ones(NODES, BATCH, dtype=torch.bool)):
        _, sum_s, _ = way.sums(y, l, x, target, only)
        norms = sum_s.double().norm(dim=1)
        assert bool((norms <= 0.01).all())
        assert bool((norms >= 0.0099).all())


@pytest.mark.parametrize("name", ["cnn", "LSTM"])
def test_an_example_that_is_not_finite_counts_as_zero(name):
    make, inputs = ZOO[name]
    partition = Partition(make(), "all")
    target = torch.randint(0, 3, (NODES, BATCH))
    x, mask = inputs(), torch.ones(NODES, BATCH, dtype=torch.bool)
    y, l = rows(partition)

    def loss(outputs, target):
        return F.cross_entropy(outputs, target.clamp(min=0)) / (target >= 0).all()  # infinite where asked for

    broken = target.clone()
    broken[0, 1] = -1
    mask[0, 1] = False
    way = BookKeeping(partition, loss, 0.5)
    expected = way.sums(y, l, x, target, mask)
    found = way.sums(y, l, x, broken, torch.ones_like(mask))
    torch.testing.assert_close(found[1], expected[1])
    assert not torch.isfinite(found[0][0])
    assert tensors_in(x)


def test_what_vmap_cannot_run_is_told_once_in_a_run_of_many_batches(caplog):
    def loss(outputs, target):
        return F.cross_entropy(outputs, target) * (2.0 if float(outputs.detach().max()) > 0 else 1.0)

    make, inputs = ZOO["cnn"]
    partition = Partition(make(), "all")
    y, l = rows(partition)
    way = BookKeeping(partition, loss, 1.0)
    for _ in range(8):
        way.sums(y, l, inputs(), torch.randint(0, 3, (NODES, BATCH)), torch.ones(NODES, BATCH) > 0)
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
