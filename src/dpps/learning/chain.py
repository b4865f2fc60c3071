"""Models that are chains of linear layers and activations: forward and backward passes written out for all nodes at once.

Every product is one `torch.bmm` over the nodes into memory that is used again in every round, a backward pass goes down only
as far as a gradient is asked for, and a second forward pass starts where parameters have changed. `Chained` takes the two
gradients of Algorithm 2 from it; `dpps.learning.per_example.Linears` takes what goes into a layer and what comes back.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
_IGNORED = -100  # the class that `F.cross_entropy` leaves out


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


class Chain:
    """Passes through a chain for a block of nodes. What a pass leaves is overwritten by the next one.

    Args:
        partition: of a model for which `links` gives a chain.
    """

    def __init__(self, partition: Partition) -> None:
        chain = links(partition.model)
        assert chain is not None
        self.links = chain
        slots = [(True, slot) for slot in partition.shared] + [(False, slot) for slot in partition.local]
        self._where = {slot.name: (shared, slot) for shared, slot in slots}
        self.inputs: list[Tensor] = []
        """What went into each layer, (nodes, batch, inputs); behind the last one: the output."""
        self.returned: list[Tensor] = [torch.empty(0)] * len(chain)
        """What came back to each layer's linear output, as far down as the last backward pass went."""
        self._memory: dict[str, Tensor] = {}
        self._views: dict[str, Tensor] = {}

    def lowest(self, *, shared: bool) -> int:
        """The first layer with shared (or local) parameters; the number of layers if there is none."""
        own = [k for k, link in enumerate(self.links) for n in _names(link) if self._where[n][0] == shared]
        return min(own, default=len(self.links))

    def parameter(self, name: str, s: Tensor, l: Tensor) -> Tensor | None:
        """The rows of a parameter as views, (nodes, *shape); None for the bias of a layer without one."""
        if name not in self._where:
            return None
        shared, slot = self._where[name]
        return slot.of(s if shared else l)

    def forward(
        self, s: Tensor, l: Tensor, x: Tensor | None, first: int = 0, stop: int | None = None
    ) -> Tensor:
        """The outputs (nodes, batch, width) of layers `first` to `stop`, for x, or (None) for what the last pass left there."""
        if x is not None:
            self.inputs = [x.flatten(2)]
        del self.inputs[first + 1 :]
        for k in range(first, len(self.links) if stop is None else stop):
            link, a = self.links[k], self.inputs[k]
            weight, bias = (self.parameter(f"{link.name}.{own}", s, l) for own in ("weight", "bias"))
            assert weight is not None
            half_angle = link.activation == "tanh" and a.dtype == torch.float32
            out = self._product(f"out{k}", a, weight.mT, bias, factor=2 if half_angle else 1)
            self.inputs.append(_tanh_of_half(out) if half_angle else _activate(link.activation, out))
        return self.inputs[-1]

    def backward(self, s: Tensor, l: Tensor, gradient: Tensor, last: int = 0) -> None:
        """From the loss's gradient at the outputs down to layer `last`: fills `returned`."""
        for k in reversed(range(last, len(self.links))):
            self.returned[k] = _deactivate(self.links[k].activation, gradient, self.inputs[k + 1])
            if k > last:
                weight = self.parameter(f"{self.links[k].name}.weight", s, l)
                assert weight is not None
                gradient = self._product(f"back{k}", self.returned[k], weight)

    def weight_gradients(self, *, shared: bool, last: int, out: Tensor) -> None:
        """The gradients of the shared (or local) parameters of layer `last` and above, into the rows of `out`."""
        for k in range(last, len(self.links)):
            for name in _names(self.links[k]):
                own, slot = self._where[name]
                if own != shared:
                    continue
                if name.endswith(".bias"):
                    torch.sum(self.returned[k], 1, out=slot.of(out))
                else:
                    slot.of(out).copy_(self._product(f"outer{k}", self.returned[k].mT, self.inputs[k]))

    def _product(
        self, name: str, a: Tensor, b: Tensor, bias: Tensor | None = None, factor: int = 1
    ) -> Tensor:
        """factor (a b + bias) of every node, in memory by that name, which the next such product uses again.

        The kernels take two to six times as long for a tall result as for a wide one: of the two, the wide one is computed.
        """
        if a.shape[1] > b.shape[2]:
            return self._wide(name, b.mT, a.mT, None if bias is None else bias[:, :, None], factor).mT
        return self._wide(name, a, b, None if bias is None else bias[:, None], factor)

    def _wide(self, name: str, a: Tensor, b: Tensor, bias: Tensor | None, factor: int) -> Tensor:
        out = self._take(name, a, a.shape[0], a.shape[1], b.shape[2])
        if bias is None:
            return torch.baddbmm(out, a, b, beta=0, alpha=factor, out=out)
        return torch.baddbmm(bias, a, b, beta=factor, alpha=factor, out=out)

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
        self.chain = Chain(partition)
        self._widest = max(max(link.inputs, link.outputs) for link in self.chain.links)

    def step(
        self, y: Tensor, l: Tensor, x: Tensor, target: Tensor, update: Update, round_: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        losses = torch.empty(len(y), dtype=y.dtype, device=y.device)
        new, shared = self._spare(l), self._gradients(y)
        for rows in blocks(len(y), x.shape[1] * self._widest):
            self._block(rows, y[rows], l[rows], x[rows], target[rows], update, (losses, new, shared))
        return losses, new, shared

    def _block(
        self,
        rows: slice,
        y: Tensor,
        l: Tensor,
        x: Tensor,
        target: Tensor,
        update: Update,
        into: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        chain, (losses, new, shared) = self.chain, (part[rows] for part in into)
        losses[:], gradient = output_gradients(self.loss, chain.forward(y, l, x), target)
        if self.partition.local:
            first = chain.lowest(shared=False)
            chain.backward(y, l, gradient, first)
            chain.weight_gradients(shared=False, last=first, out=new)
            stepped = update(new, rows)
            if stepped.data_ptr() != new.data_ptr():
                new.copy_(stepped)
            if self.partition.shared:
                _, gradient = output_gradients(self.loss, chain.forward(y, new, None, first), target)
        if self.partition.shared:
            first = chain.lowest(shared=True)
            chain.backward(y, new, gradient, first)
            chain.weight_gradients(shared=True, last=first, out=shared)

    @torch.no_grad()
    def outputs(self, s: Tensor, l: Tensor, x: Tensor) -> Tensor:
        chain, first = self.chain, self.chain.lowest(shared=False)
        parts = []
        for part in blocks(len(x), len(l) * self._widest):
            chain.forward(s[None], l[:1], x[None, part], stop=first)  # the same for all nodes
            chain.inputs = [h.expand(len(l), *h.shape[1:]) for h in chain.inputs]
            parts.append(chain.forward(s.expand(len(l), -1), l, None, first).clone())
        return torch.cat(parts, dim=1)


def outer(d: Tensor, a: Tensor) -> Tensor:
    """Per node the sum over examples of d_e a_e^T: the gradient of a layer's weight."""
    return torch.bmm(d.mT, a) if d.shape[2] <= a.shape[2] else torch.bmm(a.mT, d).mT


def output_gradients(
    loss: Loss, outputs: Tensor, target: Tensor, *, each_example: bool = False
) -> tuple[Tensor, Tensor]:
    """Every node's (or every example's) loss, and the gradient of their sum at the outputs."""
    if loss is F.cross_entropy and target.dtype == torch.int64 and bool((target != _IGNORED).all()):
        return _cross_entropy(outputs, target, each_example)
    leaf = outputs.detach().requires_grad_()
    with torch.enable_grad():
        each = torch.vmap(lambda o, t: loss(o[None], t[None])) if each_example else loss
        losses: Tensor = torch.vmap(each)(leaf, target)
        (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    return losses.detach(), gradient


def _cross_entropy(outputs: Tensor, target: Tensor, each_example: bool) -> tuple[Tensor, Tensor]:
    """The same in closed form: the gradient is softmax minus one at the target."""
    log_chances, at = outputs.log_softmax(-1), target[:, :, None]
    losses = log_chances.gather(-1, at)[:, :, 0].neg_()
    gradient = log_chances.exp_()
    gradient.scatter_add_(-1, at, gradient.new_full((), -1.0).expand(at.shape))
    return (losses, gradient) if each_example else (losses.mean(1), gradient.div_(target.shape[1]))


def _tanh_of_half(z: Tensor) -> Tensor:
    """tanh(z / 2) = 2 sigmoid(z) - 1 in place: three times as fast as `tanh_`, and as exact as float32 is near 1 (1.2e-7)."""
    return torch.add(torch.tensor(-1.0), z.sigmoid_(), alpha=2, out=z)


def _activate(name: str, z: Tensor) -> Tensor:
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


def _names(link: Link) -> list[str]:
    return [f"{link.name}.weight", *([f"{link.name}.bias"] if link.bias else [])]
