"""Convolutions in one, two and three dimensions, with stride, padding, dilation and groups.

An example's gradient is a matrix product of its patches with what came back.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpps.learning.gradients.contributions import Contribution, Explicit, Outer
from dpps.learning.gradients.layers.rule import Call, Key, Rule, register


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
    if padding == "valid":
        return x
    if padding == "same":
        wide = [r * (k - 1) for r, k in zip(_each(call["dilation"], len(kernel), 1), kernel, strict=True)]
        before = [w // 2 for w in wide]
        return F.pad(x, _both(before, [w - b for w, b in zip(wide, before, strict=True)]))
    around = _each(padding, len(kernel), 0)
    return F.pad(x, _both(around, around)) if any(around) else x


def _both(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """In `F.pad`'s order: the last axis first."""
    return [size for b, a in zip(reversed(before), reversed(after), strict=True) for size in (b, a)]


register(Conv())
