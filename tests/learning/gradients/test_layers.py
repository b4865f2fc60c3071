"""Plans by rules: found on made-up examples, and refused where it cannot be told whose a row is."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpps.learning import Batched, OneByOne, Partition, pick
from dpps.learning.gradients.calling import ExampleLosses
from dpps.learning.gradients.layers.recording import (
    Batches,
    Constants,
    Observer,
    Plan,
    Recorder,
    make_plan,
    picked,
)
from dpps.learning.gradients.layers.rules import IrregularModel

MATRIX = torch.zeros(4, 5)
INDEX = torch.tensor([1, 0])


@pytest.mark.parametrize(
    ("name", "args", "axes"),
    [
        ("__getitem__", (MATRIX, INDEX), {0}),
        ("__getitem__", (MATRIX, [1, 0]), {0}),
        ("__getitem__", (MATRIX, 0), {0}),
        ("__getitem__", (MATRIX, (slice(None), INDEX)), {1}),
        ("__getitem__", (MATRIX, (None, INDEX)), {0}),
        ("__getitem__", (MATRIX, (Ellipsis, INDEX)), {1}),
        ("__getitem__", (MATRIX, MATRIX > 0), {0, 1}),
        ("__setitem__", (MATRIX, INDEX, torch.zeros(2, 5)), {0}),
        ("index_put_", (MATRIX, (INDEX,), torch.zeros(2, 5)), {0}),
        ("index_select", (MATRIX, -2, INDEX), {0}),
        ("gather", (MATRIX, 1, INDEX[:, None]), {1}),
        ("take_along_dim", (MATRIX, INDEX[:, None], 0), {0}),
        ("scatter_add_", (MATRIX, 0, INDEX[:, None], MATRIX), {0}),
        ("unbind", (MATRIX,), {0}),
        ("roll", (MATRIX, 1, 0), {0}),
        ("roll", (MATRIX, 1), {0, 1}),
        ("masked_select", (MATRIX, MATRIX > 0), {0, 1}),
        ("embedding", (INDEX, MATRIX), {0}),
    ],
)
def test_the_axes_along_which_rows_are_picked(name, args, axes):
    found = picked(name, args, {}, Constants())
    assert found is not None
    assert found.axes == axes


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("__getitem__", (MATRIX, slice(None))),
        ("__getitem__", (MATRIX, (Ellipsis, None))),
        ("__setitem__", (MATRIX, MATRIX > 0, 0.0)),
        ("relu", (MATRIX,)),
    ],
)
def test_what_keeps_every_row_in_its_place(name, args):
    assert picked(name, args, {}, Constants()) is None


@pytest.mark.parametrize(
    ("name", "args", "cut"),
    [
        ("__getitem__", (MATRIX, slice(0, 2)), {0}),
        ("__getitem__", (MATRIX, (Ellipsis, slice(1, None))), {1}),
        ("narrow", (MATRIX, 1, 0, 2), {1}),
        ("split", (MATRIX, 3), {0}),
        ("chunk", (MATRIX, 2, -1), {1}),
    ],
)
def test_the_axes_along_which_a_part_is_cut_out(name, args, cut):
    found = picked(name, args, {}, Constants())
    assert found is not None
    assert (found.axes, found.cut) == (set(), cut)


def test_positions_that_no_data_had_a_part_in_are_constants():
    constants, rows, last = Constants(), torch.arange(4), INDEX[[0, 1, 0, 1]]
    constants.note("arange", (4,), {}, rows)
    column = rows[:, None]
    constants.note("__getitem__", (rows, (slice(None), None)), {}, column)
    assert column in constants
    found = picked("__getitem__", (MATRIX, (rows, last)), {}, constants)
    assert found is not None
    assert found.axes == {1}
    constants.note("add", (rows, last), {}, total := rows + last)
    assert total not in constants


class Longest(nn.Module):
    """The longest sequences first, as recurrent layers of old wanted them; made-up examples are all of the same length."""

    def __init__(self, put, back):
        super().__init__()
        self.put, self.back = put, back
        self.words, self.inner, self.out = nn.Embedding(20, 5), nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, ids):
        order = (ids != 19).sum(1).argsort(descending=True, stable=True)
        h = torch.tanh(self.inner(self.put(self.words(ids), order))).mean(1)
        return self.out(self.back(h, order.argsort()))


class WithoutPadding(nn.Module):
    """Only what is no padding goes through the layers."""

    def __init__(self):
        super().__init__()
        self.words, self.inner, self.out = nn.Embedding(20, 5), nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, ids):
        kept = ids != 19
        h = torch.zeros(*ids.shape, 4)
        h[kept] = torch.tanh(self.inner(self.words(ids)[kept]))
        return self.out(h.mean(1))


class Turned(nn.Module):
    """The first three examples go to the end and back again: up to three stay where they are."""

    def __init__(self, cut):
        super().__init__()
        self.cut, self.words = cut, nn.Embedding(20, 5)
        self.inner, self.out = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, ids):
        h = torch.tanh(self.inner(torch.cat(self.cut(self.words(ids), 3)[::-1]))).mean(1)
        return self.out(torch.cat(self.cut(h, max(0, len(h) - 3))[::-1]))


def one_hot(rows, index):
    return torch.tensordot(F.one_hot(index, len(rows)).to(rows), rows, 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Longest(lambda h, i: h[i], lambda h, i: h[i]),
        lambda: Longest(lambda h, i: h[i.tolist()], lambda h, i: h.index_select(0, i)),
        lambda: Longest(lambda h, i: F.embedding(i, h.flatten(1)).view_as(h), lambda h, i: h[i]),
        lambda: Longest(one_hot, one_hot),
        WithoutPadding,
        lambda: Turned(lambda h, k: (h[:k], h[k:])),
        lambda: Turned(lambda h, k: h.tensor_split([k])),
    ],
    ids=["by index", "by list", "by table", "by matrix", "without padding", "by slices", "by splitting"],
)
def test_models_that_put_rows_elsewhere_are_right(make):
    torch.manual_seed(0)
    clip, partition = 0.3, Partition(make(), "all")
    x, target = torch.randint(0, 19, (1, 6, 6)), torch.randint(0, 3, (1, 6))
    x[0, 1, 3:] = x[0, 3, 3:] = 19  # five tokens of every example, on average
    y, l = (part[None] for part in partition.initial())
    given = y, l, x, target, torch.ones(1, 6, dtype=torch.bool)
    way = Batched(partition, F.cross_entropy, clip, 6)
    found = way.sums(*given)
    torch.testing.assert_close(found[1], OneByOne(partition, F.cross_entropy, clip, 6).sums(*given)[1])
    assert not isinstance(way.plan(pick((x, target), (0, 0)), y, l), Plan)


def test_the_last_token_of_every_example_is_its_own():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.out = nn.Embedding(20, 5), nn.Linear(5, 3)

        def forward(self, ids):
            last = (ids != 19).sum(1).clamp(min=1) - 1
            return self.out(torch.tanh(self.words(ids)[torch.arange(len(ids)), last]))

    partition = Partition(Last(), "all")
    y, l = (part[None] for part in partition.initial())
    way = Batched(partition, F.cross_entropy, 1.0)
    example = torch.zeros(6, dtype=torch.int64), torch.tensor(0)
    assert isinstance(way.plan(example, y, l), Plan)


class Model(nn.Module):
    """A linear layer and something done to what comes out."""

    def __init__(self, then):
        super().__init__()
        self.layer, self.scale, self.then = nn.Linear(4, 3), nn.Parameter(torch.rand(3)), then

    def forward(self, x):
        return self.then(self, self.layer(x))


def plan_of(then):
    torch.manual_seed(0)
    model, example = Model(then), (torch.zeros(4), torch.tensor(0))
    return make_plan(
        model, ExampleLosses(F.cross_entropy), dict(model.named_parameters()), Batches.like(example)
    )


def test_a_plan_says_which_functions_take_weights():
    plan = plan_of(lambda m, h: h @ m.layer.weight @ m.layer.weight.T)
    assert [site.name for site in plan.sites] == ["linear", "matmul", "T", "matmul"]
    with pytest.raises(IrregularModel, match="logaddexp"):
        plan_of(lambda m, h: torch.logaddexp(h, m.scale))


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


def test_a_weight_that_is_written_into_a_tensor_is_not_lost():
    plan = Plan(ExampleLosses(F.cross_entropy), (), 1, fast_formats=False)
    w, x = torch.randn(2, requires_grad=True), torch.zeros(4, 2)
    with Recorder({"w": w}, plan, 4), pytest.raises(IrregularModel, match="written"):
        x[1:3] = w
    with Observer({"w": w}, [x], frozenset()), pytest.raises(IrregularModel, match="written"):
        x[1:3] = w
