"""The named data sets, where their files are looked for, and how they become tensors."""

import contextlib
import hashlib
import logging
import os
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from importlib.resources.abc import Traversable
from math import prod
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from dpps.data.formats import Bytes, parse_cifar, parse_idx, read_raw, unpack
from dpps.disk import write_aside
from dpps.errors import RunError, UsageError, unknown

log = logging.getLogger(__name__)

ENVIRONMENT = "DPPS_DATA"
"""Environment variable naming the folder that holds one sub-folder per data set."""


@dataclass(frozen=True, eq=False)
class Images(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Labelled images, kept as bytes; `inputs` turns them into what a model reads. A data set like any other of torch.

    `pixels` is a uint8 tensor (n, channels, height, width) and `labels` an int64 tensor (n,). Images of one
    channel are repeated to as many channels as `mean` and `deviation` have.
    """

    pixels: torch.Tensor
    labels: torch.Tensor
    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if len(self.pixels) != len(self.labels):
            raise UsageError(f"{len(self.pixels)} images but {len(self.labels)} labels: give one label each")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.prepared(self.pixels[k]), self.labels[k]

    def part(self, first: int, stop: int) -> "Images":
        """Images first..stop-1, without a copy."""
        return replace(self, pixels=self.pixels[first:stop], labels=self.labels[first:stop])

    def ordered(self, index: npt.NDArray[np.int64]) -> "Images":
        """The images at `index`, in that order, as a copy."""
        chosen = torch.from_numpy(index)
        return replace(self, pixels=self.pixels[chosen], labels=self.labels[chosen])

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of one input."""
        channels, height, width = self.pixels.shape[1:]
        return max(channels, len(self.mean)), height, width

    def inputs(self, index: torch.Tensor | npt.NDArray[np.int64] | slice | None = None) -> torch.Tensor:
        """The images at `index` (all without one) as float32: scaled to [0, 1], then (x - mean) / deviation.

        An index of any shape is allowed: (nodes, batch) gives (nodes, batch, channels, height, width).
        """
        if isinstance(index, np.ndarray):
            index = torch.from_numpy(index)
        return self.prepared(self.pixels if index is None else self.pixels[index])

    def prepared(self, pixels: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        """These bytes (..., channels, height, width), on any device, as a model reads them; at the begin of `memory`, if given."""
        shape = (*pixels.shape[:-3], *self.shape)
        if memory is None:
            memory = torch.empty(prod(shape), device=pixels.device)
        scaled = memory[: prod(shape)].view(shape).copy_(pixels.expand(shape)).div_(255)
        if any(self.mean):
            scaled.sub_(_per_channel(self.mean, scaled))
        return scaled.div_(_per_channel(self.deviation, scaled)) if set(self.deviation) != {1.0} else scaled


def _per_channel(values: tuple[float, ...], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None, None]


@dataclass(frozen=True, eq=False)
class DataSet:
    """A named data set: its training and test images, the number of classes, and whom to cite."""

    name: str
    train: Images
    test: Images
    classes: int
    citation: str


@dataclass(frozen=True)
class _Layout:
    """The files of the two parts, without `.gz` or `.xz`, relative to the folder of the data set."""

    train: tuple[str, ...]
    test: tuple[str, ...]

    @property
    def files(self) -> tuple[str, ...]:
        return self.train + self.test


_Files = tuple[Traversable, ...]
_Content = TypeVar("_Content")
_Read = Callable[[_Files], tuple[Bytes, Bytes]]


@dataclass(frozen=True)
class Source:
    """A published file: its name, the folders on the web that hold it, and its hash as `algorithm:digest`."""

    file: str
    mirrors: tuple[str, ...]
    hash: str

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(f"{mirror.rstrip('/')}/{self.file}" for mirror in self.mirrors)


@dataclass(frozen=True)
class Recipe:
    """How one data set is found, fetched, read and prepared."""

    layouts: tuple[_Layout, ...]
    read: _Read
    citation: str
    sources: tuple[Source, ...] = ()
    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)
    classes: int = 10

    @property
    def archived(self) -> bool:
        """Whether it is published as one archive, which holds the files of the last layout."""
        return any(source.file.endswith(".tar.gz") for source in self.sources)

    def images(self, files: _Files) -> Images:
        pixels, labels = self.read(files)
        where = ", ".join(str(file) for file in files)
        if len(pixels) != len(labels):
            raise RunError(
                f"{where}: expected one label each, found {len(pixels)} images, {len(labels)} labels"
            )
        if len(labels) == 0 or labels.max() >= self.classes:
            found = f"{labels.max()}" if len(labels) else "none"
            raise RunError(f"{where}: expected labels 0..{self.classes - 1}, found {found}")
        copied = torch.from_numpy(pixels.copy()), torch.from_numpy(labels.astype(np.int64))
        return Images(*copied, self.mean, self.deviation)

    def find(self, folder: Traversable) -> tuple[_Files, _Files] | None:
        """The training and test files of the first layout that is complete in `folder`."""
        for layout in self.layouts:
            train = _present(folder, layout.train)
            test = _present(folder, layout.test)
            if train and test:
                return train, test
        return None


def _present(folder: Traversable, names: tuple[str, ...]) -> _Files | None:
    """The file for every name, plain or compressed, or nothing when one is missing."""
    files = []
    for name in names:
        for suffix in ("", ".gz", ".xz"):
            file = folder.joinpath(*f"{name}{suffix}".split("/"))
            if file.is_file():
                files.append(file)
                break
        else:
            return None
    return tuple(files)


def _read_idx_files(files: _Files) -> tuple[Bytes, Bytes]:
    images, labels = files
    return (
        _parsed(images, partial(parse_idx, dimensions=3))[:, None],
        _parsed(labels, partial(parse_idx, dimensions=1)),
    )


def _read_cifar_files(files: _Files) -> tuple[Bytes, Bytes]:
    batches = [_parsed(file, parse_cifar) for file in files]
    return np.concatenate([images for images, _ in batches]), np.concatenate(
        [labels for _, labels in batches]
    )


_SMALL = 2 << 20  # bytes of a compressed file; smaller ones are decompressed in no time


def _parsed(file: Traversable, parse: Callable[[bytes, Traversable], _Content]) -> _Content:
    """What is in a file; decompressing a whole training set takes up to seconds, so its result is kept.

    The copy in the user cache is named after the SHA-256 of the compressed file, so a changed file is never
    answered from an old copy. A copy that cannot be parsed is made anew.
    """
    packed = read_raw(file)
    if len(packed) < _SMALL or not file.name.endswith((".gz", ".xz")):
        return parse(unpack(packed, file), file)
    kept = _user_cache() / "decompressed" / f"{hashlib.sha256(packed).hexdigest()}.bin"
    with contextlib.suppress(OSError, RunError):
        return parse(kept.read_bytes(), file)
    content = unpack(packed, file)
    try:
        write_aside(kept, content)
    except OSError as error:
        log.warning("cannot keep the decompressed %s, so the next run decompresses it again: %s", file, error)
    return parse(content, file)


_IDX = _Layout(
    train=("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    test=("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
)


def _cifar_batches(folder: str) -> _Layout:
    train = tuple(f"{folder}data_batch_{number}.bin" for number in range(1, 6))
    return _Layout(train, (f"{folder}test_batch.bin",))


_CIFAR_ARCHIVE = _cifar_batches("cifar-10-batches-bin/")
_CIFAR_LAYOUTS = (_Layout(("train.bin",), ("test.bin",)), _cifar_batches(""), _CIFAR_ARCHIVE)


def _idx_sources(mirrors: tuple[str, ...], *hashes: str) -> tuple[Source, ...]:
    named = zip(_IDX.files, hashes, strict=True)
    return tuple(Source(f"{name}.gz", mirrors, f"sha256:{digest}") for name, digest in named)


_LECUN = (
    'Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, "Gradient-based learning applied to document recognition", '
    "Proceedings of the IEEE 86(11), 1998"
)
_XIAO = (
    'H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning '
    'Algorithms", arXiv:1708.07747, 2017'
)
_KRIZHEVSKY = (
    'A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", technical report, '
    "University of Toronto, 2009"
)

_RECIPES = {
    "mnist-mini": Recipe((_IDX,), _read_idx_files, _LECUN),
    "mnist": Recipe(
        (_IDX,),
        _read_idx_files,
        _LECUN,
        _idx_sources(
            (
                "https://ossci-datasets.s3.amazonaws.com/mnist",
                "https://storage.googleapis.com/cvdf-datasets/mnist",
            ),
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
    "fashion-mnist": Recipe(
        (_IDX,),
        _read_idx_files,
        _XIAO,
        _idx_sources(
            (
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
                "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
            ),
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
        mean=(0.0, 0.0, 0.0),
        deviation=(1.0, 1.0, 1.0),
    ),
    "cifar-10": Recipe(
        _CIFAR_LAYOUTS,
        _read_cifar_files,
        _KRIZHEVSKY,
        (
            Source(
                "cifar-10-binary.tar.gz",
                (
                    "https://www.cs.toronto.edu/~kriz",
                    "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10",
                ),
                "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            ),
        ),
        mean=(0.4914, 0.4822, 0.4465),
        deviation=(0.2023, 0.1994, 0.2010),
    ),
}

NAMES = tuple(_RECIPES)
"""The data sets that `load` knows."""


def load(name: str, directory: Path | None = None, progress: bool = True) -> DataSet:
    """The data set `name`.

    `mnist-mini` is part of the package. The others are looked for in the sub-folder `name` of `directory`,
    which must hold them; without `directory` in that of `$DPPS_DATA`, then in that of the user cache, into
    which they are downloaded when missing.

    Args:
        name: one of `NAMES`.
        directory: the folder that holds a sub-folder per data set.
        progress: show a bar while downloading, if standard error is a terminal.
    """
    if name not in _RECIPES:
        raise unknown("data set", name, NAMES)
    recipe = _RECIPES[name]
    train, test = _locate(name, recipe, directory, progress)
    return DataSet(name, recipe.images(train), recipe.images(test), recipe.classes, recipe.citation)


def _locate(name: str, recipe: Recipe, directory: Path | None, progress: bool) -> tuple[_Files, _Files]:
    if not recipe.sources:
        return _require(recipe, resources.files("dpps.data").joinpath("mini"))
    if directory is not None:
        return _require(recipe, directory / name)
    shared = os.environ.get(ENVIRONMENT)
    if shared:
        if not Path(shared).is_dir():
            raise UsageError(f"${ENVIRONMENT} names {shared!r}, which is no folder: correct or unset it")
        # Another data set may well be missing there; a started one must be complete.
        if (Path(shared) / name).is_dir():
            return _require(recipe, Path(shared) / name)
    return obtain(recipe, _user_cache() / name, progress)


def _require(recipe: Recipe, folder: Traversable) -> tuple[_Files, _Files]:
    found = recipe.find(folder)
    if found is None:
        choices = " or ".join(", ".join(layout.files) for layout in recipe.layouts)
        raise UsageError(f"{folder} lacks data files: looked for {choices} (each plain, .gz or .xz)")
    return found


def obtain(recipe: Recipe, folder: Path, progress: bool = True) -> tuple[_Files, _Files]:
    """The files of a data set in a folder of the user cache; what is missing is downloaded and verified."""
    from dpps.data.fetch import fetch, one_at_a_time

    try:
        with one_at_a_time(folder):
            if not recipe.archived:
                for source in recipe.sources:
                    fetch(source, folder, progress)
            elif recipe.find(folder) is None:
                _unpack(fetch(recipe.sources[0], folder, progress), recipe.layouts[-1].files)
    except OSError as error:
        raise RunError(f"cannot fill the data folder {folder}: {error}") from error
    return _require(recipe, folder)


def _unpack(archive: Path, names: tuple[str, ...]) -> None:
    """Write the named members beside the archive and remove it; no path is taken from the archive itself."""
    with tarfile.open(archive) as tar:
        members = set(tar.getnames())
        for name in names:
            file = tar.extractfile(name) if name in members else None
            if file is None:
                raise RunError(f"{archive}: expected the file {name} in it")
            write_aside(archive.parent / name, file.read())
    archive.unlink()


def _user_cache() -> Path:
    import pooch  # slow to load, and a run on embedded data does without

    return Path(pooch.os_cache("dpps"))
