"""The user cache: downloaded data sets, and what took long to decompress."""

import contextlib
import hashlib
import logging
from collections.abc import Callable
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TypeVar

from dpps.data.formats import read_raw, unpack
from dpps.disk import write_aside
from dpps.errors import RunError

log = logging.getLogger(__name__)

_Content = TypeVar("_Content")

SMALL = 2 << 20  # bytes of a compressed file; smaller ones are decompressed in no time


def parsed(file: Traversable, parse: Callable[[bytes, Traversable], _Content]) -> _Content:
    """What is in a file; decompressing a whole training set takes up to seconds, so its result is kept.

    The copy in the user cache is named after the SHA-256 of the compressed file, so a changed file is never
    answered from an old copy. A copy that cannot be parsed is made anew.
    """
    packed = read_raw(file)
    if len(packed) < SMALL or not file.name.endswith((".gz", ".xz")):
        return parse(unpack(packed, file), file)
    kept = user_cache() / "decompressed" / f"{hashlib.sha256(packed).hexdigest()}.bin"
    with contextlib.suppress(OSError, RunError):
        return parse(kept.read_bytes(), file)
    content = unpack(packed, file)
    try:
        write_aside(kept, content)
    except OSError as error:
        log.warning("cannot keep the decompressed %s, so the next run decompresses it again: %s", file, error)
    return parse(content, file)


def user_cache() -> Path:
    """The folder for everything of this user that can be made again."""
    import pooch  # slow to load, and a run on embedded data does without

    return Path(pooch.os_cache("dpps"))
