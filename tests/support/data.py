"""What tests of data sets share."""

from importlib.resources.abc import Traversable

import numpy as np

from dpps.data import UBYTE, Bytes, parse_idx, read_raw, unpack


def write_idx(values: Bytes) -> bytes:
    """The IDX file of an array of unsigned bytes."""
    return bytes([0, 0, UBYTE, values.ndim]) + np.array(values.shape, ">u4").tobytes() + values.tobytes()


def read_idx(path: Traversable, dimensions: int) -> Bytes:
    """The values of an IDX file, as the catalog reads it."""
    return parse_idx(unpack(read_raw(path), path), path, dimensions)


def cifar_records(labels: range) -> bytes:
    """Random images with these labels."""
    rng = np.random.default_rng(labels.start)
    return b"".join(bytes([label]) + rng.bytes(3072) for label in labels)
