"""CIFAR-10, from its binary batches."""

from pathlib import Path

import numpy as np

from dpps.data.catalog import DATA_SETS, Bytes, Files, Layout, Recipe, Source, parsed
from dpps.errors import RunError

SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32
"""One label byte, then the red, green and blue planes, each row by row."""


def read_cifar_files(files: Files) -> tuple[Bytes, Bytes]:
    """Images and labels of all batches."""
    images, labels = zip(*(parsed(file, parse_cifar) for file in files), strict=True)
    return np.concatenate(images), np.concatenate(labels)


def parse_cifar(content: bytes, path: Path) -> tuple[Bytes, Bytes]:
    """The records in `content`, which was read from `path`."""
    if not content or len(content) % RECORD:
        raise RunError(
            f"{path}: expected CIFAR-10 records of {RECORD} bytes, but its {len(content)} bytes are no whole number of them"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
    return records[:, 1:].reshape(-1, *SHAPE), records[:, 0]


def batches(folder: str) -> Layout:
    """The six files of the archive, in this folder."""
    train = tuple(f"{folder}data_batch_{number}.bin" for number in range(1, 6))
    return Layout(train, (f"{folder}test_batch.bin",))


ARCHIVE = batches("cifar-10-batches-bin/")
LAYOUTS = (Layout(("train.bin",), ("test.bin",)), batches(""), ARCHIVE)

_KRIZHEVSKY = (
    'A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", technical report, '
    "University of Toronto, 2009"
)

DATA_SETS.register("cifar-10")(
    Recipe(
        LAYOUTS,
        read_cifar_files,
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
        examples=50_000,
        shape=(3, 32, 32),
    )
)
