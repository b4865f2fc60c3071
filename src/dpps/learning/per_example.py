"""Per-example clipped gradients (unit record): what one example can change is bounded, whatever the model.

Two ways give the same sums. `Examples` differentiates every example by itself (`torch.func`), for any model. `Linears` is for
models of linear layers and activations: there, an example's gradient of a layer is an outer product of what goes in and what
comes back, so its norm and the clipped sum follow from one backward pass, without a gradient per example. `Chains` is the same
where `dpps.learning.chain` has that pass written out.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from dpps.errors import UsageError
from dpps.learning.chain import Chain, blocks, is_chain, outer, output_gradients
from dpps.learning.gradients import Loss
from dpps.learning.partition import Partition
from dpps.models import MLP, MLPResidual
from dpps.models.stages import ELEMENTWISE

_LIMIT = 1 << 24  # gradient numbers held at a time: 64 MiB in float32
_MARGIN = 1e-4  # clipping stays below the bound by more than the rounding of float32 norms and sums

_KNOWN = frozenset((nn.Linear, nn.Flatten, *ELEMENTWISE, nn.Sequential, MLP, MLPResidual))


class PerExample(ABC):
    """Sums over a batch of per-example gradients, each scaled down to an L2 norm of `clip` over shared and local together."""

    def __init__(self, partition: Partition, loss: Loss, clip: float) -> None:
        self.partition, self.loss, self.clip = partition, loss, clip

    @abstractmethod
    def sums(
        self, y: Tensor, l: Tensor, x: Tensor, target: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mean losses (for display), and the sums of clipped gradients for s and l, over the examples in the mask.

        One backward pass at (y, l) serves both parts: un-noised local parameters would let one example move all others'
        gradients, so here both updates are noised.
        """

    def _factors(self, squared_norms: Tensor, mask: Tensor) -> Tensor:
        return self.clip / squared_norms.sqrt().clamp(min=self.clip) * (1 - _MARGIN) * mask

    @staticmethod
    def _without(bad: Tensor, values: Tensor) -> Tensor:
        """Examples whose gradient is not finite count as zero: neither a NaN nor stopping because of one may tell of them."""
        return values.masked_fill(bad[:, :, None], 0.0)


class Examples(PerExample):
    """Any model: all nodes and examples at once through `torch.vmap`, in chunks that bound memory."""

    def __init__(self, partition: Partition, loss: Loss, clip: float) -> None:
        super().__init__(partition, loss, clip)

        def one(s: Tensor, l: Tensor, x: Tensor, target: Tensor) -> Tensor:
            return loss(functional_call(partition.model, partition.views(s, l), (x[None],)), target[None])

        examples = torch.vmap(
            grad_and_value(one, argnums=(0, 1)), in_dims=(None, None, 0, 0), randomness="different"
        )
        self._gradients = torch.vmap(examples, randomness="different")

    def sums(
        self, y: Tensor, l: Tensor, x: Tensor, target: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.partition.model.train()
        losses = torch.zeros(len(y), device=y.device)
        sum_s, sum_l = torch.zeros_like(y), torch.zeros_like(l)
        per_example = max(1, y.shape[1] + l.shape[1]) * len(y)
        for first in range(0, mask.shape[1], chunk := max(1, _LIMIT // per_example)):
            part = slice(first, first + chunk)
            (g_s, g_l), values = self._gradients(y, l, x[:, part], target[:, part])
            squares = _squares(g_s) + _squares(g_l)
            bad = ~torch.isfinite(squares)
            factor = self._factors(squares.masked_fill(bad, 0.0), mask[:, part])
            sum_s += torch.bmm(factor[:, None], self._without(bad, g_s))[:, 0]
            sum_l += torch.bmm(factor[:, None], self._without(bad, g_l))[:, 0]
            losses += values.masked_fill(~mask[:, part], 0.0).sum(1)
        return losses / mask.sum(1).clamp(min=1), sum_s, sum_l


class Linears(PerExample):
    r"""Models of linear layers: with input a and returning gradient d, example e's gradient is $d_e a_e^T$ (bias: $d_e$).

    So $\|g_e\|^2 = \sum_{layers} \|d_e\|^2 (\|a_e\|^2 + 1)$ and the clipped sum is $\sum_e f_e d_e a_e^T$.
    """

    def __init__(self, partition: Partition, loss: Loss, clip: float) -> None:
        super().__init__(partition, loss, clip)
        self._layers = {n: m for n, m in partition.model.named_modules() if isinstance(m, nn.Linear)}
        self._widest = max(max(m.in_features, m.out_features) for m in self._layers.values())

    def sums(
        self, y: Tensor, l: Tensor, x: Tensor, target: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        losses = torch.empty(len(y), dtype=y.dtype, device=y.device)
        sum_s, sum_l = torch.empty_like(y), torch.empty_like(l)
        for rows in blocks(len(y), mask.shape[1] * self._widest):
            each, inputs, returned = self._passes(y[rows], l[rows], x[rows], target[rows])
            own = mask[rows]
            self._clipped(inputs, returned, own, sum_s[rows], sum_l[rows])
            losses[rows] = each.masked_fill(~own, 0.0).sum(1) / own.sum(1).clamp(min=1)
        return losses, sum_s, sum_l

    def _clipped(
        self, inputs: Sequence[Tensor], returned: Sequence[Tensor], mask: Tensor, sum_s: Tensor, sum_l: Tensor
    ) -> None:
        squares = torch.zeros_like(mask, dtype=sum_s.dtype)
        for layer, a, d in zip(self._layers.values(), inputs, returned, strict=True):
            squares += _squares(d) * (_squares(a) + float(layer.bias is not None))
        bad = ~torch.isfinite(squares)
        if bool(bad.any()):
            inputs, returned = ([self._without(bad, part) for part in parts] for parts in (inputs, returned))
        factor = self._factors(squares.masked_fill(bad, 0.0), mask)
        for (name, layer), a, d in zip(self._layers.items(), inputs, returned, strict=True):
            narrow = d * factor[:, :, None] if layer.out_features <= layer.in_features else d
            wide = a if narrow is not d else a * factor[:, :, None]
            self._rows(f"{name}.weight", sum_s, sum_l).copy_(outer(narrow, wide))
            if layer.bias is not None:
                into = self._rows(f"{name}.bias", sum_s, sum_l)
                torch.bmm(factor[:, None], d, out=into[:, None])

    def _passes(
        self, y: Tensor, l: Tensor, x: Tensor, target: Tensor
    ) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
        """Every example's loss, what went into each layer, and what came back: a tap is a zero added to a layer's output."""
        self.partition.model.train()
        taps = {
            name: torch.zeros(
                *x.shape[:2], layer.out_features, device=y.device, dtype=y.dtype, requires_grad=True
            )
            for name, layer in self._layers.items()
        }
        losses, inputs = torch.vmap(self._forward)(y, l, x, target, taps)
        return losses.detach(), inputs, torch.autograd.grad(losses.sum(), list(taps.values()))

    def _forward(
        self, s: Tensor, l: Tensor, x: Tensor, target: Tensor, taps: dict[str, Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """One node: every example's loss, and what went into each layer."""
        seen: dict[str, Tensor] = {}

        def listen(name: str) -> torch.utils.hooks.RemovableHandle:
            def hook(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
                seen[name] = inputs[0]
                return output + taps[name]

            return self._layers[name].register_forward_hook(hook)

        handles = [listen(name) for name in self._layers]
        try:
            outputs = functional_call(
                self.partition.model, self.partition.views(s.detach(), l.detach()), (x,)
            )
        finally:
            for handle in handles:
                handle.remove()
        losses = torch.vmap(lambda o, t: self.loss(o[None], t[None]))(outputs, target)
        return losses, [seen[name].detach() for name in self._layers]

    def _rows(self, name: str, s: Tensor, l: Tensor) -> Tensor:
        """Where a parameter's sums go, (nodes, *shape)."""
        for slots, rows in ((self.partition.shared, s), (self.partition.local, l)):
            slot = next((slot for slot in slots if slot.name == name), None)
            if slot is not None:
                return slot.of(rows)
        raise AssertionError(f"{name} is neither shared nor local")


class Chains(Linears):
    """The same for chains, whose passes are written out."""

    def __init__(self, partition: Partition, loss: Loss, clip: float) -> None:
        super().__init__(partition, loss, clip)
        self._chain = Chain(partition)

    def _passes(
        self, y: Tensor, l: Tensor, x: Tensor, target: Tensor
    ) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
        chain, losses = self._chain, torch.empty(target.shape[:2], dtype=y.dtype, device=y.device)
        layers = chain.layers(y, l)
        gradient = output_gradients(self.loss, target, each_example=True)(chain.forward(layers, x), losses)
        chain.backward(layers, gradient)
        return losses, self._chain.inputs[:-1], self._chain.returned


def per_example(partition: Partition, loss: Loss, clip: float, example: Tensor) -> PerExample:
    """The quick way where it is certain to be right, otherwise the general one."""
    refuse_mixing(partition.model)
    if not _only_linear(partition, example):
        return Examples(partition, loss, clip)
    return (Chains if is_chain(partition, example.ndim + 1) else Linears)(partition, loss, clip)


def _only_linear(partition: Partition, example: Tensor) -> bool:
    """Whether the model is known to treat examples one by one and all its parameters sit in linear layers used once on vectors.

    Only modules whose forward pass is known count, by exact type and without hooks: a module that mixed the examples of a batch,
    or a parameter that is no layer's weight or bias (tied, normalised, low-rank), would break the bound.
    """
    model = partition.model
    modules = list(model.modules())
    if any(type(m) not in _KNOWN or m._forward_hooks or m._forward_pre_hooks for m in modules):
        return False
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    owned = [f"{name}.{own}" for name, m in linear.items() for own, _ in m.named_parameters(recurse=False)]
    trained = [slot.name for slot in (*partition.shared, *partition.local)]
    if sorted(owned) != sorted(trained):
        return False
    calls: list[int] = []
    handles = [
        m.register_forward_hook(lambda _, inputs, __: calls.append(inputs[0].ndim)) for m in linear.values()
    ]
    with torch.no_grad():
        model(example[None])
    for handle in handles:
        handle.remove()
    return calls == [2] * len(linear)


def _squares(g: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(g, dim=2)
    return norms.square()


def refuse_mixing(model: nn.Module) -> None:
    """BatchNorm mixes the examples of a batch, so no gradient belongs to one example; dropout masks would have to be secret."""
    norms: Sequence[str] = [name for name, m in model.named_modules() if isinstance(m, _BatchNorm)]
    if norms:
        raise UsageError(
            f"{_some(norms)}: BatchNorm mixes examples, so the record unit cannot bound one example's share; "
            "use GroupNorm instead (--norm group, ResNet18(norm='group')), or the unit contribution"
        )
    dropouts = [name for name, m in model.named_modules() if isinstance(m, _DropoutNd) and m.p > 0]
    if dropouts:
        raise UsageError(
            f"{_some(dropouts)}: dropout masks are drawn for the whole batch, so one example more would change the others'; "
            "set dropout to 0 in the record unit (its noise regularises)"
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
