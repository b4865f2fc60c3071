"""How a named data set is found, fetched, read and prepared, and the registry of those that there are."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources.abc import Traversable

import numpy as np
import torch

from dpps.data.dataset import Images
from dpps.data.formats import Bytes
from dpps.errors import RunError, UsageError
from dpps.registry import Registry


@dataclass(frozen=True)
class Layout:
    """The files of the two parts, without `.gz` or `.xz`, relative to the folder of the data set."""

    train: tuple[str, ...]
    test: tuple[str, ...]

    @property
    def files(self) -> tuple[str, ...]:
        return self.train + self.test


Files = tuple[Traversable, ...]
Read = Callable[[Files], tuple[Bytes, Bytes]]


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
    """How one data set is found, fetched, read and prepared.

    `examples` and `shape` say how many training images there are and what each looks like in its file (channels, height, width).
    `dpps plan` works from them; without them `dpps train` chooses what is left open after it has read the files.
    """

    layouts: tuple[Layout, ...]
    read: Read
    citation: str
    sources: tuple[Source, ...] = ()
    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)
    classes: int = 10
    embedded: str = ""
    """Folder of the package that holds it, for one that comes with it."""
    examples: int | None = None
    shape: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        if (self.examples is None) != (self.shape is None):
            raise UsageError(
                f"a recipe with examples={self.examples} and shape={self.shape}: give both, or none of them"
            )

    @property
    def input_shape(self) -> tuple[int, int, int] | None:
        """What a model reads of an image: one channel is repeated where the mean has several."""
        return self.shape and (max(self.shape[0], len(self.mean)), *self.shape[1:])

    @property
    def archived(self) -> bool:
        """Whether it is published as one archive, which holds the files of the last layout."""
        return any(source.file.endswith(".tar.gz") for source in self.sources)

    def images(self, files: Files) -> Images:
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

    def find(self, folder: Traversable) -> tuple[Files, Files] | None:
        """The training and test files of the first layout that is complete in `folder`."""
        for layout in self.layouts:
            train = _present(folder, layout.train)
            test = _present(folder, layout.test)
            if train and test:
                return train, test
        return None


def _present(folder: Traversable, names: tuple[str, ...]) -> Files | None:
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


DATA_SETS: Registry[Recipe] = Registry("data set", "dpps.data.sets")
"""The data sets that `dpps.data.load` knows."""
