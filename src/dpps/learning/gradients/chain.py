"""Models that are chains of linear layers and activations: forward and backward passes written out for all nodes at once.

Every product is one `torch.bmm` over the nodes into memory that is used again in every round, a backward pass goes down only
as far as a gradient is asked for, and a second forward pass starts where parameters have changed. `Chained` takes the two
gradients of Algorithm 2 from it; `Chains` takes what goes into a layer and what comes back, and clips every example's gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpps.learning.gradients.batch import Update, Vectorised
from dpps.learning.gradients.calling import FAILURES, Loss
from dpps.learning.gradients.clipped import PerExample, Sums, Weigh
from dpps.learning.gradients.layers.contributions import squared_norms, sum_of_products
from dpps.learning.partition import Partition
from dpps.models import MLP

_ACTIVATIONS: dict[type[nn.Module], str] = {nn.Tanh: "tanh", nn.ReLU: "relu", nn.Identity: "identity"}
_BLOCK = 1 << 21  # numbers of the widest layer at a time (several nodes): they stay in the processor's cache
_TALL = 512  # examples up to which a product of a narrow result is computed as its transpose
_OUTPUTS = 1 << 22  # numbers at the end of the chain, of all nodes, that an evaluation holds at a time


@dataclass(frozen=True)
class Link:
    """One linear layer and the activation behind it."""

    parameters: tuple[str, str | None]
    """The names of weight and bias."""
    inputs: int
    outputs: int
    activation: str


def is_chain(partition: Partition, axes: int) -> bool:
    """Whether the model is a chain, all of whose parameters are trained, for batches with so many axes."""
    found = links(partition.model)
    trained = {slot.name for slot in (*partition.shared, *partition.local)}
    if found is None or {name for link in found for name in link.parameters if name} != trained:
        return False
    flattens = type(partition.model) is MLP or type(next(partition.model.children(), None)) is nn.Flatten
    return flattens or axes == 2


def links(model: nn.Module) -> list[Link] | None:
    """The model as a chain; None if it is anything else, or if one of its modules is listened to or patched."""
    if any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or "forward" in vars(m)
        for m in model.modules()
    ):
        return None
    if type(model) is nn.Linear:
        return [_link("", model, "identity")]
    if type(model) is MLP:
        return [_link(name, m, "tanh") for name, m in model.named_children() if isinstance(m, nn.Linear)]
    if type(model) is not nn.Sequential:
        return None
    found: list[Link] = []
    for k, (name, module) in enumerate(model.named_children()):
        if type(module) is nn.Flatten and k == 0 and (module.start_dim, module.end_dim) == (1, -1):
            continue
        if type(module) is nn.Linear:
            found.append(_link(name, module, "identity"))
        elif type(module) in _ACTIVATIONS and found and found[-1].activation == "identity":
            found[-1] = replace(found[-1], activation=_ACTIVATIONS[type(module)])
        else:
            return None
    return found or None


def _link(name: str, linear: nn.Linear, activation: str) -> Link:
    prefix = f"{name}." if name else ""
    parameters = f"{prefix}weight", None if linear.bias is None else f"{prefix}bias"
    return Link(parameters, linear.in_features, linear.out_features, activation)


Layer = tuple[Tensor, Tensor | None]
"""Weight (nodes, outputs, inputs) and bias (nodes, outputs) of one layer, or what is written in their places."""


class Chain:
    """Passes through a chain for a block of nodes. What a pass leaves is overwritten by the next one.

    Args:
        partition: of a model for which `links` gives a chain.
    """

    def __init__(self, partition: Partition) -> None:
        chain = links(partition.model)
        assert chain is not None
        self.links = chain
        both = partition.local, partition.shared
        self._sizes = [[slot.stop - slot.start for slot in slots] for slots in both]
        place: dict[str | None, tuple[int, int, torch.Size]] = {
            slot.name: (s, k, slot.shape) for s, slots in enumerate(both) for k, slot in enumerate(slots)
        }
        self._places = [tuple(map(place.get, link.parameters)) for link in chain]
        """Of every weight and bias: 1 for shared, its position among those, its shape."""
        self.inputs: list[Tensor] = []
        """What went into each layer, (nodes, batch, inputs); behind the last one: the output."""
        self.returned: list[Tensor] = [torch.empty(0)] * len(chain)
        """What came back to each layer's linear output, as far down as the last backward pass went."""
        self._memory: dict[tuple[object, ...], Tensor] = {}

    def lowest(self, *, shared: bool) -> int:
        """The first layer with shared (or local) parameters; the number of layers if there is none."""
        own = (k for k, places in enumerate(self._places) if any(p and p[0] == shared for p in places))
        return next(own, len(self.links))

    def layers(self, s: Tensor, l: Tensor) -> list[Layer]:
        """The parameters in the rows of s and l, or their places in memory for such, as views."""
        rows = [
            torch.split_with_sizes(r, n, 1) if n else () for r, n in zip((l, s), self._sizes, strict=True)
        ]
        nodes = s.shape[0]
        return [
            tuple(p and rows[p[0]][p[1]].view(nodes, *p[2]) for p in places)  # type: ignore[misc]
            for places in self._places
        ]

    def together(self, of_shared: Sequence[Layer], of_local: Sequence[Layer]) -> list[Layer]:
        """The shared parameters of the one and the local ones of the other."""
        return [
            tuple(a if p and p[0] else b for p, a, b in zip(places, one, other, strict=True))  # type: ignore[misc]
            for places, one, other in zip(self._places, of_shared, of_local, strict=True)
        ]

    def forward(
        self, layers: Sequence[Layer], x: Tensor | None, first: int = 0, stop: int | None = None
    ) -> Tensor:
        """The outputs (nodes, batch, width) of layers `first` to `stop`, for x, or (None) for what the last pass left there."""
        if x is not None:
            self.inputs = [x.flatten(2)]
        del self.inputs[first + 1 :]
        batch = self.inputs[0].shape[1]
        for k in range(first, len(self.links) if stop is None else stop):
            (weight, bias), link = layers[k], self.links[k]
            z = self._product(("out", k), batch, link.outputs, self.inputs[k], weight.mT, bias)
            self.inputs.append(_activate(link.activation, z))
        return self.inputs[-1]

    def backward(self, layers: Sequence[Layer], gradient: Tensor, last: int = 0) -> None:
        """From the loss's gradient at the outputs down to layer `last`: fills `returned`."""
        for k in reversed(range(last, len(self.links))):
            link = self.links[k]
            back = self.returned[k] = _deactivate(link.activation, gradient, self.inputs[k + 1])
            if k > last:
                gradient = self._product(("back", k), back.shape[1], link.inputs, back, layers[k][0])

    def weight_gradients(self, *, shared: bool, last: int, out: Sequence[Layer]) -> None:
        """The gradients of the shared (or local) parameters of layer `last` and above, into their places."""
        for k in range(last, len(self.links)):
            weight, bias = (
                t if p and p[0] == shared else None for t, p in zip(out[k], self._places[k], strict=True)
            )
            back, link = self.returned[k], self.links[k]
            if bias is not None:
                bias.copy_(back.sum(1))
            if weight is not None:
                product = self._product(("outer", k), link.outputs, link.inputs, back.mT, self.inputs[k])
                weight.copy_(product)  # a product right into rows that lie apart takes three times as long

    def _product(
        self, name: tuple[str, int], rows: int, columns: int, a: Tensor, b: Tensor, add: Tensor | None = None
    ) -> Tensor:
        """a b of every node, plus `add` (nodes, columns) to every row, in memory that the next such product uses again.

        The kernels take two to six times as long for a tall result as for a wide one: of the two,
        the wide one is computed, but for batches so large that turning them around costs more.
        """
        nodes, tall = b.shape[0], rows > columns and (rows <= _TALL or a.stride(2) != 1)
        size, place = nodes * rows * columns, (*name, b.dtype, b.device)
        own = self._memory.get(place)
        if own is None or own.numel() < size:
            own = self._memory[place] = torch.empty(size, dtype=b.dtype, device=b.device)
        out = own[:size].view((nodes, columns, rows) if tall else (nodes, rows, columns))
        if tall:
            a, b = b.mT, a.mT
        if add is None:
            torch.bmm(a, b, out=out)
        else:
            torch.baddbmm(add[:, :, None] if tall else add[:, None], a, b, out=out)
        return out.mT if tall else out


class Chained(Vectorised):
    """The two gradients of Algorithm 2 for a chain, several nodes at a time."""

    def __init__(self, partition: Partition, loss: Loss, rows: Sequence[int], seed: int = 0) -> None:
        super().__init__(partition, loss, rows, seed)
        self.chain = Chain(partition)
        self._widest = max(max(link.inputs, link.outputs) for link in self.chain.links)
        self.at_once = max(self.at_once, _OUTPUTS // (len(rows) * self.chain.links[-1].outputs))

    def _step(
        self, y: Tensor, l: Tensor, x: Tensor, target: Tensor, update: Update, round_: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        losses = torch.empty(len(y), dtype=y.dtype, device=y.device)
        new, shared = self._spare(l), self._gradients(y)
        for rows in blocks(len(y), x.shape[1] * self._widest):
            parts = [y, l, x, target, losses, new, shared]
            whole = rows.stop == len(y) and not rows.start
            self._block(rows, update, parts if whole else [part[rows] for part in parts])
        return losses, new, shared

    def _block(self, rows: slice, update: Update, parts: Sequence[Tensor]) -> None:
        y, l, x, target, losses, new, shared = parts
        chain, gradients_at = self.chain, output_gradients(self.loss, target)
        layers, places = chain.layers(y, l), chain.layers(shared, new)
        gradient = gradients_at(chain.forward(layers, x), losses)
        if self.partition.local:
            first = chain.lowest(shared=False)
            chain.backward(layers, gradient, first)
            chain.weight_gradients(shared=False, last=first, out=places)
            updated = update(new, rows)
            if updated.data_ptr() != new.data_ptr():
                new.copy_(updated)
            if self.partition.shared:
                layers = chain.together(layers, places)
                gradient = gradients_at(chain.forward(layers, None, first), None)
        if self.partition.shared:
            first = chain.lowest(shared=True)
            chain.backward(layers, gradient, first)
            chain.weight_gradients(shared=True, last=first, out=places)

    @torch.no_grad()
    def outputs(self, s: Tensor, l: Tensor, x: Tensor) -> Tensor:
        chain, first = self.chain, self.chain.lowest(shared=False)
        common, own = chain.layers(s[None], l[:1]), chain.layers(s.expand(len(l), -1), l)
        results = x.new_empty(len(l), len(x), chain.links[-1].outputs)
        for part in blocks(len(x), len(l) * self._widest):
            chain.forward(common, x[None, part], stop=first)  # the same for all nodes
            chain.inputs = [h.expand(len(l), *h.shape[1:]) for h in chain.inputs]
            results[:, part] = chain.forward(own, None, first)
        return results


class Chains(PerExample):
    r"""Chains of linear layers. With input a and returning gradient d, example e's gradient of a layer is d_e a_e^T:
    $\|g_e\|^2 = \sum_{layers} \|d_e\|^2 (\|a_e\|^2 + 1)$ and the clipped sum is $\sum_e f_e d_e a_e^T$."""

    def __init__(
        self, partition: Partition, loss: Loss, clip: float, batch: int = 1, weigh: Weigh | None = None
    ) -> None:
        super().__init__(partition, loss, clip, batch, weigh)
        self._chain = Chain(partition)
        self._widest = max(max(link.inputs, link.outputs) for link in self._chain.links)

    def sums(self, y: Tensor, l: Tensor, x: Any, target: Any, mask: Tensor) -> Sums:
        try:
            return self._all_at_once(y, l, x, target, mask)
        except FAILURES:  # a label that is no class, say
            if not self.hides_failures:
                raise
        return self._one_by_one(y, l, x, target, mask)

    def _all_at_once(self, y: Tensor, l: Tensor, x: Any, target: Any, mask: Tensor) -> Sums:
        sums, piece = self._start(y, l, mask)
        losses, sum_s, sum_l = sums
        for rows in blocks(len(y), mask.shape[1] * self._widest):
            each, squares = self._passes(y[rows], l[rows], x[rows], target[rows])
            own = mask[rows]
            present = own.sum(1).clamp(min=1)
            self._clipped(squares, own, sum_s[rows], sum_l[rows], piece, target[rows])
            self.skipped.not_finite(int((~torch.isfinite(squares) & own).sum()))
            sums.clipped[rows] = ((squares > self.clip**2) & own).sum(1) / present
            losses[rows] = each.masked_fill(~own, 0.0).sum(1) / present
        self.skipped.report(int(mask.sum()))
        return sums

    def _passes(self, y: Tensor, l: Tensor, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Every example's loss and squared norm; what went into each layer and what came back stays in the chain."""
        chain, losses = self._chain, torch.empty(target.shape[:2], dtype=y.dtype, device=y.device)
        layers = chain.layers(y, l)
        gradient = output_gradients(self.loss, target, each_example=True)(chain.forward(layers, x), losses)
        chain.backward(layers, gradient)
        squares = torch.zeros(target.shape[:2], dtype=torch.float64, device=y.device)
        for link, a, d in zip(chain.links, chain.inputs[:-1], chain.returned, strict=True):
            squares += squared_norms(d) * (squared_norms(a) + float(link.parameters[1] is not None))
        return losses, squares

    def _clipped(
        self, squares: Tensor, mask: Tensor, sum_s: Tensor, sum_l: Tensor, piece: int | None, target: Tensor
    ) -> None:
        inputs, returned = self._chain.inputs[:-1], self._chain.returned
        bad = ~torch.isfinite(squares)
        # neither a NaN nor an error may reveal an example: it counts as zero
        if bool(bad.any()):
            inputs, returned = (
                [part.masked_fill(bad[:, :, None], 0.0) for part in parts] for parts in (inputs, returned)
            )
            squares = squares.masked_fill(bad, 0.0)
        factors = self._factors(squares, returned[0].dtype, target) * mask
        places = self._chain.layers(sum_s, sum_l)
        for (weight, bias), a, d in zip(places, inputs, returned, strict=True):
            narrow = d * factors[:, :, None]
            weight.copy_(sum_of_products(narrow, a, 1, piece))
            if bias is not None:
                bias.copy_(narrow.sum(1) if piece is None else narrow.sum(1, dtype=torch.float64))


def output_gradients(
    loss: Loss, target: Tensor, *, each_example: bool = False
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """A function of (outputs, losses) that writes every node's (or example's) loss into `losses` and returns the gradient at the outputs."""
    if loss is F.cross_entropy and target.dtype == torch.int64 and int(target.min()) >= 0:
        return lambda outputs, losses: _cross_entropy(outputs, target, losses, each_example)

    def differentiated(outputs: Tensor, losses: Tensor | None) -> Tensor:
        leaf = outputs.detach().requires_grad_()
        with torch.enable_grad():
            each = torch.vmap(lambda o, t: loss(o[None], t[None])) if each_example else loss
            own: Tensor = torch.vmap(each)(leaf, target)
            (gradient,) = torch.autograd.grad(own.sum(), leaf)
        if losses is not None:
            losses.copy_(own.detach())
        return gradient

    return differentiated


def _cross_entropy(outputs: Tensor, target: Tensor, losses: Tensor | None, each_example: bool) -> Tensor:
    """The same in closed form: the gradient is softmax minus one at the target."""
    wide = outputs.mT.is_contiguous()  # as `Chain` leaves narrow outputs: worked on as they lie
    z, axis = (outputs.mT, 1) if wide else (outputs, 2)
    at = target.unsqueeze(axis)
    if losses is None:
        gradient = z.softmax(axis)
    else:
        gradient = z.log_softmax(axis)
        own = gradient.gather(axis, at).squeeze(axis).neg_()
        losses.copy_(own if each_example else own.mean(1))
        gradient.exp_()
    gradient.scatter_add_(axis, at, gradient.new_full((), -1.0).expand(at.shape))
    if not each_example:
        gradient.div_(target.shape[1])
    return gradient.mT if wide else gradient


def _activate(name: str, z: Tensor) -> Tensor:
    """The activation, in place."""
    if name == "tanh" and z.dtype == torch.float32:
        # tanh(z) = 2 sigmoid(2 z) - 1: a fifth of the time of `tanh_` on a CPU, and off by at most 1.2e-7
        return z.mul_(2).sigmoid_().mul_(2).sub_(1)
    return z if name == "identity" else z.tanh_() if name == "tanh" else z.relu_()


def _deactivate(name: str, gradient: Tensor, out: Tensor) -> Tensor:
    """The gradient before an activation, in place, from its output."""
    result: Any = gradient
    if name == "tanh":
        result = torch.ops.aten.tanh_backward.grad_input(gradient, out, grad_input=gradient)
    elif name == "relu":
        result = torch.ops.aten.threshold_backward.grad_input(gradient, out, 0, grad_input=gradient)
    assert isinstance(result, Tensor)
    return result


def blocks(rows: int, numbers: int) -> Iterator[slice]:
    """Slices of so many rows (of so many numbers each) that a block stays in the cache."""
    height = max(1, _BLOCK // max(numbers, 1))
    for first in range(0, rows, height):
        yield slice(first, min(rows, first + height))
