"""An `nn.Sequential` in two halves: when its first modules are the shared part, they need to run only once per round."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dpps.models.swapping import swapped

ELEMENTWISE = (nn.Identity, nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.LeakyReLU, nn.ELU)
"""Activations that look at one number at a time, draw nothing and keep nothing."""


def stage_parameters(model: nn.Module) -> list[set[str]] | None:
    """The full parameter names of every module of an `nn.Sequential`; None for another model, or with tied parameters."""
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        return None
    names = dict(model.named_parameters(remove_duplicate=False))
    owned = [{n for n in names if n.startswith(f"{child}.")} for child in model._modules]
    identities = [{id(names[n]) for n in stage} for stage in owned]
    tied = sum(map(len, identities)) != len(set().union(*identities))
    return None if tied else owned


def call_stages(
    model: nn.Module, tensors: Mapping[str, Tensor], x: Any, first: int = 0, last: int | None = None
) -> Any:
    """Modules first..last-1 of an `nn.Sequential`, with the given parameters and buffers in place of its own."""
    with swapped(model, tensors):
        for module in list(model.children())[first:last]:
            x = module(x)
    return x
