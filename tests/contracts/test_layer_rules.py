"""Rules for layers: every registered one gives the gradients of autograd, and so does every model of the zoo.

A new rule is tested by being registered: it needs an entry in `CASES`.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dpps.learning import (
    Batched,
    Chains,
    Explicit,
    Rule,
    pick,
    register,
)
from dpps.learning.gradients.layers.recording import Plan
from dpps.learning.gradients.layers.rules import RULES
from tests.support.rules import EXAMPLES, check_rule, make_call, randn
from tests.support.zoo import BATCH, NODES, SHARED, WITHOUT_RULES, ZOO, compare, rows

Case = tuple[list[Any], set[Any], dict[str, int | None], tuple[int, ...]]
"""Arguments by position, keys of the trained ones, where the examples lie in the others, and in what comes out."""

WEIGHT, BIAS, INPUT, PRODUCT = ("weight", -1), ("bias", -1), ("input", -1), ("mat2", -1)
WORDS = torch.tensor([[1, 4, 1, 0], [2, 2, 2, 2], [0, 5, 3, 1]])


def function_of(name: str) -> Callable[..., Any]:
    found = F.linear if name == "linear" else getattr(torch, name, None) or getattr(torch.Tensor, name)
    if name.endswith("_") and not name.endswith("__"):  # in place: on a copy
        return lambda x, *rest: getattr(torch.Tensor, name)(x.clone(), *rest)
    return found


def _linear(_: str) -> Iterator[Case]:
    for shape, dim in (((3, 4), 0), ((3, 5, 4), 0), ((5, 3, 4), 1), ((3, 2, 5, 4), 0)):
        yield [randn(*shape), randn(2, 4), randn(2)], {WEIGHT, BIAS}, {"input": dim}, (dim,)
    yield [randn(3, 4), randn(2, 4), randn(2)], {BIAS}, {"input": 0}, (0,)


def _product(name: str) -> Iterator[Case]:
    shape = (3, 4) if name == "mm" else (3, 5, 4)
    yield [randn(*shape), randn(4, 2)], {PRODUCT}, {"input": 0}, (0,)


def _added_product(_: str) -> Iterator[Case]:
    yield [randn(2), randn(3, 4), randn(4, 2)], {BIAS, PRODUCT}, {"input": 0}, (0,)


def _conv(name: str) -> Iterator[Case]:
    axes = int(name[4])
    for stride, padding, dilation, groups in (
        (1, 0, 1, 1),
        (2, 1, 1, 1),
        ([2, 1, 1][:axes], [0, 2, 1][:axes], [1, 2, 1][:axes], 1),
        (1, "same", 2, 1),
        (1, "valid", 1, 1),
        ([1], 1, 1, 2),
    ):
        x, weight = randn(3, 4, *(7, 6, 5)[:axes]), randn(6, 4 // groups, *(3, 2, 2)[:axes])
        given = [x, weight, randn(6), stride, padding, dilation, groups]
        yield given, {WEIGHT, BIAS}, {"input": 0}, (0,)


def _embedding(_: str) -> Iterator[Case]:
    for words in (WORDS, WORDS[:, 0]):
        for padding in (-1, 2):
            yield [randn(6, 4), words, padding], {WEIGHT}, {"indices": 0}, (0,)


def _layer_norm(_: str) -> Iterator[Case]:
    for shape, normalised, dim in (((3, 4), [4], 0), ((3, 5, 2, 4), [2, 4], 0), ((5, 3, 4), [4], 1)):
        given = [randn(*shape), normalised, randn(*normalised), randn(*normalised), 1e-5]
        yield given, {WEIGHT, BIAS}, {"input": dim}, (dim,)


def _rms_norm(_: str) -> Iterator[Case]:
    yield [randn(3, 5, 4), [4], randn(4), 1e-5], {WEIGHT}, {"input": 0}, (0,)


def _group_norm(_: str) -> Iterator[Case]:
    for behind in ((5, 2), ()):
        yield [randn(3, 6, *behind), 3, randn(6), randn(6)], {WEIGHT, BIAS}, {"input": 0}, (0,)


def _recurrent(name: str) -> Iterator[Case]:
    gates, steps, inputs, width = {"lstm": 4, "gru": 3}.get(name, 1), 5, 2, 3
    for layers, bias, directions, batch_first in (
        (1, True, 1, True),
        (2, True, 2, True),
        (2, False, 1, False),
    ):
        weights: list[Any] = []
        for k in range(layers):
            for _ in range(directions):
                rows, into = gates * width, inputs if k == 0 else width * directions
                weights += [randn(rows, into), randn(rows, width), *([randn(rows)] * 2 if bias else [])]
        state, first = randn(layers * directions, EXAMPLES, width), 0 if batch_first else 1
        states = (state, randn(*state.shape)) if name == "lstm" else state
        x = randn(EXAMPLES, steps, inputs) if batch_first else randn(steps, EXAMPLES, inputs)
        given = [x, states, weights, bias, layers, 0.0, False, directions == 2, batch_first]
        keys = {("params", k) for k in range(len(weights))}
        yield given, keys, {"input": first}, (first, 1, 1) if name == "lstm" else (first, 1)


def _broadcast(name: str) -> Iterator[Case]:
    def positive(*shape: int) -> torch.Tensor:
        return randn(*shape).abs() + 0.5

    if name == "where":
        yield [torch.rand(3, 4) < 0.5, randn(4), randn(3, 4)], {("b", -1)}, {"a": 0, "c": 0}, (0,)
    elif name in ("addcmul", "lerp"):
        yield [positive(3, 4), positive(4), positive(3, 4)], {("b", -1)}, {"a": 0, "c": 0}, (0,)
    else:
        for shape in ((4,), (5, 1), (1, 5, 4)):
            yield [positive(3, 5, 4), positive(*shape)], {("b", -1)}, {"a": 0}, (0,)
            if name[-1:] != "_" or name[-2:] == "__":
                yield [positive(*shape), positive(3, 5, 4)], {("a", -1)}, {"b": 0}, (0,)
        yield [positive(5, 3, 4), positive(4)], {("b", -1)}, {"a": 1}, (1,)


def _repeated(name: str) -> Iterator[Case]:
    more: list[Any] = {"expand": [3, -1, -1], "expand_as": [randn(3, 2, 4)], "broadcast_to": [(3, 2, 4)]}.get(
        name, [(3, 1, 1)]
    )
    yield [randn(1, 2, 4), *more], {INPUT}, {"1": 0}, (0,)


CASES: dict[str, Callable[[str], Iterator[Case]]] = {
    "Linear": _linear,
    "RightProduct": _product,
    "AddedProduct": _added_product,
    "Conv": _conv,
    "Embedding": _embedding,
    "LayerNorm": _layer_norm,
    "RMSNorm": _rms_norm,
    "GroupNorm": _group_norm,
    "Recurrent": _recurrent,
    "Broadcast": _broadcast,
    "Repeated": _repeated,
}
"""By the rule's class: calls of each of its functions."""


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_registered_rule_gives_the_gradients_of_autograd(name: str) -> None:
    torch.manual_seed(0)
    rule = RULES[name]
    cases = list(CASES[type(rule).__name__](name))
    assert cases
    for arguments, weights, dims, out_dims in cases:
        check_rule(rule, function_of(name), arguments, weights, dims, out_dims)


@pytest.mark.parametrize(
    ("name", "arguments", "weights", "dims", "out_dims", "more"),
    [
        ("linear", [randn(2, 4), randn(3, 4)], {INPUT}, {"weight": 0}, (1,), {}),
        ("linear", [randn(2, 3), randn(2, 3)], {WEIGHT}, {"input": 1}, (0,), {}),
        ("addmm", [randn(2), randn(3, 4), randn(4, 2)], {PRODUCT}, {"input": 0}, (0,), {"beta": 2}),
        ("conv2d", [randn(2, 5, 5), randn(3, 2, 2, 2)], {WEIGHT}, {"input": None}, (0,), {}),
        ("embedding", [randn(6, 4), WORDS, -1, True], {WEIGHT}, {"indices": 0}, (0,), {}),
        ("layer_norm", [randn(5, 3), [3], randn(3), randn(3)], {WEIGHT, BIAS}, {"input": 1}, (1,), {}),
        ("mul", [randn(3, 4), randn(3, 4)], {("b", -1)}, {"a": 0}, (0,), {}),
        ("expand", [randn(1, 4), 6, -1], {INPUT}, {}, (0,), {}),
    ],
    ids=[
        "a weight from the left",
        "examples along the summed axis",
        "a scaled bias",
        "an image without an axis of examples",
        "gradients divided by how often a batch has a word",
        "normalised over the examples",
        "a weight with a row for every example",
        "repeated more often than there are examples",
    ],
)
def test_calls_that_a_rule_does_not_cover(name, arguments, weights, dims, out_dims, more) -> None:
    rule = RULES[name]
    assert not rule.suits(make_call(rule, function_of(name), arguments, weights, dims, out_dims, more))


def test_a_trained_first_state_is_not_covered() -> None:
    arguments, _, dims, out_dims = next(_recurrent("gru"))
    assert not RULES["gru"].suits(make_call(RULES["gru"], torch.gru, arguments, {("hx", -1)}, dims, out_dims))


def test_memory_with_channels_last_changes_nothing() -> None:
    rule = RULES["conv2d"]
    call = make_call(rule, torch.conv2d, [randn(3, 2, 5, 5), randn(4, 2, 3, 3)], {WEIGHT}, {"input": 0})
    usual = rule.run(call).detach()
    call.fast_formats = True
    torch.testing.assert_close(rule.run(call).detach(), usual)


class Shift(Rule):
    """A rule of one's own needs only its gradients."""

    functions = ("shifted", "moved_by")
    arguments = ("input", "shift")

    def gradients(self, call, back):
        return {("shift", -1): Explicit(call.output(back[0]))}


def test_a_rule_is_known_by_all_its_functions_and_a_later_one_takes_its_place(monkeypatch) -> None:
    for name in Shift.functions:
        monkeypatch.delitem(RULES, name, raising=False)
    first, second = Shift(), Shift()
    check_rule(first, torch.add, [randn(3, 4), randn(4)], {("shift", -1)}, {"input": 0})
    register(first)
    assert RULES["shifted"] is RULES["moved_by"] is first
    register(second)
    assert RULES["shifted"] is second
    for name in Shift.functions:
        monkeypatch.delitem(RULES, name)


# The zoo: whole models against plain autograd, example by example, in float64


@pytest.fixture
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", ZOO)
def test_the_clipped_sums_of_every_model_are_those_of_plain_autograd(name: str, caplog) -> None:
    make, inputs = ZOO[name]
    x, target = inputs(), torch.randint(0, 3, (NODES, BATCH))
    mask = torch.tensor([[True] * BATCH, [True, False, True, False]])
    with caplog.at_level(logging.WARNING):
        way = compare(make(), x, target, F.cross_entropy, shared=SHARED.get(name, "all"), mask=mask)
    if name == "mlp":
        assert isinstance(way, Chains)
    else:
        assert isinstance(way, Batched)
        assert isinstance(way.plan((pick(x, (0, 0)), target[0, 0]), *rows(way.partition)), Plan) == (
            name not in WITHOUT_RULES
        )
    assert bool(caplog.records) == ("one by one" in name), "a notice of the slow way, and only of that"
