"""Apply a frozen module to a whole data set, once, and keep what it gives."""

import copy
import hashlib
import logging
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import Dataset, TensorDataset, default_collate

from dpps.data import DataSet, FeatureSet, Images, one_at_a_time
from dpps.disk import private_folder, replacing, writable
from dpps.errors import UsageError
from dpps.registry import Registry, first_line, imported, is_own

log = logging.getLogger(__name__)

FEATURES: Registry[Callable[[Sequence[int]], nn.Module]] = Registry("feature extractor", "dpps.features")
"""By name: what makes the extractor for examples of a shape."""

_BLOCK = 128  # examples at a time: what is computed of them stays in the cache of a core
_LARGE_BLOCK = 8  # of large images, for networks of one's own
_ROUNDING = 0.01
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_VERSION = 1  # of what the extractors compute: with another one, features kept on disk are computed anew


def extract(
    extractor: nn.Module, dataset: Dataset[Any], folder: Path | None = None, *, progress: bool = True
) -> FeatureSet:
    """Compute the features of all examples and return them as a data set.

    The extractor is used as it is, in evaluation mode: it must not have been trained on private data, or its training must be
    accounted for separately. Its parameters take no part in training. One that mixes examples, such as a BatchNorm without
    running statistics, is refused: an example's features must be computed from that example alone.

    Args:
        extractor: any module from inputs to features: `normalised_scattering(shape)`, or a pretrained network without its head.
        dataset: a map-style data set of (input, label).
        folder: cache folder. None: no cache. A file is named after the SHA-256 of the examples
            and of the extractor's description, parameters and buffers; its first features are computed again and compared,
            in case the code has changed. Features are as private as the examples: the file is its owner's only.
        progress: show a bar, if standard error is a terminal.
    """
    examples = _Examples.of(dataset)
    if folder is None:
        return FeatureSet(_compute(extractor, examples, progress), examples.labels)
    file = folder / f"features-{_key(extractor, examples)}.safetensors"
    may_keep = writable(next(path for path in (folder, *folder.absolute().parents) if path.exists()))
    with one_at_a_time(folder, f".{file.stem}.lock") if may_keep else nullcontext():
        features = _kept(file, extractor, examples)
        if features is None:
            features = _compute(extractor, examples, progress)
            if may_keep:
                _keep(file, features)
            else:
                log.warning("%s may not be written: the next run computes the features again", folder)
    return FeatureSet(features, examples.labels)


@dataclass(frozen=True)
class _Examples:
    """Inputs in blocks, and all labels, of any map-style data set."""

    labels: Tensor
    read: Callable[[slice], Tensor]

    @classmethod
    def of(cls, dataset: Dataset[Any]) -> "_Examples":
        if not len(dataset):  # type: ignore[arg-type]
            raise UsageError("the data set is empty: there is nothing to take features of")
        if isinstance(dataset, Images):
            return cls(dataset.labels, dataset.inputs)
        if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
            inputs, labels = dataset.tensors
            return cls(labels, inputs.__getitem__)
        count = len(dataset)  # type: ignore[arg-type]
        labels = default_collate([dataset[k][1] for k in range(count)])
        return cls(labels, lambda part: default_collate([dataset[k][0] for k in range(*part.indices(count))]))

    def starts(self, size: int = _BLOCK) -> range:
        return range(0, len(self.labels), size)

    def block(self, first: int, size: int = _BLOCK) -> Tensor:
        return self.read(slice(first, first + size))


def _compute(extractor: nn.Module, examples: _Examples, progress: bool) -> Tensor:
    frozen = _frozen(extractor)
    sample = _checked(frozen, examples.block(0, 2))
    count = len(examples.labels)
    features = torch.empty((count, *sample.shape[1:]), dtype=torch.float16)
    small = _known_code(frozen)
    size = _BLOCK if small else _LARGE_BLOCK

    def work(first: int) -> int:
        with torch.no_grad():
            found = frozen(examples.block(first, size))
        features[first : first + len(found)] = found
        return len(found)

    columns = (TextColumn("features"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), disable=not (progress and sys.stderr.isatty()))
    # blocks side by side: two threads within one small transform are hardly faster than one
    pool = ThreadPoolExecutor(torch.get_num_threads(), "dpps", torch.set_num_threads, (1,))
    with bar, pool:
        task = bar.add_task("", total=count)
        for done in (pool.map if small else map)(work, examples.starts(size)):
            bar.advance(task, done)
    if not bool(torch.isfinite(features).all()):
        raise UsageError(
            "a feature is not finite, or beyond 65504, in half precision: normalise what the extractor "
            "gives, for example with GroupNorm"
        )
    return features


def _frozen(extractor: nn.Module) -> nn.Module:
    return copy.deepcopy(extractor).eval().requires_grad_(False)


def _known_code(extractor: nn.Module) -> bool:
    """Whether it consists of modules of this package and of torch."""
    return all(type(m).__module__.startswith(("dpps.features", "torch.nn")) for m in extractor.modules())


def _checked(frozen: nn.Module, two: Tensor) -> Tensor:
    """The features of the first of two examples. UsageError: it is not a function of that example alone."""
    for path, module in frozen.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise UsageError(
                f"the feature extractor's {path} is a BatchNorm without running statistics, so an example's features would "
                "depend on other examples: use track_running_stats=True, or GroupNorm"
            )
    before = checksum(frozen)
    alone: Tensor
    with torch.no_grad():
        alone, again, both = (frozen(part) for part in (two[:1], two[:1], two))
    for found in (alone, both):
        if not isinstance(found, Tensor) or not found.is_floating_point() or not found.ndim:
            raise UsageError(
                f"the feature extractor gives a {type(found).__name__}: it must give a tensor of numbers, (batch, ...)"
            )
    if len(both) != len(two) or both.shape[1:] != alone.shape[1:]:
        raise UsageError(
            f"the feature extractor gives shape {tuple(both.shape)} for {len(two)} examples and {tuple(alone.shape)} for one: the "
            "first dimension must be the examples, the others the same for all"
        )
    if checksum(frozen) != before:
        raise UsageError(
            "the feature extractor changes its own buffers in evaluation mode, so features would depend on the examples before: "
            "freeze them"
        )
    if not _alike(alone, again):
        raise UsageError(
            "the feature extractor gives the same example other features the second time: leave out what is random"
        )
    if not _alike(alone, both[:1]):
        raise UsageError(
            "the features of an example depend on the other examples of its batch: a feature extractor must not mix examples"
        )
    return alone


def _alike(one: Tensor, other: Tensor) -> bool:
    """Up to rounding, in half precision and in another order of summation. (What is not finite is refused later.)"""
    one, other = one.double(), other.double()
    finite = one.isfinite() & other.isfinite()
    gap, size = ((t[finite]).norm() for t in (one - other, one))
    return bool(gap <= _ROUNDING * size + 1e-6)


def checksum(module: nn.Module) -> str:
    """Equal for two modules of the same description, parameters and buffers, whatever their code."""
    found = hashlib.sha256()
    _describe(module, found)
    return found.hexdigest()[:32]


def _describe(module: nn.Module, found: "hashlib._Hash") -> None:
    described = _ADDRESS.sub("", f"{_VERSION} {type(module).__module__} {module!r}")
    found.update(described.encode())
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in sorted(tensors.items()):
        _add(found, f"{name} ", tensor)


def _add(found: "hashlib._Hash", name: str, tensor: Tensor) -> None:
    found.update(f"{name}{tuple(tensor.shape)} {tensor.dtype}".encode())
    found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def _key(extractor: nn.Module, examples: _Examples) -> str:
    """Equal when examples and extractor are. Labels are not part of it."""
    found = hashlib.sha256()
    _describe(extractor, found)
    for first in examples.starts():
        _add(found, "", examples.block(first))
    return found.hexdigest()[:32]


def _kept(file: Path, extractor: nn.Module, examples: _Examples) -> Tensor | None:
    if not file.exists():
        return None
    wrong, count = "", len(examples.labels)
    try:
        features = load_file(file)["features"]
    except (SafetensorError, OSError, KeyError) as error:
        wrong = f"cannot be read ({error})"
    else:
        if len(features) != count:
            wrong = f"has features of {len(features)} examples, not {count}"
        elif not _known_code(extractor):
            now = _checked(_frozen(extractor), examples.block(0, 2))
            if now.shape[1:] != features.shape[1:] or not _alike(now, features[:1]):
                wrong = "has other features than the extractor gives now"
        if not wrong:
            return features
    log.warning("%s %s: the features are computed anew", file, wrong)
    return None


def _keep(file: Path, features: Tensor) -> None:
    try:
        private_folder(file.parent)
        with replacing(file) as aside:
            aside.touch(0o600)
            save_file({"features": features}, aside)
            aside.chmod(0o600)
    except (OSError, SafetensorError) as error:
        log.warning(
            "the features cannot be kept in %s, so the next run computes them again: %s", file.parent, error
        )


# Feature extractors by name: one of the registry, or a frozen module of one's own, `package.module:callable`.
#
# A module of one's own is named together with a checksum of its weights and its preprocessing, `package.module:callable@CHECKSUM`.
# Options are resolved to that name. So runs that are continued, saved models, and the members of a federation all notice other weights.


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
