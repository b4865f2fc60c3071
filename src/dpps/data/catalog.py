"""Named data sets: how each is found, fetched and read, and their registry.

Files are plain, `.gz` or `.xz`. No pickle is involved, so a hostile file cannot run code.
"""

import gzip
import logging
import lzma
import os
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from dpps.data.dataset import DataSet, Images
from dpps.disk import writable, write_aside
from dpps.errors import RunError, UsageError
from dpps.logs import only_from
from dpps.registry import Registry

log = logging.getLogger(__name__)

TIMEOUT = 30.0
"""Seconds without an answer after which a connection counts as cut."""
ENVIRONMENT = "DPPS_DATA"
"""Environment variable naming the folder that holds one sub-folder per data set."""

Bytes = npt.NDArray[np.uint8]
Files = tuple[Path, ...]
Read = Callable[[Files], tuple[Bytes, Bytes]]
_Content = TypeVar("_Content")


@dataclass(frozen=True)
class Layout:
    """The files of the two parts, without `.gz` or `.xz`, relative to the folder of the data set."""

    train: tuple[str, ...]
    test: tuple[str, ...]

    @property
    def files(self) -> tuple[str, ...]:
        return self.train + self.test


@dataclass(frozen=True)
class Source:
    """A published file: its name, the folders on the web that hold it, and its hash as `algorithm:digest`."""

    file: str
    mirrors: tuple[str, ...]
    hash: str


@dataclass(frozen=True)
class Recipe:
    """How one data set is found, fetched, read and prepared.

    `examples` and `shape` are the number of training images and the shape of each in its file (channels, height, width). `dpps plan`
    needs both; without them `dpps train` chooses what is left open after it has read the files.
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

    def images(self, files: Files) -> Images:
        """What is in these files, checked."""
        pixels, labels = self.read(files)
        where = ", ".join(str(file) for file in files)
        if len(pixels) != len(labels):
            raise RunError(
                f"{where}: expected one label each, found {len(pixels)} images, {len(labels)} labels"
            )
        if len(labels) == 0 or labels.max() >= self.classes:
            found = f"{labels.max()}" if len(labels) else "none"
            raise RunError(f"{where}: expected labels 0..{self.classes - 1}, found {found}")
        tensors = torch.from_numpy(pixels.copy()), torch.from_numpy(labels.astype(np.int64))
        return Images(*tensors, self.mean, self.deviation)

    def find(self, folder: Path) -> tuple[Files, Files] | None:
        """The training and test files of the first layout that is complete in `folder`, plain or compressed."""
        for layout in self.layouts:
            files = [(name, folder / f"{name}{end}") for name in layout.files for end in (".xz", ".gz", "")]
            found = {name: path for name, path in files if path.is_file()}
            if len(found) == len(layout.files):
                return tuple(found[name] for name in layout.train), tuple(found[name] for name in layout.test)
        return None


DATA_SETS: Registry[Recipe] = Registry("data set", "dpps.data.sets")
"""The data sets that `dpps.data.load` knows."""


def load(name: str, directory: str | Path | None = None, progress: bool = True) -> DataSet:
    """The data set `name`.

    `mnist-mini` is part of the package. The others are looked for in the sub-folder `name` of `directory`,
    which must hold them; without `directory` in that of `$DPPS_DATA`, then in that of the user cache, into
    which they are downloaded when missing.

    Args:
        name: one of `DATA_SETS.names()`.
        directory: the folder that holds a sub-folder per data set.
        progress: show a bar while downloading, if standard error is a terminal.
    """
    recipe = DATA_SETS[name]
    train, test = _locate(name, recipe, directory, progress)
    return DataSet(name, recipe.images(train), recipe.images(test), recipe.classes, recipe.citation)


def _locate(name: str, recipe: Recipe, directory: str | Path | None, progress: bool) -> tuple[Files, Files]:
    if recipe.embedded:
        return _require(recipe, Path(__file__).parent / recipe.embedded)
    if directory is not None:
        return _require(recipe, Path(directory) / name)
    shared = os.environ.get(ENVIRONMENT)
    if shared and not Path(shared).is_dir():
        raise UsageError(f"${ENVIRONMENT} names {shared!r}, which is no folder: correct or unset it")
    # another data set may well be missing there; a started one must be complete
    if shared and (Path(shared) / name).is_dir():
        return _require(recipe, Path(shared) / name)
    return obtain(recipe, user_cache() / name, progress)


def _require(recipe: Recipe, folder: Path) -> tuple[Files, Files]:
    found = recipe.find(folder)
    if found is None:
        choices = " or ".join(", ".join(layout.files) for layout in recipe.layouts)
        raise UsageError(f"{folder} lacks data files: looked for {choices} (each plain, .gz or .xz)")
    return found


def obtain(recipe: Recipe, folder: Path, progress: bool = True) -> tuple[Files, Files]:
    """The files of a data set in a folder of the user cache; what is missing is downloaded and verified."""
    try:
        with one_at_a_time(folder):
            for source in recipe.sources:
                if not source.file.endswith(".tar.gz"):
                    fetch(source, folder, progress)
                elif recipe.find(folder) is None:  # an archive of the files of the last layout
                    _unpack(fetch(source, folder, progress), recipe.layouts[-1].files)
    except OSError as error:
        raise RunError(f"cannot fill the data folder {folder}: {error}") from error
    return _require(recipe, folder)


def _unpack(archive: Path, names: tuple[str, ...]) -> None:
    """Write the named members next to the archive and remove it; no path is taken from the archive itself."""
    with tarfile.open(archive) as tar:
        members = set(tar.getnames())
        for name in names:
            file = tar.extractfile(name) if name in members else None
            if file is None:
                raise RunError(f"{archive}: expected the file {name} in it")
            write_aside(archive.parent / name, file.read())
    archive.unlink()


def folder_beside(name: str, directory: Path | None = None) -> Path:
    """Where to keep what is computed from a named data set: its own folder, or the user cache when that cannot be written."""
    shared = directory or os.environ.get(ENVIRONMENT)
    own = Path(shared) / name if shared and not DATA_SETS[name].embedded else None
    return own if own and own.is_dir() and writable(own) else user_cache() / name


def parsed(file: Path, parse: Callable[[bytes, Path], _Content]) -> _Content:
    """What is in a file, plain or compressed, for recipes to read with."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise RunError(f"{file}: cannot be read ({error})") from error
    try:
        if file.suffix == ".gz":
            content = gzip.decompress(content)
        elif file.suffix == ".xz":
            content = lzma.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise RunError(
            f"{file}: expected a complete {file.suffix[1:]} file, but it is damaged or truncated ({error})"
        ) from error
    return parse(content, file)


# Downloads, verified by their hash, into the user cache


def user_cache() -> Path:
    """The folder for everything of this user that can be made again."""
    import pooch  # slow to load, and a run on embedded data does without

    return Path(pooch.os_cache("dpps"))


def fetch(source: Source, folder: Path, progress: bool = True) -> Path:
    """The file in `folder`, downloaded from the first address that works unless it is there with the right hash.

    A file with the wrong hash is never returned: a download is thrown away, and one that is already there is replaced.
    """
    import pooch
    import requests

    target = folder / source.file
    if target.exists() and not pooch.hashes.hash_matches(str(target), source.hash):
        log.warning(
            "%s is damaged or was changed, as its hash is not %s: downloading it again", target, source.hash
        )
        target.unlink()
    failures = []
    for address in (f"{mirror.rstrip('/')}/{source.file}" for mirror in source.mirrors):
        bar = _Bar(source.file) if progress and sys.stderr.isatty() else None
        downloader = pooch.HTTPDownloader(
            progressbar=bar or False,
            chunk_size=1 << 18,
            timeout=TIMEOUT,
            # identity: the hash is that of the file as published, not as repacked for the way.
            headers={"Accept-Encoding": "identity"},
        )
        try:
            with only_from(logging.WARNING, pooch.get_logger()):  # the bar and the errors say the same
                pooch.retrieve(address, source.hash, source.file, folder, downloader=downloader)
        except (requests.RequestException, ValueError) as error:  # ValueError: pooch refused the hash
            log.warning("%s: %s", address, error)
            failures.append(f"{address} ({error})")
        else:
            return target
        finally:
            if bar is not None:
                bar.close()  # pooch leaves it open when a download fails
    raise RunError(
        f"cannot download {source.file}: {'; '.join(failures)}; remedy: run again, or put {source.file} "
        f"({source.hash}) into {folder}"
    )


class _Bar:
    """A progress bar of rich as pooch wants it."""

    def __init__(self, name: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task(name, total=None)
        self.total = 0

    def update(self, count: int) -> None:
        """Count bytes that have arrived."""
        self._progress.start()
        self._progress.update(self._task, advance=count, total=self.total or None)

    def reset(self) -> None:
        """Start from zero."""
        self._progress.reset(self._task)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._progress.stop()


@contextmanager
def one_at_a_time(folder: Path, lock: str = ".lock") -> Iterator[None]:
    """Keep processes of one machine that name the same lock (torchrun starts several) from writing the same files at once.

    There is no such lock on Windows; there two writers end in a refused hash, never in a wrong file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with (folder / lock).open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
