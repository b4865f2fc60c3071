"""Feature extractors by name: one of the registry, or a frozen module of one's own, `package.module:callable`.

A module of one's own is named together with a checksum of its weights and its preprocessing, `package.module:callable@CHECKSUM`.
Options are resolved to that name. So runs that are continued, saved models, and the members of a federation all notice other weights.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpps.callables import first_line, imported, is_own
from dpps.data import DataSet, Images
from dpps.errors import UsageError
from dpps.features.extraction import FEATURES, checksum, extract


class Preprocessing(nn.Module):
    """Images between 0 and 1 as a pretrained network expects them: resized, then (x - mean) / std. Grey images become three channels.

    Args:
        size: height and width, bilinear.
        mean: of every channel.
        std: of every channel.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        size: int = 224,
        mean: Sequence[float] = (0.485, 0.456, 0.406),
        std: Sequence[float] = (0.229, 0.224, 0.225),
    ) -> None:
        super().__init__()
        if size < 1:
            raise UsageError(f"size is {size}: it must be 1 pixel or more")
        if len(mean) != len(std) or min(std) <= 0:
            raise UsageError(f"mean is {mean} and std {std}: give one of each per channel, each std above 0")
        self.size = size
        self.register_buffer("mean", torch.tensor(mean)[:, None, None])
        self.register_buffer("std", torch.tensor(std)[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) as (batch, channels, size, size)."""
        x = F.interpolate(x, size=(self.size, self.size), mode="bilinear", antialias=self.size < x.shape[-1])
        return (x - self.mean) / self.std

    def extra_repr(self) -> str:
        """Mean and standard deviation are among the tensors."""
        return f"size={self.size}"


class _Normalised(nn.Module):
    """Every example's features with mean 0 and variance 1: the rule for rates relies on their length."""

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor):
            raise TypeError(f"it gives a {type(x).__name__}, not a tensor of features")
        return F.layer_norm(x.float(), x.shape[1:])


def build(name: str, shape: Sequence[int]) -> nn.Module:
    """The extractor of this name for examples of a shape.

    Args:
        name: one of `FEATURES.names()`; or `package.module:callable`, called without arguments, which gives a frozen module, or
            a pair of it and its preprocessing; then every example's features are normalised to mean 0 and variance 1. Behind
            an @, the checksum that it must have.
        shape: of one example.
    """
    if not is_own(name):
        return FEATURES[name](shape)
    plain, _, wanted = name.partition("@")
    module, found = _own(plain)
    if wanted and wanted != found:
        raise UsageError(
            f"--features {name}: here its weights and preprocessing have the checksum {found}: use the same files and the "
            "same versions of packages"
        )
    return module


def with_checksum(name: str) -> str:
    """The name of an extractor; one of one's own with its checksum, which is compared if it is there already."""
    if not is_own(name):
        return name
    build(name, ())
    plain = name.partition("@")[0]
    return f"{plain}@{_own(plain)[1]}"


def output_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of one example's features."""
    extractor = build(name, shape)
    try:
        with torch.no_grad():
            return tuple(extractor(torch.zeros(1, *shape)).shape[1:])
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"--features {name}: on examples of shape {tuple(shape)} it raises {first_line(error)}; return a module for this shape, "
            "or (module, preprocessing), such as dpps.features.Preprocessing(224) for three channels"
        ) from error


def of_data_set(dataset: DataSet, name: str, folder: Path | None = None, *, progress: bool = True) -> DataSet:
    """A named data set with the features of its images in place of them; `name` is as in `build`, the rest as in `extract`."""
    # images between 0 and 1, each channel once: models may want channels repeated and shifted, features do not
    parts = [
        Images(part.pixels, part.labels) if isinstance(part, Images) else part
        for part in (dataset.train, dataset.test)
    ]
    extractor = build(name, parts[0].shape)
    train, test = (extract(extractor, part, folder, progress=progress) for part in parts)
    return replace(dataset, train=train, test=test)


@lru_cache(maxsize=1)  # options are resolved more than once, and weights are large
def _own(name: str) -> tuple[nn.Module, str]:
    """The module that a callable gives, and its checksum."""
    named, make = f"--features {name}", imported("--features", name, "no arguments")
    try:
        given = make()
    except Exception as error:
        raise UsageError(
            f"{named}: called without arguments it raises {first_line(error)}; name a function that needs none and returns "
            "the frozen module, such as my_features:make"
        ) from error
    parts = given if isinstance(given, tuple) and len(given) == 2 else (given, nn.Identity())
    for part in parts:
        if not isinstance(part, nn.Module):
            what = "a pair with a" if isinstance(given, tuple) else "a"
            raise UsageError(
                f"{named} gives {what} {type(part).__name__}: return an nn.Module, or (module, preprocessing), "
                "two nn.Modules"
            )
    backbone, preprocessing = parts
    training = [path or type(m).__name__ for path, m in backbone.named_modules() if m.training]
    if training:
        raise UsageError(f"{named}: {training[0]} is in training mode: return it after .eval()")
    extractor = nn.Sequential(preprocessing, backbone, _Normalised()).eval().requires_grad_(False)
    return extractor, checksum(extractor)
