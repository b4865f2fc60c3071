"""Models by name: how each is fitted to data, and what "one" and "two shared layers" mean for it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from torch import nn

from dpps.errors import UsageError, unknown
from dpps.registry import Registry

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
    """Whether the rule of docs/recipes.md, which is about softmax regression, chooses its rates."""

    @classmethod
    @abstractmethod
    def fit(cls, to: Fitting) -> nn.Module:
        """The model for this data, initialised from torch's generator."""

    @classmethod
    def prefixes(cls, name: str, shared: str) -> tuple[str, ...]:
        """The parameter prefixes that `shared` stands for: "1", "2", "all", or prefixes with commas between."""
        if shared in cls.shared:
            return cls.shared[shared]
        prefixes = tuple(part.strip() for part in shared.split(","))
        for prefix in prefixes:
            if prefix.split(".")[0] not in cls.shared["all"]:
                raise unknown(f"shared part of {name}", prefix, (*cls.shared, *cls.shared["all"]))
        return prefixes


MODELS: Registry[type[NamedModel]] = Registry("model", "dpps.models")
