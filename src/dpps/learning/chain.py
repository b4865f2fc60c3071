"""Models that are chains of linear layers and activations: forward and backward passes written out for all nodes at once.

Every product is one `torch.bmm` over the nodes into memory that is used again in every round, a backward pass goes down only
as far as a gradient is asked for, and a second forward pass starts where parameters have changed. `Chained` takes the two
gradients of Algorithm 2 from it; `dpps.learning.per_example.Linears` takes what goes into a layer and what comes back.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpps.learning.gradients import Loss, Update, Vectorised
from dpps.learning.partition import Partition
from dpps.models import MLP

_ACTIVATIONS: dict[type[nn.Module], str] = {nn.Tanh: "tanh", nn.ReLU: "relu", nn.Identity: "identity"}
_BLOCK = 1 << 21  # numbers of the widest layer at a time (several nodes): they stay in the processor's cache
_MINUS_ONE = torch.tensor(-1.0, device="cpu")
_OUTPUTS = 1 << 22  # numbers at the end of the chain, of all nodes, that an evaluation holds at a time


@dataclass(frozen=True)
class Link:
    """One linear layer and the activation behind it."""

    name: str
    inputs: int
    outputs: int
    bias: bool
    activation: str


def is_chain(partition: Partition, axes: int) -> bool:
    """Whether the model is a chain, all of whose parameters are trained, for batches with so many axes."""
    found = links(partition.model)
    trained = {slot.name for slot in (*partition.shared, *partition.local)}
    if found is None or {name for link in found for name in _names(link)} != trained:
        return False
    flattens = type(partition.model) is MLP or type(next(partition.model.children())) is nn.Flatten
    return flattens or axes == 2


def links(model: nn.Module) -> list[Link] | None:
    """The model as a chain; None if it is anything else, or if one of its modules is listened to or patched."""
    if any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or "forward" in vars(m)
        for m in model.modules()
    ):
        return None
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
    return Link(name, linear.in_features, linear.out_features, linear.bias is not None, activation)


Layer = tuple[Tensor, Tensor | None]
"""Weight (nodes, outputs, inputs) and bias (nodes, outputs) of one layer, or what is written in their places."""


class Chain:
    """Passes through a chain for a block of nodes. What a pass leaves is overwritten by the next one.

    tanh(z) = 2 sigmoid(2 z) - 1, and torch's sigmoid is three times as fast as its tanh. Where that saves a pass over a wide
    layer, doubling and subtracting is left to the layer behind: W (2 v - 1) + b = 2 W v + (b - W 1).

    Args:
        partition: of a model for which `links` gives a chain.
        fold: whether a layer's input may be left as the v of the line above.
    """

    def __init__(self, partition: Partition, *, fold: bool = False) -> None:
        chain = links(partition.model)
        assert chain is not None
        self.links, self._fold, self._partition = chain, fold, partition
        shared = {slot.name for slot in partition.shared}
        self._shared = [tuple(name in shared for name in _names(link)) for link in chain]
        self._sizes = [
            [slot.stop - slot.start for slot in slots] for slots in (partition.shared, partition.local)
        ]
        self.inputs: list[Tensor] = []
        """What went into each layer, (nodes, batch, inputs), or its v where it is folded; behind the last one: the output."""
        self.returned: list[Tensor] = [torch.empty(0)] * len(chain)
        """What came back to each layer's linear output, as far down as the last backward pass went."""
        self._folded: list[bool] = []
        """Whether a layer's input v stands for 2 v - 1."""
        self._memory: dict[str, Tensor] = {}
        self._views: dict[str, Tensor] = {}

    def unfolded(self) -> list[Tensor]:
        """`inputs` with all values as they are."""
        return [2 * v - 1 if folded else v for v, folded in zip(self.inputs, self._folded, strict=False)]

    def lowest(self, *, shared: bool) -> int:
        """The first layer with shared (or local) parameters; the number of layers if there is none."""
        return next((k for k, own in enumerate(self._shared) if shared in own), len(self.links))

    def named(self, rows: Tensor, *, shared: bool) -> dict[str, Tensor]:
        """The shared (or local) parameters in these rows, or their places in memory for such, as views."""
        slots = self._partition.shared if shared else self._partition.local
        if not slots:
            return {}
        parts, nodes = torch.split_with_sizes(rows, self._sizes[0 if shared else 1], 1), rows.shape[0]
        return {slot.name: part.view(nodes, *slot.shape) for slot, part in zip(slots, parts, strict=True)}

    def layers(self, named: Mapping[str, Tensor]) -> list[Layer]:
        """The layers that have these parameters."""
        return [(named[f"{link.name}.weight"], named.get(f"{link.name}.bias")) for link in self.links]

    def forward(
        self, layers: Sequence[Layer], x: Tensor | None, first: int = 0, stop: int | None = None
    ) -> Tensor:
        """The outputs (nodes, batch, width) of layers `first` to `stop`, for x, or (None) for what the last pass left there."""
        if x is not None:
            self.inputs = [x.flatten(2)]
            self._folded = self._choose_folds(self.inputs[0])
        del self.inputs[first + 1 :]
        for k in range(first, len(self.links) if stop is None else stop):
            (weight, bias), v, folded = layers[k], self.inputs[k], self._folded[k]
            if folded:
                ones = weight.sum(2)
                bias = ones.neg_() if bias is None else torch.sub(bias, ones, out=ones)
            half_angle = self.links[k].activation == "tanh" and v.dtype == torch.float32
            factor = 2 if half_angle else 1
            add = None if bias is None else bias[:, None]
            z = self._product(f"out{k}", v, weight.mT, 2 * factor if folded else factor, add, factor)
            if self._folded[k + 1]:
                z.sigmoid_()
            elif half_angle:
                _tanh_of_half(z)
            else:
                _activate(self.links[k].activation, z)
            self.inputs.append(z)
        return self.inputs[-1]

    def _choose_folds(self, x: Tensor) -> list[bool]:
        """Folding costs a pass over the next layer's weights and saves one over its inputs.

        W 1 and the product must be rounded alike, or they no longer cancel: not on devices that shorten the factors of products.
        """
        may = self._fold and x.dtype == torch.float32 and x.device.type == "cpu"
        folds = [
            may and link.activation == "tanh" and x.shape[1] > behind.outputs
            for link, behind in pairwise(self.links)
        ]
        return [False, *folds, False]

    def backward(self, layers: Sequence[Layer], gradient: Tensor, last: int = 0) -> None:
        """From the loss's gradient at the outputs down to layer `last`: fills `returned`."""
        for k in reversed(range(last, len(self.links))):
            name = "folded" if self._folded[k + 1] else self.links[k].activation
            self.returned[k] = _deactivate(name, gradient, self.inputs[k + 1])
            if k > last:  # 1 - tanh^2 = 4 v (1 - v), and v (1 - v) is the sigmoid's own derivative
                alpha = 4 if self._folded[k] else 1
                gradient = self._product(f"back{k}", self.returned[k], layers[k][0], alpha)

    def weight_gradients(self, *, shared: bool, last: int, out: Sequence[Layer]) -> None:
        """The gradients of the shared (or local) parameters of layer `last` and above, into their places."""
        for k in range(last, len(self.links)):
            weight, bias = (
                place if own == shared else None for place, own in zip_longest(out[k], self._shared[k])
            )
            back, summed = self.returned[k], None
            if bias is not None or (weight is not None and self._folded[k]):
                summed = back.sum(1)
            if bias is not None and summed is not None:
                bias.copy_(summed)
            if weight is None:
                continue
            add = None if summed is None or not self._folded[k] else summed[:, :, None]
            product = self._product(f"outer{k}", back.mT, self.inputs[k], 1 if add is None else 2, add, -1)
            weight.copy_(product)  # a product right into rows that lie apart takes three times as long

    def _product(
        self,
        name: str,
        a: Tensor,
        b: Tensor,
        alpha: int = 1,
        add: Tensor | None = None,
        beta: int = 1,
    ) -> Tensor:
        """alpha a b + beta add of every node, in memory by that name, which the next such product uses again.

        The kernels take two to six times as long for a tall result as for a wide one: of the two, the wide one is computed.
        """
        if a.shape[1] > b.shape[2]:
            return self._product(name, b.mT, a.mT, alpha, None if add is None else add.mT, beta).mT
        out = self._take(name, a, a.shape[0], a.shape[1], b.shape[2])
        if add is None:
            return torch.baddbmm(out, a, b, beta=0, alpha=alpha, out=out)
        return torch.baddbmm(add, a, b, beta=beta, alpha=alpha, out=out)

    def _take(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """Memory by that name, of at least this size, used again."""
        view = self._views.get(name)
        if (
            view is not None
            and view.shape == shape
            and view.dtype == like.dtype
            and view.device == like.device
        ):
            return view
        size, own = prod(shape), self._memory.get(name)
        if own is None or own.numel() < size or own.dtype != like.dtype or own.device != like.device:
            own = self._memory[name] = torch.empty(size, dtype=like.dtype, device=like.device)
        self._views[name] = view = own[:size].view(shape)
        return view


class Chained(Vectorised):
    """The two gradients of Algorithm 2 for a chain, several nodes at a time."""

    def __init__(self, partition: Partition, loss: Loss, rows: Sequence[int], seed: int = 0) -> None:
        super().__init__(partition, loss, rows, seed)
        self.chain = Chain(partition, fold=True)
        self._widest = max(max(link.inputs, link.outputs) for link in self.chain.links)
        self.at_once = max(self.at_once, _OUTPUTS // (len(rows) * self.chain.links[-1].outputs))

    def step(
        self, y: Tensor, l: Tensor, x: Tensor, target: Tensor, update: Update, round_: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        losses = torch.empty(len(y), dtype=y.dtype, device=y.device)
        new, shared = self._spare(l), self._gradients(y)
        for rows in blocks(len(y), x.shape[1] * self._widest):
            parts = (y, l, x, target, losses, new, shared)
            self._block(
                rows, update, *(parts if rows.stop == len(y) and not rows.start else (p[rows] for p in parts))
            )
        return losses, new, shared

    def _block(
        self,
        rows: slice,
        update: Update,
        y: Tensor,
        l: Tensor,
        x: Tensor,
        target: Tensor,
        losses: Tensor,
        new: Tensor,
        shared: Tensor,
    ) -> None:
        chain, gradients_at = self.chain, output_gradients(self.loss, target)
        public, stepped = chain.named(y, shared=True), chain.named(new, shared=False)
        layers = chain.layers(public | chain.named(l, shared=False))
        places = chain.layers(chain.named(shared, shared=True) | stepped)
        gradient = gradients_at(chain.forward(layers, x), losses)
        if self.partition.local:
            first = chain.lowest(shared=False)
            chain.backward(layers, gradient, first)
            chain.weight_gradients(shared=False, last=first, out=places)
            updated = update(new, rows)
            if updated.data_ptr() != new.data_ptr():
                new.copy_(updated)
            if self.partition.shared:
                layers = chain.layers(public | stepped)
                gradient = gradients_at(chain.forward(layers, None, first), None)
        if self.partition.shared:
            first = chain.lowest(shared=True)
            chain.backward(layers, gradient, first)
            chain.weight_gradients(shared=True, last=first, out=places)

    @torch.no_grad()
    def outputs(self, s: Tensor, l: Tensor, x: Tensor) -> Tensor:
        chain, first = self.chain, self.chain.lowest(shared=False)
        common, own = (
            chain.layers(chain.named(shared, shared=True) | chain.named(local, shared=False))
            for shared, local in ((s[None], l[:1]), (s.expand(len(l), -1), l))
        )
        results = x.new_empty(len(l), len(x), chain.links[-1].outputs)
        for part in blocks(len(x), len(l) * self._widest):
            chain.forward(common, x[None, part], stop=first)  # the same for all nodes
            chain.inputs = [h.expand(len(l), *h.shape[1:]) for h in chain.inputs]
            results[:, part] = chain.forward(own, None, first)
        return results


def outer(d: Tensor, a: Tensor) -> Tensor:
    """Per node the sum over examples of d_e a_e^T: the gradient of a layer's weight."""
    return torch.bmm(d.mT, a) if d.shape[2] <= a.shape[2] else torch.bmm(a.mT, d).mT


def output_gradients(
    loss: Loss, target: Tensor, *, each_example: bool = False
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """What writes every node's (or every example's) loss where it is told, and gives the gradient of their sum at the outputs."""
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
    gradient.scatter_add_(axis, at, _MINUS_ONE.to(gradient).expand(at.shape))
    if not each_example:
        gradient.div_(target.shape[1])
    return gradient.mT if wide else gradient


def _tanh_of_half(z: Tensor) -> Tensor:
    """tanh(z / 2) = 2 sigmoid(z) - 1 in place: three times as fast as `tanh_`, and as exact as float32 is near 1 (1.2e-7)."""
    return torch.add(_MINUS_ONE, z.sigmoid_(), alpha=2, out=z)


def _activate(name: str, z: Tensor) -> Tensor:
    return z if name == "identity" else z.tanh_() if name == "tanh" else z.relu_()


def _deactivate(name: str, gradient: Tensor, out: Tensor) -> Tensor:
    """The gradient before an activation, in place, from its output."""
    result: Any = gradient
    if name == "folded":
        result = torch.ops.aten.sigmoid_backward.grad_input(gradient, out, grad_input=gradient)
    elif name == "tanh":
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


def _names(link: Link) -> list[str]:
    return [f"{link.name}.weight", *([f"{link.name}.bias"] if link.bias else [])]
