"""Memory is bounded whatever the batch: parts of it are worked off one after the other inside a round."""

import gc
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from dpps.learning import BookKeeping, Call, Partition, Recorder, Rows
from dpps.learning.engines.per_example import book as book_module
from tests.support.processes import needs_proc
from tests.support.zoo import BATCH, NODES, ZOO, cnn

_BATCH_OF_2000 = """
import torch, torch.nn.functional as F
from torch import nn
from dpps.learning.engines.per_example import per_example
from dpps.learning.partition import Partition
torch.set_num_threads(1)
model = nn.Sequential(
    nn.Conv2d(1, 16, 8, 2, padding=2), nn.Tanh(), nn.MaxPool2d(2, 1),
    nn.Conv2d(16, 32, 4, 2), nn.Tanh(), nn.MaxPool2d(2, 1),
    nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10),
)
partition = Partition(model, "all")
y, l = (part[None] for part in partition.initial())
x, target = torch.randn(1, 2000, 1, 28, 28), torch.randint(0, 10, (1, 2000))
way = per_example(partition, F.cross_entropy, 1.0, x[0, 0], 2000)
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
    monkeypatch.setattr(book_module, "_NUMBERS", numbers)
    partition = Partition(cnn(), "all")
    y, l = (part[None] for part in partition.initial())
    x, target = torch.randn(1, 10, 1, 8, 8), torch.randint(0, 3, (1, 10))
    way, sizes = BookKeeping(partition, F.cross_entropy, 1.0, 10), []
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
    way, target = BookKeeping(partition, F.cross_entropy, 1.0), torch.randint(0, 3, (NODES, BATCH))
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


@pytest.mark.parametrize("table", [5, 1000])
def test_rows_that_an_example_reads_twice_are_added_up_before_their_norm(table):
    rows = torch.tensor([[3, 1, 3, 4, 1, 1], [0, 0, 0, 0, 0, 0], [4, 3, 2, 1, 0, 4]])
    looked_up = Rows(rows, torch.randn(3, 6, 2), torch.Size((table, 2)))
    expected = looked_up.explicit().flatten(1).double().square().sum(1)
    torch.testing.assert_close(looked_up.norms().double().square().sum(1), expected, rtol=1e-5, atol=0.0)
