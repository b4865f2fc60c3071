"""Products of examples with a matrix: linear layers on any number of leading dimensions, and bare matrix products."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dpps.learning.gradients.contributions import Contribution, Explicit, Outer
from dpps.learning.gradients.layers.rule import Call, Key, Rule, register


def positions(tensor: Tensor) -> Tensor:
    """(examples, ..., width) as (examples, 1 group, positions, width)."""
    return tensor.reshape(tensor.shape[0], 1, -1, tensor.shape[-1])


class Linear(Rule):
    """x W^T + b."""

    functions: tuple[str, ...] = ("linear",)
    arguments: tuple[str, ...] = ("input", "weight", "bias")

    def suits(self, call: Call) -> bool:
        return (
            ("input", -1) not in call.weights and _last_is_width(call, "input") and call["weight"].ndim == 2
        )

    def gradients(self, call: Call, back: Sequence[Tensor]) -> dict[Key, Contribution]:
        d = positions(call.output(back[0]))
        found: dict[Key, Contribution] = {}
        if ("weight", -1) in call.weights:
            found["weight", -1] = Outer(d, positions(call.input("input")), call["weight"].shape)
        if ("bias", -1) in call.weights:
            found["bias", -1] = Explicit(d[:, 0].sum(1))
        return found


class RightProduct(Rule):
    """x W."""

    functions: tuple[str, ...] = ("matmul", "mm", "__matmul__")
    arguments: tuple[str, ...] = ("input", "mat2")

    def suits(self, call: Call) -> bool:
        weights = set(call.weights) <= {("mat2", -1), ("bias", -1)}
        return weights and call["mat2"].ndim == 2 and _last_is_width(call, "input")

    def gradients(self, call: Call, back: Sequence[Tensor]) -> dict[Key, Contribution]:
        d = positions(call.output(back[0]))
        found: dict[Key, Contribution] = {}
        if ("mat2", -1) in call.weights:
            found["mat2", -1] = Outer(positions(call.input("input")), d, call["mat2"].shape)
        if ("bias", -1) in call.weights:
            found["bias", -1] = Explicit(d[:, 0].sum(1))
        return found


class AddedProduct(RightProduct):
    """b + x W, as `transformers`' Conv1D has it."""

    functions: tuple[str, ...] = ("addmm",)
    arguments: tuple[str, ...] = ("bias", "input", "mat2")

    def suits(self, call: Call) -> bool:
        plain = call["beta"] in (None, 1) and call["alpha"] in (None, 1)
        return plain and call["bias"].ndim == 1 and super().suits(call)


def _last_is_width(call: Call, name: str) -> bool:
    dim = call.dims.get((name, -1))
    return isinstance(call[name], torch.Tensor) and dim is not None and dim < call[name].ndim - 1


for rule in (Linear(), RightProduct(), AddedProduct()):
    register(rule)
