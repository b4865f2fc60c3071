"""LSTM, GRU and plain recurrent layers, of several layers and both directions, on sequences of equal length.

A layer is a linear map of the whole sequence and a loop over time: what comes back to the linear map, d_t, also gives the gradient of
the recurrent weights, the sum of d_t h_{t-1}^T.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from dpps.learning.gradients.contributions import Contribution, Explicit, Outer
from dpps.learning.gradients.layers.rule import Call, Key, Rule, register


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
        own = call["params"][first : first + (4 if call["has_biases"] else 2)]
        input_weight, weight = own[0], own[1]
        bias, recurrent_bias = (own[2], own[3]) if len(own) == 4 else (None, None)
        name, inputs = call.function.__name__, x.detach()
        if name == "lstm":
            both = None if bias is None or recurrent_bias is None else bias + recurrent_bias
            gates = call.watch(F.linear(x, input_weight, both))
            states = call["hx"]
            sequence, cell = _Lstm.apply(gates, weight, states[0][which], states[1][which])  # type: ignore[no-untyped-call]
            return sequence, cell, _Layer(first, inputs, sequence[:-1].detach(), None)
        start = call["hx"][which]
        gates = call.watch(F.linear(x, input_weight, bias))
        if name == "gru":
            sequence, reset = _gru(gates, weight, recurrent_bias, start)
            return sequence, start, _Layer(first, inputs, sequence[:-1].detach(), reset)
        shifted = gates if recurrent_bias is None else gates + recurrent_bias
        sequence = _plain(shifted, weight, start, name == "rnn_relu")
        return sequence, start, _Layer(first, inputs, sequence[:-1].detach(), None)

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


register(Recurrent())
