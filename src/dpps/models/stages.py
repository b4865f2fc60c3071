"""Models as chains of stages.

In every model of the paper the shared parameters s are the first layers. A model that is a chain of stages
can run that shared prefix once per round and only the rest (the local parameters l) twice, as Algorithm 2
needs it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dpps.errors import UsageError
from dpps.models.swapping import swapped

ELEMENTWISE = (nn.Identity, nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.LeakyReLU, nn.ELU)
"""Activations that look at one number at a time, draw nothing and keep nothing."""


class Staged(nn.Module, ABC):
    """A model whose forward pass is a chain of stages.

    `stage_names[k]` names the children (modules or parameters) that stage k owns; every parameter belongs to
    exactly one stage. A stage hands on a tensor, or a tuple of tensors when later stages need more than one.
    """

    stage_names: tuple[tuple[str, ...], ...]

    @abstractmethod
    def stage(self, k: int, x: Any) -> Any:
        """The output of stage k for the output `x` of stage k-1 (for k = 0: the model's input)."""

    def run(self, x: Any, first: int = 0, last: int | None = None) -> Any:
        """Run stages first..last-1, by default all of them."""
        for k in range(first, len(self.stage_names) if last is None else last):
            x = self.stage(k, x)
        return x

    def forward(self, x: Any) -> Any:
        """Run all stages."""
        return self.run(x)


def stage_parameters(model: nn.Module) -> list[set[str]] | None:
    """The full parameter names of every stage, or None if the model is no chain of separate stages.

    A chain is a `Staged` model or an `nn.Sequential`, whose children are its stages. A parameter used by two
    stages (tied weights) cannot be assigned to one of them, so such a model counts as no chain.
    """
    stages = _stage_names(model)
    if stages is None:
        return None
    names = dict(model.named_parameters(remove_duplicate=False))
    owned = [{n for n in names if _owned(n, children)} for children in stages]
    if isinstance(model, Staged):
        _check_partition(type(model).__name__, list(names), owned)
    identities = [{id(names[n]) for n in stage} for stage in owned]
    tied = sum(map(len, identities)) != len(set().union(*identities))
    return None if tied else owned


def run_stages(model: nn.Module, x: Any, first: int = 0, last: int | None = None) -> Any:
    """Run stages first..last-1 (by default all) of a `Staged` model or an `nn.Sequential`."""
    if isinstance(model, Staged):
        return model.run(x, first, last)
    if _stage_names(model) is None:
        raise TypeError(f"{type(model).__name__} has no stages: it is neither Staged nor nn.Sequential")
    for module in list(model.children())[first:last]:
        x = module(x)
    return x


def call_stages(
    model: nn.Module, tensors: Mapping[str, Tensor], x: Any, first: int = 0, last: int | None = None
) -> Any:
    """`run_stages` with the given parameters and buffers in place of the model's own.

    Names left out keep the model's values, so a caller may pass only those of the stages it runs.
    """
    with swapped(model, tensors):
        return run_stages(model, x, first, last)


def _stage_names(model: nn.Module) -> tuple[tuple[str, ...], ...] | None:
    if isinstance(model, Staged):
        return model.stage_names
    # A subclass with its own forward pass need not be a chain of its children.
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        return tuple((name,) for name in model._modules)
    return None


def _owned(name: str, children: tuple[str, ...]) -> bool:
    return any(name == child or name.startswith(f"{child}.") for child in children)


def _check_partition(kind: str, names: list[str], owned: list[set[str]]) -> None:
    wrong = [n for n in names if sum(n in stage for stage in owned) != 1]
    if wrong:
        raise UsageError(
            f"stage_names of {kind} must put every parameter into one stage; wrong for {', '.join(wrong)}"
        )
