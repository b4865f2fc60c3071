"""Calls of torch functions: their tensors, and where examples lie in them."""

import pytest
import torch

from dpps.learning import Call, IrregularModel, replace_tensors, start_graph, tensors_of


def call(**options):
    given = {"input": torch.zeros(2, 3), "weight": torch.ones(3)}
    known = {
        "weights": {},
        "dims": {("input", -1): 0},
        "out_dims": (0,),
        "single_shapes": ((1, 3),),
        "examples": 2,
    }
    return Call(torch.mul, ("input", "weight"), given, **(known | options))


def test_tensors_are_found_in_lists_and_replaced_there():
    a, b, c = torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)
    arguments = {"x": a, "rate": 0.5, "params": [b, "text", c]}
    assert [key for key, _ in tensors_of(list(arguments.items()))] == [
        ("x", -1),
        ("params", 0),
        ("params", 2),
    ]
    new = replace_tensors(arguments, {("x", -1): b, ("params", 2): a})
    assert new["x"] is b
    assert new["params"] == [b, "text", a]
    assert arguments["params"][2] is c  # the first one is as it was


def test_a_call_runs_with_its_own_or_other_arguments():
    own = call()
    assert torch.equal(own.run(), torch.zeros(2, 3))
    assert torch.equal(own.run({"input": torch.ones(2, 3), "weight": torch.ones(3)}), torch.ones(2, 3))
    assert own["weight"] is own.arguments["weight"]
    assert own["beta"] is None


def test_what_is_watched_gets_its_gradient_although_nothing_before_it_is_differentiated():
    own = call()
    own.root = torch.empty(0, requires_grad=True)
    complete = []
    own.complete = complete.append
    result = own.watch(own.run())
    torch.autograd.grad((3 * result).sum(), own.root, allow_unused=True)
    assert complete == [own]
    assert torch.equal(own.backs[0], torch.full((2, 3), 3.0))


def test_what_the_loss_does_not_depend_on_has_gradient_zero_unless_that_is_so_of_all():
    own = call()
    own.root = torch.empty(0, requires_grad=True)
    used, _ = own.watch(torch.ones(2)), own.watch(torch.ones(3))
    own.settle()
    assert own.backs == [None, None]
    torch.autograd.grad(used.sum(), own.root, allow_unused=True)
    own.settle()
    assert [back.tolist() for back in own.backs] == [[1.0, 1.0], [0.0, 0.0, 0.0]]


def test_the_axis_of_examples_comes_first():
    own = call()
    assert own.first(torch.zeros(3, 2, 4), 1).shape == (2, 3, 4)
    with pytest.raises(IrregularModel, match="mul: "):
        own.first(torch.zeros(3), None)


@pytest.mark.parametrize(("minor", "rows"), [(False, [[0, 1, 2], [3, 4, 5]]), (True, [[0, 2, 4], [1, 3, 5]])])
def test_an_axis_with_several_positions_of_every_example_is_split(minor, rows):
    assert call(minor=minor).first(torch.arange(6), 0).tolist() == rows


def test_a_graph_may_begin_at_a_tensor_that_is_written_over():
    whole = torch.ones(4, 3)
    started = start_graph(whole[:2], None)  # a view: what it shows must stay as it is
    result = started.mul_(2.0)
    assert result.requires_grad
    assert torch.equal(whole, torch.ones(4, 3))
