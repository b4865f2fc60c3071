"""Shared | local: a model's parameters as two flat vectors, s and l."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dpps.errors import UsageError


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in its flat vector."""

    name: str
    shape: torch.Size
    start: int
    stop: int

    def shaped(self, part: Tensor) -> Tensor:
        """Its part of a flat vector as the model reads it: pairs of numbers, which may be read as complex ones, must begin at an
        even place."""
        own = part.view(self.shape)
        return own.clone() if self.shape[-1:] == (2,) else own


class Partition:
    """Splits a model's trainable parameters into shared (s) and local (l). Buffers and frozen parameters stay with the node.

    Args:
        model: any `nn.Module`.
        shared: prefixes of parameter names ("layer1" takes "layer1.weight" and "layer1.bias"), or a predicate on names;
            "all" shares everything and an empty list nothing.
    """

    def __init__(self, model: nn.Module, shared: Sequence[str] | Callable[[str], bool]) -> None:
        self.model = model
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not parameters:
            raise UsageError(
                f"{type(model).__name__} has no trainable parameters: give a model with at least one (requires_grad=True)"
            )
        for (
            name,
            p,
        ) in parameters.items():  # noise and norms are those of real vectors, and a vector has a known length
            if is_lazy(p):
                raise UsageError(
                    f"{name} has no shape yet: call the model once on an example before it is trained"
                )
            if not p.is_floating_point():
                raise UsageError(
                    f"{name} is of type {str(p.dtype).removeprefix('torch.')}; trained parameters must be real numbers "
                    "(hold real and imaginary parts in two parameters and put them together with torch.complex)"
                )
        chosen = _choose(list(parameters), shared)
        self.shared = _slots({n: p for n, p in parameters.items() if n in chosen})
        self.local = _slots({n: p for n, p in parameters.items() if n not in chosen})
        self.shared_size, self.local_size = (
            max((s.stop for s in slots), default=0) for slots in (self.shared, self.local)
        )

    def initial(self) -> tuple[Tensor, Tensor]:
        """The model's own parameters as flat vectors (s, l)."""
        own = dict(self.model.named_parameters())
        none = torch.empty(0, device=next(iter(own.values())).device)
        s, l = (
            torch.cat([none, *(own[slot.name].detach().flatten() for slot in slots)])
            for slots in (self.shared, self.local)
        )
        return s, l

    def views(self, s: Tensor | None, l: Tensor | None) -> dict[str, Tensor]:
        """Parameters by name, to be read, from one node's flat vectors (either may be left out)."""
        named: dict[str, Tensor] = {}
        for slots, flat in ((self.shared, s), (self.local, l)):
            if slots and flat is not None:
                # one split, not a slice each: the gradient of a slice is as long as the whole vector
                parts = torch.split(flat, [slot.stop - slot.start for slot in slots])
                named |= {slot.name: slot.shaped(part) for slot, part in zip(slots, parts, strict=True)}
        return named


def _choose(names: Sequence[str], shared: Sequence[str] | Callable[[str], bool]) -> set[str]:
    if callable(shared):
        return {n for n in names if shared(n)}
    prefixes = [shared] if isinstance(shared, str) else list(shared)
    if prefixes == ["all"]:
        return set(names)
    chosen: set[str] = set()
    for prefix in prefixes:
        found = {n for n in names if n == prefix or n.startswith(prefix.rstrip(".") + ".")}
        if not found:
            listed = ", ".join(names[:40]) + (" ..." if len(names) > 40 else "")
            raise UsageError(
                f"no parameter is called {prefix!r} or lies below it; the parameters are: {listed}"
            )
        chosen |= found
    return chosen


def _slots(parameters: Mapping[str, Tensor]) -> list[Slot]:
    slots, start = [], 0
    for name, p in parameters.items():
        slots.append(Slot(name, p.shape, start, start + prod(p.shape)))
        start = slots[-1].stop
    return slots
