"""Readers of the two file formats the named data sets come in: IDX and the CIFAR-10 binary format.

Both are raw bytes behind a small header or none at all; no pickle is involved, so a hostile file can be
refused but can never run code. Files may be plain, `.gz` or `.xz`.
"""

import gzip
import lzma
import zlib
from importlib.resources.abc import Traversable

import numpy as np
import numpy.typing as npt

from dpps.errors import RunError

Bytes = npt.NDArray[np.uint8]

UBYTE = 0x08
"""IDX code of the element type unsigned byte, the only one the image sets use."""

CIFAR_SHAPE = (3, 32, 32)
CIFAR_RECORD = 1 + 3 * 32 * 32
"""A CIFAR-10 record: one label byte, then the red, green and blue planes, each row by row."""


def read_raw(path: Traversable) -> bytes:
    """The file as it is."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error})") from error


def unpack(content: bytes, path: Traversable) -> bytes:
    """What `read_raw` gave of `path`, decompressed."""
    try:
        if path.name.endswith(".gz"):
            return gzip.decompress(content)
        if path.name.endswith(".xz"):
            return lzma.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        kind = path.name.rpartition(".")[2]
        raise RunError(
            f"{path}: expected a complete {kind} file, but it is damaged or truncated ({error})"
        ) from error
    return content


def parse_idx(content: bytes, path: Traversable, dimensions: int) -> Bytes:
    """What was read from `path`: magic bytes 0, 0, type, dimensions; big-endian sizes; the values."""
    magic = bytes([0, 0, UBYTE, dimensions])
    if content[:4] != magic:
        raise RunError(
            f"{path}: expected an IDX file of unsigned bytes in {dimensions} dimension(s), which starts with "
            f"{magic.hex(' ')}, but it starts with {content[:4].hex(' ') or 'nothing'}"
        )
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise RunError(f"{path}: expected an IDX header of {header} bytes, but the file has {len(content)}")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", count=dimensions, offset=4))
    expected = header + int(np.prod(shape, dtype=object))
    if len(content) != expected:
        raise RunError(
            f"{path}: expected {expected} bytes for the shape {shape} in its header, found {len(content)}"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def parse_cifar(content: bytes, path: Traversable) -> tuple[Bytes, Bytes]:
    """The records in `content`, which was read from `path`."""
    if not content or len(content) % CIFAR_RECORD:
        raise RunError(
            f"{path}: expected CIFAR-10 records of {CIFAR_RECORD} bytes, "
            f"but its {len(content)} bytes are no whole number of them"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, CIFAR_RECORD)
    return records[:, 1:].reshape(-1, *CIFAR_SHAPE), records[:, 0]
