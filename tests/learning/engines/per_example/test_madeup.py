"""Made-up examples say nothing of anybody's data."""

import torch

from dpps.learning import Batches, moved
from dpps.learning.engines.per_example.madeup import made_up


def test_only_shapes_and_types_are_looked_at():
    ones, others = torch.ones(4, 3), torch.full((4, 3), -7.0)
    assert torch.equal(made_up(ones, 5), made_up(others, 5))
    assert made_up(ones.double(), 5).dtype == torch.float64
    assert not torch.equal(made_up(ones, 5), made_up(ones, 5, seed=1))


def test_whole_numbers_are_0_and_1_and_no_mask_is_empty():
    words = made_up(torch.zeros(6, dtype=torch.int64), 50)
    assert words.shape == (50, 6)
    assert set(words.unique().tolist()) == {0, 1}
    assert bool(made_up(torch.zeros(6, dtype=torch.bool), 50).any(1).all())
    assert set(made_up(torch.zeros(6), 50, whole=True).unique().tolist()) == {0.0, 1.0}


def test_examples_may_be_nested():
    like = {"ids": torch.zeros(3, dtype=torch.int64), "rest": (torch.zeros(2), "text")}
    batch = made_up(like, 4)
    assert batch["ids"].shape == (4, 3)
    assert batch["rest"][0].shape == (4, 2)
    assert batch["rest"][1] == "text"


def test_the_changed_batch_differs_in_its_first_example_only():
    batches = Batches.like((torch.zeros(20), torch.tensor(0)))
    x, changed = batches.three[0], batches.changed[0]
    assert len(batches.two[0]) == 2
    assert not torch.equal(x[0], changed[0])
    assert torch.equal(x[1:], changed[1:])


def test_parameters_that_start_at_zero_are_moved_always_alike():
    zero = torch.zeros(50)
    assert torch.equal(moved(zero), moved(zero))
    assert 0.02 < float(moved(zero).std()) < 0.1
