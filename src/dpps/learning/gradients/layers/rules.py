"""What a rule is, what it is given (a call of a torch function that takes a trained weight), and the rules: products with a matrix,
convolutions, tables, norms, parameters outside of layers, recurrent layers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from dpps.learning.gradients.layers.contributions import Contribution, Explicit, Outer, Rows

Key = tuple[str, int]
"""The name of an argument, and for a list of tensors the position in it (otherwise -1)."""


class IrregularModel(Exception):  # noqa: N818  (no error for a user: the model goes another way)
    """Rules do not cover the model, or it does not do the same with every batch; `args` says what."""


def tensors_of(arguments: Iterable[tuple[str, Any]]) -> Iterator[tuple[Key, Tensor]]:
    """All tensors among arguments, also those in lists."""
    for name, value in arguments:
        if isinstance(value, Tensor):
            yield (name, -1), value
        elif isinstance(value, (list, tuple)):
            for k, item in enumerate(value):
                if isinstance(item, Tensor):
                    yield (name, k), item


def replace_tensors(arguments: dict[str, Any], new: dict[Key, Tensor]) -> dict[str, Any]:
    """The arguments with some tensors replaced."""
    replaced = dict(arguments)
    for (name, k), tensor in new.items():
        if k < 0:
            replaced[name] = tensor
        else:
            parts = list(replaced[name])
            parts[k] = tensor
            replaced[name] = parts
    return replaced


@dataclass
class Call:
    """One call. `arguments` holds the weights cut off from their own graph, so that no gradient of them is computed."""

    function: Callable[..., Any]
    names: tuple[str, ...]
    """Of the arguments given by position."""
    arguments: dict[str, Any]
    weights: dict[Key, Tensor]
    """The weights as the model had them, with whatever graph leads to the parameters."""
    dims: dict[Key, int | None]
    """Where in each argument the examples lie; None for tensors without them."""
    out_dims: tuple[int | None, ...]
    """The same of the tensors that come out."""
    single_shapes: tuple[tuple[int, ...], ...]
    """The shapes of these, with 1 example."""
    examples: int
    minor: bool = False
    """See `Site`."""
    fast_formats: bool = False
    """Whether outputs may lie in memory as is fastest; some models insist on the usual order of numbers."""
    complete: Callable[["Call"], None] = lambda _: None
    """Called during the backward pass, when the gradients of all watched tensors have come back."""
    root: Tensor = field(default_factory=lambda: torch.empty(0, requires_grad=True))
    """What every graph begins with that no earlier call has begun."""
    kept: dict[str, Any] = field(default_factory=dict)
    """What a rule keeps from its `run` for its `gradients`, cut off from the graph."""
    backs: list[Tensor | None] = field(default_factory=list)
    """What has come back to the watched tensors, in their order."""
    _forms: list[tuple[torch.Size, torch.dtype, torch.device]] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    def run(self, arguments: dict[str, Any] | None = None) -> Any:
        """Call the function, with these arguments or its own."""
        own = self.arguments if arguments is None else arguments
        return self.function(
            *(own[name] for name in self.names), **{k: v for k, v in own.items() if k not in self.names}
        )

    def watch(self, tensor: Tensor) -> Tensor:
        """Ask for the gradient that comes back to a tensor of floats: use what is returned from here on."""
        place = len(self.backs)
        self.backs.append(None)
        self._forms.append((tensor.shape, tensor.dtype, tensor.device))
        if not tensor.requires_grad:
            tensor = self.start(tensor)
        tensor.register_hook(partial(self._came_back, place))  # type: ignore[no-untyped-call]
        return tensor

    def start(self, tensor: Tensor) -> Tensor:
        """The tensor, from now on part of a graph: unlike a leaf it may be written over by an activation."""
        own = tensor.clone() if tensor._is_view() else tensor
        started: Tensor = _Start.apply(own, self.root)  # type: ignore[no-untyped-call]
        return started

    def _came_back(self, place: int, gradient: Tensor) -> None:
        """The gradient of a watched tensor is there."""
        self.backs[place] = gradient
        if all(own is not None for own in self.backs):
            self.complete(self)

    def cut(self) -> None:
        """Release the graph. It holds this call, so a reference back would keep both alive."""
        new = {
            key: tensor.detach() for key, tensor in tensors_of(self.arguments.items()) if tensor.requires_grad
        }
        if new:
            self.arguments = replace_tensors(self.arguments, new)

    def settle(self) -> None:
        """The loss does not depend on watched tensors whose gradient never came back: zero, unless that is so of all."""
        if any(own is not None for own in self.backs) and any(own is None for own in self.backs):
            for place, (shape, dtype, device) in enumerate(self._forms):
                if self.backs[place] is None:
                    self.backs[place] = torch.zeros(shape, dtype=dtype, device=device)
            self.complete(self)

    @property
    def out_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of what comes out."""
        return tuple(
            tuple(size * self.examples if k == dim else size for k, size in enumerate(shape))
            for shape, dim in zip(self.single_shapes, self.out_dims, strict=True)
        )

    def first(self, tensor: Tensor, dim: int | None) -> Tensor:
        """The tensor with the axis of examples first; one that holds several positions of each example is split."""
        if dim is None:
            raise IrregularModel(f"{self.function.__name__}: no axis of examples")
        if tensor.shape[dim] != self.examples:
            if self.minor:
                return torch.unflatten(tensor, dim, (-1, self.examples)).movedim(dim + 1, 0)
            tensor = torch.unflatten(tensor, dim, (self.examples, -1))
        return tensor.movedim(dim, 0) if dim else tensor

    def input(self, name: str) -> Tensor:
        """An argument, detached, with the axis of examples first."""
        return self.first(self.arguments[name].detach(), self.dims.get((name, -1)))

    def output(self, back: Tensor) -> Tensor:
        """What came back to the first output, with the axis of examples first."""
        return self.first(back, self.out_dims[0])


class _Start(torch.autograd.Function):
    """Marks a tensor as the beginning of a graph without copying it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, _: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, None]:
        return None, None


class Rule(ABC):
    """How the examples' gradients follow for one family of torch functions.

    A rule is about *functions* (`torch.conv2d`), not modules: whatever module calls the function has the rule.
    """

    functions: tuple[str, ...]
    """The names of the torch functions (`torch.conv2d.__name__`)."""
    arguments: tuple[str, ...] = ()
    """What the functions call their positional arguments, in order."""

    def suits(self, call: Call) -> bool:
        """Whether the rule covers a call with such arguments; if not, the model goes another way."""
        return True

    def run(self, call: Call) -> Any:
        """The function's result, every tensor of it watched whose gradient the rule needs."""
        return call.watch(call.run())

    @abstractmethod
    def gradients(self, call: Call, back: Sequence[Tensor]) -> dict[Key, Contribution]:
        """The examples' contributions to every weight in `call.weights`.

        Args:
            call: what `run` was given.
            back: the gradients that came back to what `run` watched, in that order.
        """


RULES: dict[str, Rule] = {}
"""By the names of torch functions."""


def register(rule: Rule) -> None:
    """Make a rule known; a later one for the same function takes the place of an earlier one."""
    for name in rule.functions:
        RULES[name] = rule


# Products of examples with a matrix: linear layers on any number of leading dimensions, and bare matrix products


def _positions(tensor: Tensor) -> Tensor:
    """(examples, ..., width) as (examples, 1 group, positions, width)."""
    return tensor.reshape(tensor.shape[0], 1, -1, tensor.shape[-1])


class Linear(Rule):
    """x W^T + b."""

    functions: tuple[str, ...] = ("linear",)
    arguments: tuple[str, ...] = ("input", "weight", "bias")
    weight = "weight"
    """What the functions call the matrix."""

    def suits(self, call: Call) -> bool:
        dim = call.dims.get(("input", -1))
        only = set(call.weights) <= {(self.weight, -1), ("bias", -1)}
        return only and call[self.weight].ndim == 2 and dim is not None and dim < call["input"].ndim - 1

    def gradients(self, call: Call, back: Sequence[Tensor]) -> dict[Key, Contribution]:
        d = _positions(call.output(back[0]))
        found: dict[Key, Contribution] = {}
        if (self.weight, -1) in call.weights:
            sides = d, _positions(call.input("input"))
            left, right = sides if self.weight == "weight" else reversed(sides)
            found[self.weight, -1] = Outer(left, right, call[self.weight].shape)
        if ("bias", -1) in call.weights:
            found["bias", -1] = Explicit(d[:, 0].sum(1))
        return found


class RightProduct(Linear):
    """x W."""

    functions: tuple[str, ...] = ("matmul", "mm", "__matmul__")
    arguments: tuple[str, ...] = ("input", "mat2")
    weight = "mat2"


class AddedProduct(RightProduct):
    """b + x W, as `transformers`' Conv1D has it."""

    functions = ("addmm",)
    arguments = ("bias", "input", "mat2")

    def suits(self, call: Call) -> bool:
        plain = call["beta"] in (None, 1) and call["alpha"] in (None, 1)
        return plain and call["bias"].ndim == 1 and super().suits(call)


# Convolutions in one, two and three dimensions, with stride, padding, dilation and groups: a product of patches with what came back


class Conv(Rule):
    """`torch.conv1d`, `torch.conv2d` and `torch.conv3d`."""

    functions = ("conv1d", "conv2d", "conv3d")
    arguments = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")

    def suits(self, call: Call) -> bool:
        return ("input", -1) not in call.weights and call.dims.get(("input", -1)) == 0

    def run(self, call: Call) -> Tensor:
        # pooling is eight times as fast with channels last
        if call.fast_formats and call["weight"].ndim == 4:
            weight = call["weight"].to(memory_format=torch.channels_last)
            return call.watch(call.run(call.arguments | {"weight": weight}))
        return call.watch(call.run())

    def gradients(self, call: Call, back: Sequence[Tensor]) -> dict[Key, Contribution]:
        x, d, weight = call.input("input"), call.output(back[0]), call["weight"]
        found: dict[Key, Contribution] = {}
        if ("weight", -1) in call.weights:
            axes, groups = weight.ndim - 2, call["groups"] or 1
            stride, dilation = _each(call["stride"], axes, 1), _each(call["dilation"], axes, 1)
            taken = _patches(_padded(x, call), weight.shape[2:], stride, dilation, d.shape[2:], groups)
            # (examples, groups, positions, channels), the positions' own layout left as it lies
            left = d.reshape(len(d), groups, d.shape[1] // groups, -1).mT
            found["weight", -1] = Outer(left, taken, weight.shape)
        if ("bias", -1) in call.weights:
            found["bias", -1] = Explicit(d.flatten(2).sum(2))
        return found


def _patches(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    out: Sequence[int],
    groups: int,
) -> Tensor:
    """All windows of padded inputs, (examples, groups, positions, channels of a group times kernel)."""
    axes, own = len(kernel), x.stride()
    channels = x.shape[1] // groups
    view = x.as_strided(
        (len(x), groups, *out, channels, *kernel),
        (
            *(own[0], own[1] * channels),
            *(own[2 + k] * stride[k] for k in range(axes)),
            own[1],
            *(own[2 + k] * dilation[k] for k in range(axes)),
        ),
        x.storage_offset(),
    )
    return view.reshape(len(x), groups, prod(out), channels * prod(kernel))


def _each(value: Any, axes: int, default: int) -> list[int]:
    """An option for every axis, given once, for every axis, or left out."""
    if value is None:
        return [default] * axes
    if isinstance(value, int):
        return [value] * axes
    return list(value) * (axes if len(value) == 1 else 1)


def _padded(x: Tensor, call: Call) -> Tensor:
    kernel, padding = call["weight"].shape[2:], call["padding"]
    if padding == "same":
        wide = [r * (k - 1) for r, k in zip(_each(call["dilation"], len(kernel), 1), kernel, strict=True)]
        around = [(w // 2, w - w // 2) for w in wide]
    else:
        around = [(p, p) for p in _each(0 if padding == "valid" else padding, len(kernel), 0)]
    sides = [side for both in reversed(around) for side in both]  # in `F.pad`'s order: the last axis first
    return F.pad(x, sides) if any(sides) else x


# Tables that are looked up


class Embedding(Rule):
    """Rows of a table; the row `padding_idx` learns nothing."""

    functions = ("embedding",)
    arguments = ("weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse")

    def suits(self, call: Call) -> bool:
        return not call["scale_grad_by_freq"] and call.dims.get(("indices", -1)) is not None

    def gradients(self, call: Call, back: Sequence[Tensor]) -> dict[Key, Contribution]:
        rows = call.input("indices").reshape(call.examples, -1)
        d = call.output(back[0]).reshape(*rows.shape, -1)
        padding = call["padding_idx"]
        if padding is not None and padding >= 0:
            d = d.masked_fill((rows == padding)[:, :, None], 0.0)
        return {("weight", -1): Rows(rows, d, call["weight"].shape)}


# Norms within an example: their scales and shifts


class _Norm(Rule):
    """Scale times the normalised input plus shift: with the input normalised once more,
    both gradients are sums over positions."""

    def suits(self, call: Call) -> bool:
        return set(call.weights) <= {("weight", -1), ("bias", -1)}

    def normalised(self, call: Call) -> Tensor:
        """The input without scale and shift, detached, in memory of its own."""
        plain = {k: v for k, v in call.arguments.items() if k in call.names or k == "eps"}
        return call.run({**plain, "weight": None, "bias": None})  # type: ignore[no-any-return]

    def gradients(self, call: Call, back: Sequence[Tensor]) -> dict[Key, Contribution]:
        d = call.output(back[0])
        found: dict[Key, Contribution] = {}
        if ("weight", -1) in call.weights:
            plain = call.first(self.normalised(call), call.out_dims[0])
            found["weight", -1] = Explicit(self.summed(plain.mul_(d), call))
        if ("bias", -1) in call.weights:
            found["bias", -1] = Explicit(self.summed(d, call))
        return found

    @abstractmethod
    def summed(self, values: Tensor, call: Call) -> Tensor:
        """The sums over all positions that share a scale."""


class LayerNorm(_Norm):
    """Over the last axes; every number of them has its own scale."""

    functions = ("layer_norm",)
    arguments: tuple[str, ...] = ("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable")

    def suits(self, call: Call) -> bool:
        dim = call.dims.get(("input", -1))
        kept = call["input"].ndim - len(call["normalized_shape"])
        return super().suits(call) and dim is not None and dim < kept

    def run(self, call: Call) -> Tensor:
        shape, eps = call["normalized_shape"], 1e-5 if call["eps"] is None else call["eps"]
        out, mean, scale = torch.native_layer_norm(call["input"], shape, call["weight"], call["bias"], eps)
        call.kept["mean"], call.kept["scale"] = mean.detach(), scale.detach()
        return call.watch(out)

    def normalised(self, call: Call) -> Tensor:
        return torch.sub(call["input"], call.kept["mean"]).mul_(call.kept["scale"])

    def summed(self, values: Tensor, call: Call) -> Tensor:
        shape = call["normalized_shape"]
        return values.reshape(call.examples, -1, *shape).sum(1)


class RMSNorm(LayerNorm):
    """The same without shift."""

    functions = ("rms_norm",)
    arguments = ("input", "normalized_shape", "weight", "eps")

    def run(self, call: Call) -> Tensor:
        return call.watch(call.run())

    def normalised(self, call: Call) -> Tensor:
        return call.run(call.arguments | {"weight": None})  # type: ignore[no-any-return]


class GroupNorm(_Norm):
    """Over groups of channels; every channel has its own scale, and everything behind the channels is summed over."""

    functions = ("group_norm",)
    arguments = ("input", "num_groups", "weight", "bias", "eps", "cudnn_enabled")

    def suits(self, call: Call) -> bool:
        return super().suits(call) and call.dims.get(("input", -1)) == 0

    def summed(self, values: Tensor, call: Call) -> Tensor:
        return values.reshape(*values.shape[:2], -1).sum(2)  # an example may have nothing behind its channels


# Parameters outside of layers that are added to examples, multiply them or are repeated for them: biases, scales, class tokens


class Broadcast(Rule):
    """Functions that repeat a small weight along the examples: every example gets a copy of its own, and its gradient with it."""

    functions = (
        *("add", "add_", "__add__", "__radd__", "sub", "sub_", "__rsub__", "rsub", "subtract"),
        *("mul", "mul_", "__mul__", "__rmul__", "multiply", "div", "div_", "true_divide", "divide"),
        *("__rdiv__", "__rtruediv__", "maximum", "minimum", "where"),
        *("pow", "__pow__", "__rpow__", "addcmul", "lerp"),
    )
    arguments = ("a", "b", "c")

    def suits(self, call: Call) -> bool:
        (shape,), (dim,) = call.out_shapes, call.out_dims
        if dim is None:
            return False
        # as they are broadcast; along the axis of examples of the output there must be nothing
        own = {key: (*[1] * (len(shape) - w.ndim), *w.shape) for key, w in call.weights.items()}
        return all(call.dims[key] is None and sizes[dim] == 1 for key, sizes in own.items())

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


def _repeated(weight: Tensor, call: Call) -> Tensor:
    (shape,), dim = call.out_shapes, call.out_dims[0]
    assert dim is not None
    full = call.start(weight.reshape(*[1] * (len(shape) - weight.ndim), *weight.shape))
    sizes = [-1] * len(shape)
    sizes[dim] = shape[dim]
    return full.expand(sizes)


# LSTM, GRU and plain recurrent layers, of several layers and both directions, on sequences of equal length.
#
# A layer is a linear map of the whole sequence and a loop over time: what comes back to the linear map, d_t, also gives the gradient of
# the recurrent weights, the sum of d_t h_{t-1}^T.


class _Layer(NamedTuple):
    """What one direction of one layer leaves: everything is (time, examples, width)."""

    first_weight: int
    inputs: Tensor
    before: Tensor
    """The hidden state that every step starts from."""
    reset: Tensor | None
    """GRU: the gate that stands between the recurrent weights and the new state."""


class Recurrent(Rule):
    """`torch.lstm`, `torch.gru`, `torch.rnn_tanh` and `torch.rnn_relu`."""

    functions = ("lstm", "gru", "rnn_tanh", "rnn_relu")
    arguments = (
        *("input", "hx", "params", "has_biases", "num_layers"),
        *("dropout", "train", "bidirectional", "batch_first"),
    )

    def suits(self, call: Call) -> bool:
        if len(call.names) != len(self.arguments) or any(name != "params" for name, _ in call.weights):
            return False  # sequences of different length come packed, with other arguments
        per_layer = 4 if call["has_biases"] else 2
        directions = 2 if call["bidirectional"] else 1
        whole = len(call["params"]) == per_layer * call["num_layers"] * directions
        return whole and call.dims.get(("input", -1)) == (0 if call["batch_first"] else 1)

    def run(self, call: Call) -> Any:
        x = call["input"].transpose(0, 1) if call["batch_first"] else call["input"]
        directions, per_layer = 2 if call["bidirectional"] else 1, 4 if call["has_biases"] else 2
        hidden, cells, layers = [], [], []
        for k in range(call["num_layers"]):
            outputs = []
            for direction in range(directions):
                which = k * directions + direction
                source = x.flip(0) if direction else x
                sequence, last_cell, layer = self._layer(call, source, which, which * per_layer)
                layers.append(layer)
                hidden.append(sequence[-1])
                cells.append(last_cell)
                outputs.append(sequence[1:].flip(0) if direction else sequence[1:])
            x = outputs[0] if directions == 1 else torch.cat(outputs, 2)
        call.kept["layers"] = layers
        out = x.transpose(0, 1) if call["batch_first"] else x
        if call.function.__name__ == "lstm":
            return out, torch.stack(hidden), torch.stack(cells)
        return out, torch.stack(hidden)

    def _layer(self, call: Call, x: Tensor, which: int, first: int) -> tuple[Tensor, Tensor, _Layer]:
        input_weight, weight, *biases = call["params"][first : first + (4 if call["has_biases"] else 2)]
        bias, recurrent_bias = biases or (None, None)
        name, reset = call.function.__name__, None
        if name == "lstm":
            gates = call.watch(F.linear(x, input_weight, torch.add(*biases) if biases else None))
            h, c = (state[which] for state in call["hx"])
            sequence, cell = _Lstm.apply(gates, weight, h, c)  # type: ignore[no-untyped-call]
        else:
            gates, cell = call.watch(F.linear(x, input_weight, bias)), call["hx"][which]
            if name == "gru":
                sequence, reset = _gru(gates, weight, recurrent_bias, cell)
            else:
                shifted = gates if recurrent_bias is None else gates + recurrent_bias
                sequence = _plain(shifted, weight, cell, name == "rnn_relu")
        return sequence, cell, _Layer(first, x.detach(), sequence[:-1].detach(), reset)

    def gradients(self, call: Call, back: Sequence[Tensor]) -> dict[Key, Contribution]:
        found: dict[Key, Contribution] = {}
        for layer, d in zip(call.kept["layers"], back, strict=True):
            recurrent = d
            if layer.reset is not None:
                width = layer.reset.shape[2]
                recurrent = torch.cat([d[:, :, : 2 * width], d[:, :, 2 * width :] * layer.reset], 2)
            sides = ((d, layer.inputs), (recurrent, layer.before), (d, None), (recurrent, None))
            for k, (own, other) in enumerate(sides):
                key = ("params", layer.first_weight + k)
                if key not in call.weights:
                    continue
                shape = call.weights[key].shape
                found[key] = Explicit(own.sum(0)) if other is None else Outer(_of(own), _of(other), shape)
        return found


def _of(sequence: Tensor) -> Tensor:
    """(time, examples, width) as (examples, 1 group, positions, width)."""
    return sequence.transpose(0, 1)[:, None]


# The loops over time. Everything is (time, examples, width), weights are constants, and each loop gives all hidden states, the first one
# included. That of the LSTM is differentiated by hand: a few operations per step instead of a graph of them, and the derivatives of the
# activations for all steps at once, before the loop back.


class _Lstm(Function):
    r"""$c_t = f_t c_{t-1} + i_t g_t$, $h_t = o_t \tanh c_t$ with gates in torch's order i, f, g, o."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, weight: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        steps, width = len(gates), h.shape[1]
        hs = gates.new_empty(steps + 1, *h.shape)
        cs, tanhs = torch.empty_like(hs), torch.empty_like(hs[1:])
        hs[0], cs[0] = h, c
        acts, across = torch.empty_like(gates), weight.t().contiguous()
        both, new, out = acts[..., : 2 * width], acts[..., 2 * width : 3 * width], acts[..., 3 * width :]
        for t in range(steps):
            torch.addmm(gates[t], hs[t], across, out=acts[t])
            both[t].sigmoid_()
            new[t].tanh_()
            out[t].sigmoid_()
            torch.mul(acts[t, :, width : 2 * width], cs[t], out=cs[t + 1]).addcmul_(
                acts[t, :, :width], new[t]
            )
            torch.tanh(cs[t + 1], out=tanhs[t])
            torch.mul(out[t], tanhs[t], out=hs[t + 1])
        ctx.save_for_backward(acts, cs, tanhs, weight)
        return hs, cs[-1].clone()

    @staticmethod
    def backward(ctx: Any, *back: Tensor) -> tuple[Tensor, None, Tensor, Tensor]:
        acts, cs, tanhs, weight = ctx.saved_tensors
        d_hs, d_c = back
        steps, width = len(acts), weight.shape[1]
        i, f, g, o = (acts[..., k * width : (k + 1) * width] for k in range(4))
        to_cell = o * (1 - tanhs * tanhs)
        slopes = torch.stack([g * i * (1 - i), cs[:-1] * f * (1 - f), i * (1 - g * g)], 2)
        slope_out = tanhs * o * (1 - o)
        found = torch.empty_like(acts)
        parts = found.view(*found.shape[:2], 4, width)
        d_h = d_hs[steps]
        for t in reversed(range(steps)):
            d_c = torch.addcmul(d_c, d_h, to_cell[t])
            torch.mul(slopes[t], d_c[:, None], out=parts[t, :, :3])
            torch.mul(slope_out[t], d_h, out=parts[t, :, 3])
            d_h = torch.addmm(d_hs[t], found[t], weight)
            d_c = d_c * f[t]
        return found, None, d_h, d_c


def _gru(gates: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor) -> tuple[Tensor, Tensor]:
    r"""$n_t = \tanh(x_n + r_t (W_n h_{t-1} + b_n))$, $h_t = (1 - z_t) n_t + z_t h_{t-1}$ with gates in torch's order r, z, n: all h
    and all r."""
    both, states, resets = 2 * h.shape[1], [h], []
    for x in gates.unbind(0):
        own = F.linear(states[-1], weight, bias)
        reset, keep = (x[:, :both] + own[:, :both]).sigmoid().chunk(2, 1)
        new = torch.addcmul(x[:, both:], reset, own[:, both:]).tanh()
        states.append(torch.lerp(new, states[-1], keep))
        resets.append(reset.detach())
    return torch.stack(states), torch.stack(resets)


def _plain(gates: Tensor, weight: Tensor, h: Tensor, relu: bool) -> Tensor:
    """h_t = tanh(x_t + W h_{t-1}), or the same with ReLU."""
    states = [h]
    for x in gates.unbind(0):
        new = x + F.linear(states[-1], weight)
        states.append(new.relu() if relu else new.tanh())
    return torch.stack(states)


for rule in (
    *(Linear(), RightProduct(), AddedProduct(), Conv(), Embedding()),
    *(LayerNorm(), RMSNorm(), GroupNorm(), Broadcast(), Repeated(), Recurrent()),
):
    register(rule)
