"""Normalisations within an example: their scales and shifts."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from dpps.learning.gradients.contributions import Contribution, Explicit
from dpps.learning.gradients.layers.rule import Call, Key, Rule, register


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

    functions: tuple[str, ...] = ("layer_norm",)
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

    functions: tuple[str, ...] = ("rms_norm",)
    arguments: tuple[str, ...] = ("input", "normalized_shape", "weight", "eps")

    def run(self, call: Call) -> Tensor:
        return call.watch(call.run())

    def normalised(self, call: Call) -> Tensor:
        return call.run(call.arguments | {"weight": None})  # type: ignore[no-any-return]


class GroupNorm(_Norm):
    """Over groups of channels; every channel has its own scale, and everything behind the channels is summed over."""

    functions: tuple[str, ...] = ("group_norm",)
    arguments: tuple[str, ...] = ("input", "num_groups", "weight", "bias", "eps", "cudnn_enabled")

    def suits(self, call: Call) -> bool:
        return super().suits(call) and call.dims.get(("input", -1)) == 0

    def summed(self, values: Tensor, call: Call) -> Tensor:
        return values.reshape(*values.shape[:2], -1).sum(2)  # an example may have nothing behind its channels


for rule in (LayerNorm(), RMSNorm(), GroupNorm()):
    register(rule)
