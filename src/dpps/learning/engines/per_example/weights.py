"""The trained parameters of a model, and what it computes from them alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dpps.learning.engines.per_example.calls import tensors_of

_KEEPS_NORM = frozenset(
    [
        "t",
        "transpose",
        "permute",
        "movedim",
        "view",
        "reshape",
        "flatten",
        "unflatten",
        "squeeze",
        "unsqueeze",
        "contiguous",
        "T",
        "mT",
        "clone",
        "view_as",
        "reshape_as",
        "swapaxes",
        "alias",
    ]
)
"""Functions of one weight whose result has the same numbers: an example's gradient has the same norm behind and before."""


@dataclass(frozen=True)
class Origin:
    """Where a weight comes from: the parameters it is computed from, and whether it is just one of them in another shape."""

    parameters: frozenset[str]
    same_numbers: bool


class Weights:
    """The trained parameters and everything that is computed from them alone, by identity."""

    def __init__(self, leaves: Mapping[str, Tensor]) -> None:
        # holding them keeps their identities from being given anew
        self._held: dict[int, tuple[Tensor, Origin]] = {
            id(leaf): (leaf, Origin(frozenset({name}), True)) for name, leaf in leaves.items()
        }

    def __contains__(self, tensor: object) -> bool:
        return id(tensor) in self._held

    def origin(self, tensor: Tensor) -> Origin:
        """Where it comes from."""
        return self._held[id(tensor)][1]

    def add(self, name: str, result: Any, sources: Sequence[Tensor]) -> None:
        """What a function made of weights alone."""
        origins = [self.origin(source) for source in sources]
        same = len(origins) == 1 and origins[0].same_numbers and name in _KEEPS_NORM
        origin = Origin(frozenset().union(*(o.parameters for o in origins)), same)
        for _, tensor in tensors_of([("", result)]):
            if tensor.requires_grad and id(tensor) not in self._held:
                self._held[id(tensor)] = tensor, origin
