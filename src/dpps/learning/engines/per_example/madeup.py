"""Made-up examples: what a model does is found out on them, so that no choice depends on anybody's data."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_SEED = 20240623


def made_up(like: Any, examples: int, *, whole: bool = False, seed: int = _SEED) -> Any:
    """A batch of random examples.

    Whole numbers are 0 and 1, which every vocabulary, mask and list of classes has.

    Args:
        like: one example (tensors may be nested); only shapes and types are looked at.
        examples: how many.
        whole: whether floats are 0 and 1, too, for models that use them as positions.
        seed: another one gives other examples.
    """
    generator = torch.Generator().manual_seed(seed)

    def of(part: Any) -> Any:
        return _random(part, examples, whole, generator) if isinstance(part, Tensor) else part

    return tree_map(of, like)


@dataclass(frozen=True)
class Batches:
    """Made-up batches of (inputs, targets): two examples, three, and three of which the first is another."""

    two: tuple[Any, Any]
    three: tuple[Any, Any]
    changed: tuple[Any, Any]

    @classmethod
    def like(cls, example: tuple[Any, Any], *, whole: bool = False) -> Self:
        """For a model that takes such examples."""
        three, other = made_up(example, 3, whole=whole), made_up(example, 1, whole=whole, seed=1)

        def joined(new: Any, own: Any) -> Any:
            return torch.cat([new, own[1:]]) if isinstance(own, Tensor) else own

        return cls(made_up(example, 2, whole=whole), three, tree_map(joined, other, three))


def _random(part: Tensor, examples: int, whole: bool, generator: torch.Generator) -> Tensor:
    shape = (examples, *part.shape)
    bits = torch.randint(0, 2, shape, generator=generator)
    if part.ndim:
        bits[..., 0] = 1  # a mask of nothing but zeros would leave nothing to attend to
    if part.is_floating_point() and not whole:
        return torch.rand(shape, generator=generator, dtype=torch.float64).to(part)
    return bits.to(part)


def moved(tensor: Tensor) -> Tensor:
    """Parameters a little way off: where they start at zero (as heads often do) nothing would be seen."""
    generator = torch.Generator().manual_seed(_SEED)
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return tensor + 0.05 * noise.to(tensor)
