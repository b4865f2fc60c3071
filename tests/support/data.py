"""What tests of data sets share."""

import numpy as np

from dpps.data import Bytes


def write_idx(values: Bytes) -> bytes:
    """The IDX file of an array of unsigned bytes."""
    return bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes() + values.tobytes()


def cifar_records(labels: range) -> bytes:
    """Random images with these labels."""
    rng = np.random.default_rng(labels.start)
    return b"".join(bytes([label]) + rng.bytes(3072) for label in labels)
