"""Apply a frozen module to a whole data set, once, and keep what it gives."""

import copy
import hashlib
import logging
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from dpps.data import DataSet, FeatureSet, Images, one_at_a_time
from dpps.disk import private_folder, replacing, writable
from dpps.errors import UsageError
from dpps.registry import Registry

log = logging.getLogger(__name__)

FEATURES: Registry[Callable[[Sequence[int]], nn.Module]] = Registry("feature extractor", "dpps.features")
"""By name: what makes the extractor for examples of a shape."""

_BLOCK = 128  # examples at a time: what is computed of them stays in the cache of a core
_VERSION = 1  # of what the extractors compute: with another one, features kept on disk are computed anew


def extract(
    extractor: nn.Module, dataset: Dataset[Any], folder: Path | None = None, *, progress: bool = True
) -> FeatureSet:
    """Compute the features of all examples and return them as a data set.

    The extractor is used as it is, in evaluation mode: it must not have been trained on private data, or its training must be
    accounted for separately. Its parameters take no part in training.

    Args:
        extractor: any module from inputs to features: `normalised_scattering(shape)`, or a pretrained network without its head.
        dataset: a map-style data set of (input, label).
        folder: cache folder. None: no cache. A file is named after the SHA-256 of the examples
            and of the extractor's description and parameters. Features are as private as the examples: the file is its
            owner's only. (A module's code is not part of the name: with changed code, choose another folder.)
        progress: show a bar, if standard error is a terminal.
    """
    examples = _Examples.of(dataset)
    if folder is None:
        return FeatureSet(_compute(extractor, examples, progress), examples.labels)
    file = folder / f"features-{_key(extractor, examples)}.safetensors"
    may_keep = writable(next(path for path in (folder, *folder.absolute().parents) if path.exists()))
    with one_at_a_time(folder) if may_keep else nullcontext():
        features = _kept(file, len(examples.labels))
        if features is None:
            features = _compute(extractor, examples, progress)
            if may_keep:
                _keep(file, features)
            else:
                log.warning("%s may not be written: the next run computes the features again", folder)
    return FeatureSet(features, examples.labels)


def of_data_set(dataset: DataSet, name: str, folder: Path | None = None, *, progress: bool = True) -> DataSet:
    """A named data set with the features of its images in place of them; `name` is one of `FEATURES`, the rest as in `extract`."""
    # images between 0 and 1, each channel once: models may want channels repeated and shifted, features do not
    parts = [
        Images(part.pixels, part.labels) if isinstance(part, Images) else part
        for part in (dataset.train, dataset.test)
    ]
    extractor = FEATURES[name](parts[0].shape)
    train, test = (extract(extractor, part, folder, progress=progress) for part in parts)
    return replace(dataset, train=train, test=test)


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

    def starts(self) -> range:
        return range(0, len(self.labels), _BLOCK)

    def block(self, first: int) -> Tensor:
        return self.read(slice(first, first + _BLOCK))


def _compute(extractor: nn.Module, examples: _Examples, progress: bool) -> Tensor:
    frozen = copy.deepcopy(extractor).eval().requires_grad_(False)
    with torch.no_grad():
        sample = frozen(examples.block(0)[:1])
    count = len(examples.labels)
    features = torch.empty((count, *sample.shape[1:]), dtype=torch.float16)

    def work(first: int) -> int:
        with torch.no_grad():
            found = frozen(examples.block(first))
        features[first : first + len(found)] = found
        return len(found)

    threads = torch.get_num_threads()
    several = threads > 1 and all(
        type(m).__module__.startswith(("dpps.features", "torch.nn")) for m in frozen.modules()
    )
    columns = (TextColumn("features"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), disable=not (progress and sys.stderr.isatty()))
    with bar:
        task = bar.add_task("", total=count)
        if several:  # blocks side by side: two threads within one small transform are hardly faster than one
            with ThreadPoolExecutor(threads, "dpps", torch.set_num_threads, (1,)) as pool:
                for done in pool.map(work, examples.starts()):
                    bar.advance(task, done)
        else:
            for first in examples.starts():
                bar.advance(task, work(first))
    if not bool(torch.isfinite(features).all()):
        raise UsageError(
            "a feature is not finite, or beyond 65504, in half precision: normalise what the extractor "
            "gives, for example with GroupNorm"
        )
    return features


def _key(extractor: nn.Module, examples: _Examples) -> str:
    """Equal when examples and extractor are. Labels are not part of it."""
    found = hashlib.sha256(f"{_VERSION} {type(extractor).__module__} {extractor!r}".encode())

    def add(name: str, tensor: Tensor) -> None:
        found.update(f"{name}{tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)

    for name, tensor in sorted(extractor.state_dict().items()):
        add(f"{name} ", tensor)
    for first in examples.starts():
        add("", examples.block(first))
    return found.hexdigest()[:32]


def _kept(file: Path, count: int) -> Tensor | None:
    if not file.exists():
        return None
    try:
        features = load_file(file)["features"]
    except (SafetensorError, OSError, KeyError) as error:
        log.warning("%s cannot be read (%s): the features are computed anew", file, error)
        return None
    if len(features) == count:
        return features
    log.warning("%s has features of %d examples, not %d: they are computed anew", file, len(features), count)
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
