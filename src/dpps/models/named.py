"""Models by name: one of the registry, fitted to the data, or `package.module:callable`; and which part of it is shared."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from torch import nn

from dpps.errors import UsageError, unknown
from dpps.registry import Registry, first_line, imported, is_own

Shared = Mapping[str, tuple[str, ...]]
"""Of "1", "2" and "all": the prefixes of parameter names."""


@dataclass(frozen=True)
class Fitting:
    """What a model is made for: the shape of examples, the classes, and the shared part."""

    shape: tuple[int, ...]
    """Of one example."""
    classes: int
    prefixes: tuple[str, ...]
    """The shared part."""
    norm: str = "batch"
    dropout: float = 0.1

    @property
    def values(self) -> int:
        """How many numbers an example has."""
        return prod(self.shape)

    def image(self, name: str) -> tuple[int, int, int]:
        """(channels, height, width), for a model that needs images."""
        if len(self.shape) != 3:
            raise UsageError(
                f"{name} needs images of shape (channels, height, width), not {self.shape}: use mlp"
            )
        channels, height, width = self.shape
        return channels, height, width


class NamedModel(ABC):
    """A model that can be asked for by name."""

    shared: ClassVar[Shared]
    """The parameter prefixes that the paper's experiments call one and two shared layers ("1", "2"), and all of them ("all")."""
    has_norm: ClassVar[bool] = False
    """Whether its normalisation can be chosen."""
    softmax_regression: ClassVar[bool] = False
    """Whether the rule of docs/accuracy.md, which is about softmax regression, chooses its rates."""

    @classmethod
    @abstractmethod
    def fit(cls, to: Fitting) -> nn.Module:
        """The model for this data, initialised from torch's generator."""


MODELS: Registry[type[NamedModel]] = Registry("model", "dpps.models")
"""Models that come with the package."""


def build(
    name: str,
    shared: str,
    shape: tuple[int, ...],
    classes: int,
    norm: str | None = None,
    dropout: float = 0.1,
) -> tuple[nn.Module, tuple[str, ...]]:
    """The named model, fitted to the data and initialised from torch's generator, and its shared part.

    Args:
        name: one of `MODELS.names()`; or `package.module:callable`, called with the shape of an example and the
            number of classes. Modules in the current folder are found, too.
        shared: "1", "2" or "all", or comma-separated prefixes; "1" and "2" of a model that is imported are its first
            one or two parts with parameters.
        shape: shape of one example; (channels, height, width) for models of images.
        classes: number of labels.
        norm: the normalisation of resnet18, "batch" (the default) or "group"; no other model has a choice.
        dropout: of vit; the unit record needs 0.
    """
    if is_own(name):
        model = _call_own(name, shape, classes)
        parts = tuple(dict.fromkeys(parameter.split(".")[0] for parameter, _ in model.named_parameters()))
        if not parts:
            raise UsageError(f"--model {name} has no parameters: there is nothing to learn")
        return model, _prefixes(name, shared, {"1": parts[:1], "2": parts[:2], "all": parts})
    prefixes = shared_prefixes(name, shared)
    if classes < 1:
        raise UsageError(f"{classes} classes: a model needs at least 1")
    if not shape or min(shape) < 1:
        raise UsageError(f"examples of shape {shape} are empty: every dimension must be at least 1")
    return MODELS[name].fit(Fitting(shape, classes, prefixes, norm or "batch", dropout)), prefixes


def shared_prefixes(name: str, shared: str) -> tuple[str, ...]:
    """The parameter prefixes that `shared` stands for in the named model: "1", "2" or "all", or comma-separated prefixes that end
    at a dot of the parameter name. "conv1,bn1" is the part of ResNet-18 in the paper's sensitivity figure (9,536 parameters).
    """
    return _prefixes(name, shared, MODELS[name].shared)


def _prefixes(name: str, shared: str, known: Shared) -> tuple[str, ...]:
    if shared in known:
        return known[shared]
    prefixes = tuple(part.strip() for part in shared.split(","))
    for prefix in prefixes:
        if prefix.split(".")[0] not in known["all"]:
            raise unknown(f"shared part of {name}", prefix, dict.fromkeys((*known, *known["all"])))
    return prefixes


def _call_own(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    make = imported("--model", name, "(shape, classes)")
    try:
        model = make(shape, classes)
    except Exception as error:
        raise UsageError(
            f"--model {name}: called with shape {shape} and {classes} classes it raises {first_line(error)}; it must take these "
            "two arguments and return an nn.Module"
        ) from error
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"--model {name}: called with shape {shape} and {classes} classes it gives a {type(model).__name__}, not an nn.Module"
        )
    return model
