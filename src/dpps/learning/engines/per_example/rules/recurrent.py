"""LSTM, GRU and plain recurrent layers, of several layers and both directions, on sequences of equal length.

A layer is a linear map of the whole sequence and a loop over time that is differentiated by hand: what comes back to the linear
map, d_t, also gives the gradient of the recurrent weights, the sum of d_t h_{t-1}^T.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dpps.learning.engines.per_example.calls import Call, Key
from dpps.learning.engines.per_example.contributions import Contribution, Explicit, Outer
from dpps.learning.engines.per_example.rules.base import Rule, register
from dpps.learning.engines.per_example.rules.loops import gru, lstm, plain


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
            sequence, cell = lstm(gates, weight, states[0][which], states[1][which])
            return sequence, cell, _Layer(first, inputs, sequence[:-1].detach(), None)
        start = call["hx"][which]
        gates = call.watch(F.linear(x, input_weight, bias))
        if name == "gru":
            sequence, reset = gru(gates, weight, recurrent_bias, start)
            return sequence, start, _Layer(first, inputs, sequence[:-1].detach(), reset.detach())
        sequence = plain(gates, weight, recurrent_bias, start, relu=name == "rnn_relu")
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


register(Recurrent())
