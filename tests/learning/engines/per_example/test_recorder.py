"""What takes weights is seen: where they come from, and whether examples are there."""

import pytest
import torch
import torch.nn.functional as F

from dpps.learning import CallSite, IrregularModel, Observer, Recorder, Sites, body_of, name_of, rule_for


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def test_functions_go_by_their_own_name_and_properties_by_that_of_the_property():
    assert name_of(torch.Tensor.T.__get__) == "T"
    assert name_of(torch.matmul) == "matmul"


def test_functions_that_torch_writes_in_python_are_seen_into():
    assert body_of(torch.matmul) is None
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(name_of(func))
            return func(*args, **(kwargs or {}))

    body = body_of(F.group_norm)
    x, weight = torch.randn(2, 4), torch.ones(4)
    with Watch():
        found = body(x, 2, weight)
    assert "group_norm" in seen
    torch.testing.assert_close(found, F.group_norm(x, 2, weight))


def test_an_observer_tells_where_weights_meet_examples():
    w, scale, x = leaf(3, 2), leaf(1), torch.randn(4, 3)
    observer = Observer({"w": w, "scale": scale}, [x], frozenset())
    with observer:
        ((2 * x) @ (w * scale)).tanh()
    assert [(seen.name, seen.meets) for seen in observer.seen] == [("mul", False), ("matmul", True)]
    assert observer.seen[1].parameters == {"w", "scale"}
    assert observer.seen[1].outputs == ((4, 2),)
    assert observer.numbers == 4 * 3 + 4 * 2 + 4 * 2  # the doubled inputs, the product, its activation


def test_a_call_that_nobody_expects_is_refused():
    w = leaf(3, 2)
    with Recorder({"w": w}, Sites(), 4, fast_formats=False):
        assert w.shape == (3, 2)  # a question about a weight is none
        with pytest.raises(IrregularModel, match=r"matmul .*made-up"):
            torch.matmul(torch.randn(4, 3), w)


def site(name, parameters, shape):
    return CallSite(name, rule_for(name), {("0", -1): 0}, (0,), (shape,), frozenset(parameters), minor=False)


def test_other_parameters_or_another_shape_than_with_made_up_examples_are_refused():
    a, b, x = leaf(3, 2), leaf(3, 2), torch.randn(4, 3)
    sites = Sites([site("matmul", "a", (1, 2))])
    with Recorder({"a": a, "b": b}, sites, 4, fast_formats=False):
        torch.matmul(x, a)
    with (
        Recorder({"a": a, "b": b}, sites, 4, fast_formats=False),
        pytest.raises(IrregularModel, match="other"),
    ):
        torch.matmul(x, b)
    with (
        Recorder({"a": a}, sites, 2, fast_formats=False),
        pytest.raises(IrregularModel, match="matmul"),
    ):
        torch.matmul(x, a)  # four rows: two of each example, it might seem


def test_a_weight_that_is_written_into_a_tensor_is_not_lost():
    w, x = leaf(2), torch.zeros(4, 2)
    with Recorder({"w": w}, Sites(), 4, fast_formats=False), pytest.raises(IrregularModel, match="written"):
        x[1:3] = w
    with Observer({"w": w}, [x], frozenset()), pytest.raises(IrregularModel, match="written"):
        x[1:3] = w
