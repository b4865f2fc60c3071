"""Parameters outside of layers that are added to examples, multiply them or are repeated for them: biases, scales, class tokens."""

from collections.abc import Sequence
from math import prod

from torch import Tensor

from dpps.learning.gradients.contributions import Contribution, Explicit
from dpps.learning.gradients.layers.rule import Call, Key, Rule, register, replace_tensors


class Broadcast(Rule):
    """Functions that repeat a small weight along the examples: every example gets a copy of its own, and its gradient with it."""

    functions = (
        *("add", "add_", "__add__", "__radd__", "sub", "sub_", "__rsub__", "rsub", "subtract"),
        *("mul", "mul_", "__mul__", "__rmul__", "multiply", "div", "div_", "true_divide", "divide"),
        *(
            "__rdiv__",
            "__rtruediv__",
            "maximum",
            "minimum",
            "where",
            "pow",
            "__pow__",
            "__rpow__",
            "addcmul",
            "lerp",
        ),
    )
    arguments = ("a", "b", "c")

    def suits(self, call: Call) -> bool:
        (dim,) = call.out_dims
        return all(
            call.dims[key] is None and _room(weight, call, dim) for key, weight in call.weights.items()
        )

    def run(self, call: Call) -> Tensor:
        own = {key: call.watch(_repeated(weight.detach(), call)) for key, weight in call.weights.items()}
        result: Tensor = call.run(replace_tensors(call.arguments, own))
        return result

    def gradients(self, call: Call, back: Sequence[Tensor]) -> dict[Key, Contribution]:
        found: dict[Key, Contribution] = {}
        for (key, weight), d in zip(call.weights.items(), back, strict=True):
            each = call.output(d)
            if each.ndim > d.ndim:  # several positions of every example lay behind each other
                dim = call.out_dims[0] or 0
                each = each.sum(dim + 1, keepdim=True).squeeze(dim + 1)
            found[key] = Explicit(each.reshape(call.examples, *weight.shape))
        return found


class Repeated(Rule):
    """A weight that is repeated once per example, as a class token in front of every sequence."""

    functions = ("expand", "expand_as", "repeat", "broadcast_to", "tile")
    arguments = ("input",)

    def suits(self, call: Call) -> bool:
        (out,) = call.out_shapes
        return len(call.weights) == 1 and prod(out) == prod(call["input"].shape) * call.examples

    def run(self, call: Call) -> Tensor:
        return call.watch(call.run().detach().clone())

    def gradients(self, call: Call, back: Sequence[Tensor]) -> dict[Key, Contribution]:
        shape = call["input"].shape
        return {("input", -1): Explicit(call.output(back[0]).reshape(call.examples, *shape))}


def _room(weight: Tensor, call: Call, dim: int | None) -> bool:
    """Whether the weight has nothing along the axis of examples of the output."""
    (shape,) = call.out_shapes
    if dim is None:
        return False
    place = dim - (len(shape) - weight.ndim)
    return place < 0 or weight.shape[place] == 1


def _repeated(weight: Tensor, call: Call) -> Tensor:
    (shape,), dim = call.out_shapes, call.out_dims[0]
    assert dim is not None
    full = call.start(weight.reshape(*[1] * (len(shape) - weight.ndim), *weight.shape))
    sizes = [-1] * len(shape)
    sizes[dim] = shape[dim]
    return full.expand(sizes)


register(Broadcast())
register(Repeated())
