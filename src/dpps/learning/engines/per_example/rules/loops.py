"""The loops over time of recurrent layers, forward and backward by hand: a few operations per step instead of a graph of them.

Everything is (time, examples, width). Derivatives of the activations are computed for all steps at once, before the loop back.
Weights are constants here: no gradient of them is computed.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


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


class _Gru(Function):
    r"""$n_t = \tanh(x_n + r_t (W_n h_{t-1} + b_n))$, $h_t = (1 - z_t) n_t + z_t h_{t-1}$ with gates in torch's order r, z, n."""

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor
    ) -> tuple[Tensor, Tensor]:
        steps, width = len(gates), h.shape[1]
        hs = gates.new_empty(steps + 1, *h.shape)
        hs[0] = h
        across = weight.t().contiguous()
        acts, inner = torch.empty_like(gates), gates.new_empty(steps, *h.shape)
        for t in range(steps):
            own = hs[t] @ across if bias is None else torch.addmm(bias, hs[t], across)
            rz = torch.add(
                gates[t, :, : 2 * width], own[:, : 2 * width], out=acts[t, :, : 2 * width]
            ).sigmoid_()
            inner[t] = own[:, 2 * width :]
            new = torch.addcmul(
                gates[t, :, 2 * width :], rz[:, :width], inner[t], out=acts[t, :, 2 * width :]
            ).tanh_()
            torch.lerp(new, hs[t], rz[:, width:], out=hs[t + 1])
        ctx.save_for_backward(acts, inner, hs, weight)
        reset = acts[..., :width].clone()
        ctx.mark_non_differentiable(reset)
        return hs, reset

    @staticmethod
    def backward(ctx: Any, *back: Tensor) -> tuple[Tensor, None, None, Tensor]:
        acts, inner, hs, weight = ctx.saved_tensors
        d_hs, steps, width = back[0], len(acts), weight.shape[1]
        r, z, n = (acts[..., k * width : (k + 1) * width] for k in range(3))
        to_new = (1 - z) * (1 - n * n)
        to_reset, to_update = to_new * inner * r * (1 - r), (hs[:-1] - n) * z * (1 - z)
        slopes = torch.stack([to_reset, to_update, to_new], 2)
        across = torch.stack([to_reset, to_update, to_new * r], 2)
        found, again = torch.empty_like(acts), torch.empty_like(acts[0])
        d_h = d_hs[steps]
        for t in reversed(range(steps)):
            torch.mul(slopes[t], d_h[:, None], out=found[t].view(-1, 3, width))
            torch.mul(across[t], d_h[:, None], out=again.view(-1, 3, width))
            d_h = torch.addmm(d_hs[t], again, weight).addcmul_(d_h, z[t])
        return found, None, None, d_h


class _Plain(Function):
    """h_t = tanh(x_t + W h_{t-1} + b), or the same with ReLU."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, weight: Tensor, h: Tensor, relu: bool) -> Tensor:
        hs = gates.new_empty(len(gates) + 1, *h.shape)
        hs[0] = h
        across = weight.t().contiguous()
        for t in range(len(gates)):
            new = torch.addmm(gates[t], hs[t], across, out=hs[t + 1])
            new.relu_() if relu else new.tanh_()
        ctx.save_for_backward(hs, weight)
        ctx.relu = relu
        return hs

    @staticmethod
    def backward(ctx: Any, *back: Tensor) -> tuple[Tensor, None, Tensor, None]:
        hs, weight = ctx.saved_tensors
        (d_hs,) = back
        slopes = (hs[1:] > 0).to(hs) if ctx.relu else 1 - hs[1:] * hs[1:]
        found, d_h = torch.empty_like(hs[1:]), d_hs[-1]
        for t in reversed(range(len(found))):
            torch.mul(slopes[t], d_h, out=found[t])
            d_h = torch.addmm(d_hs[t], found[t], weight)
        return found, None, d_h, None


def lstm(gates: Tensor, weight: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """All hidden states, the first one included, and the last cell state."""
    found: tuple[Tensor, Tensor] = _Lstm.apply(gates, weight, h, c)  # type: ignore[no-untyped-call]
    return found


def gru(gates: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor) -> tuple[Tensor, Tensor]:
    """All hidden states, the first one included, and the reset gates."""
    found: tuple[Tensor, Tensor] = _Gru.apply(gates, weight, bias, h)  # type: ignore[no-untyped-call]
    return found


def plain(gates: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor, *, relu: bool) -> Tensor:
    """All hidden states, the first one included."""
    shifted = gates if bias is None else gates + bias
    found: Tensor = _Plain.apply(shifted, weight, h, relu)  # type: ignore[no-untyped-call]
    return found
