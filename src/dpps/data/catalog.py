"""Where the files of a named data set are looked for, and how they get there."""

import os
import tarfile
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from dpps.data.cache import user_cache
from dpps.data.dataset import DataSet
from dpps.data.recipe import DATA_SETS, Files, Recipe
from dpps.disk import writable, write_aside
from dpps.errors import RunError, UsageError

ENVIRONMENT = "DPPS_DATA"
"""Environment variable naming the folder that holds one sub-folder per data set."""


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
        return _require(recipe, resources.files("dpps.data").joinpath(recipe.embedded))
    if directory is not None:
        return _require(recipe, Path(directory) / name)
    shared = os.environ.get(ENVIRONMENT)
    if shared:
        if not Path(shared).is_dir():
            raise UsageError(f"${ENVIRONMENT} names {shared!r}, which is no folder: correct or unset it")
        # Another data set may well be missing there; a started one must be complete.
        if (Path(shared) / name).is_dir():
            return _require(recipe, Path(shared) / name)
    return obtain(recipe, user_cache() / name, progress)


def _require(recipe: Recipe, folder: Traversable) -> tuple[Files, Files]:
    found = recipe.find(folder)
    if found is None:
        choices = " or ".join(", ".join(layout.files) for layout in recipe.layouts)
        raise UsageError(f"{folder} lacks data files: looked for {choices} (each plain, .gz or .xz)")
    return found


def obtain(recipe: Recipe, folder: Path, progress: bool = True) -> tuple[Files, Files]:
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


def folder_beside(name: str, directory: Path | None = None) -> Path:
    """Where to keep what is computed from a named data set: its own folder, or the user cache when that cannot be written."""
    shared = directory or os.environ.get(ENVIRONMENT)
    own = Path(shared) / name if shared and not DATA_SETS[name].embedded else None
    return own if own and own.is_dir() and writable(own) else user_cache() / name
