"""One node's batch at a time: losses, outputs and functions of every kind against plain autograd, threads and memory."""

import gc
import logging
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpps.learning import (
    Batched,
    ModelLoss,
    Partition,
    choose_per_example,
    pick,
    tensors_in,
)
from dpps.learning.gradients.layers.recording import Recorder
from dpps.learning.gradients.layers.rules import Call
from tests.support.processes import needs_proc
from tests.support.zoo import (
    BATCH,
    NODES,
    ZOO,
    Named,
    Regression,
    UNet,
    cnn,
    compare,
    each_alone,
    floats,
    rows,
    tokens,
)


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


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

    compare(ZOO["cnn"][0](), floats(1, 8, 8), torch.randint(0, 3, (NODES, BATCH)), loss)
    assert "torch.vmap" in caplog.text
    caplog.clear()
    make, inputs = ZOO["cnn"]
    partition = Partition(make(), "all")
    y, l = rows(partition)
    way = Batched(partition, loss, 1.0)
    for _ in range(8):  # told once in a run of many batches
        way.sums(y, l, inputs(), torch.randint(0, 3, (NODES, BATCH)), torch.ones(NODES, BATCH) > 0)
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


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
    nothing = Batched(partition, F.cross_entropy, 1.0).sums(
        y, l, inputs(), torch.randint(0, 3, (NODES, BATCH)), torch.zeros_like(mask)
    )
    assert [float(part.abs().sum()) for part in nothing] == [0, 0, 0]


def test_small_parts_give_the_same_as_the_whole(monkeypatch):
    make, inputs = ZOO["resnet with GroupNorm"]
    monkeypatch.setattr("dpps.learning.gradients.clipped._NUMBERS", 1)
    compare(make(), inputs(), torch.randint(0, 3, (NODES, BATCH)), F.cross_entropy)


@pytest.mark.parametrize("name", ["cnn", "resnet with GroupNorm", "LSTM", "tied language model"])
def test_nodes_in_threads_give_the_same_as_one_after_the_other(name):
    make, inputs = ZOO[name]
    partition = Partition(make(), "all")
    y, l = rows(partition)
    x, target, mask = inputs(), torch.randint(0, 3, (NODES, BATCH)), torch.ones(NODES, BATCH) > 0
    way = Batched(partition, F.cross_entropy, 0.1)
    torch.set_num_threads(1)
    expected = way.sums(y, l, x, target, mask)
    assert way._workers._pool is None
    torch.set_num_threads(2)
    found = way.sums(y, l, x, target, mask)
    assert way._workers._pool is not None
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
    way = choose_per_example(partition, F.cross_entropy, pick((x, target), (0, 0)), clip=0.01)
    for only in each_alone(torch.ones(NODES, BATCH, dtype=torch.bool)):
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
    way = Batched(partition, loss, 0.5)
    expected = way.sums(y, l, x, target, mask)
    found = way.sums(y, l, x, broken, torch.ones_like(mask))
    torch.testing.assert_close(found[1], expected[1])
    assert not torch.isfinite(found[0][0])
    assert tensors_in(x)


# Memory is bounded whatever the batch: parts of it are worked off one after the other inside a round

_BATCH_OF_2000 = """
import torch, torch.nn.functional as F
from torch import nn
from dpps.learning import Partition, choose_per_example
torch.set_num_threads(1)
model = nn.Sequential(
    nn.Conv2d(1, 16, 8, 2, padding=2), nn.Tanh(), nn.MaxPool2d(2, 1),
    nn.Conv2d(16, 32, 4, 2), nn.Tanh(), nn.MaxPool2d(2, 1),
    nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10),
)
partition = Partition(model, "all")
y, l = (part[None] for part in partition.initial())
x, target = torch.randn(1, 2000, 1, 28, 28), torch.randint(0, 10, (1, 2000))
way = choose_per_example(partition, F.cross_entropy, (x[0, 0], target[0, 0]), clip=1.0, batch=2000)
_, total, _ = way.sums(y, l, x, target, torch.ones(1, 2000, dtype=torch.bool))
assert 1 < float(total.norm()) <= 2000
print(open("/proc/self/status").read())
"""


@needs_proc
def test_a_batch_of_2000_of_the_small_cnn_stays_below_a_gigabyte_and_a_half():
    done = subprocess.run(
        [sys.executable, "-c", _BATCH_OF_2000], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    peak = re.search(r"VmHWM:\s+(\d+) kB", done.stdout)
    assert peak is not None
    assert int(peak[1]) < 1.5 * 2**20


@pytest.mark.parametrize(("numbers", "parts"), [(1 << 26, 1), (1, 5)])
def test_a_batch_is_worked_off_in_parts_of_equal_size(numbers, parts, monkeypatch):
    monkeypatch.setattr("dpps.learning.gradients.clipped._NUMBERS", numbers)
    partition = Partition(cnn(), "all")
    y, l = (part[None] for part in partition.initial())
    x, target = torch.randn(1, 10, 1, 8, 8), torch.randint(0, 3, (1, 10))
    way, sizes = Batched(partition, F.cross_entropy, 1.0, 10), []
    part = way._part
    monkeypatch.setattr(way, "_part", lambda *given: sizes.append(len(given[3][1])) or part(*given))
    way.sums(y, l, x, target, torch.ones(1, 10, dtype=torch.bool))
    assert sizes == [10 // parts] * parts


@pytest.mark.parametrize(
    "name", ["GRU", "LSTM", "bare parameters", "no rule", "tied language model", "used twice"]
)
def test_what_was_recorded_goes_with_its_part_of_the_batch(name):
    make, inputs = ZOO[name]
    partition, x = Partition(make(), "all"), inputs()
    y, l = (part.repeat(NODES, 1) for part in partition.initial())
    way, target = Batched(partition, F.cross_entropy, 1.0), torch.randint(0, 3, (NODES, BATCH))
    given = y, l, x, target, torch.ones(NODES, BATCH, dtype=torch.bool)
    way.sums(*given)  # the trial
    gc.collect()
    gc.disable()  # torch holds graphs: Python's collector would not see a cycle through them
    try:
        way.sums(*given)
        left = [held for held in gc.get_objects() if type(held) in (Recorder, Call)]
    finally:
        gc.enable()
    assert not left
