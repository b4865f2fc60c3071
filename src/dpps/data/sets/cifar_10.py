"""CIFAR-10, from its binary batches."""

import numpy as np

from dpps.data.cache import parsed
from dpps.data.formats import Bytes, parse_cifar
from dpps.data.recipe import DATA_SETS, Files, Layout, Recipe, Source


def read_cifar_files(files: Files) -> tuple[Bytes, Bytes]:
    """Images and labels of all batches."""
    batches = [parsed(file, parse_cifar) for file in files]
    return np.concatenate([images for images, _ in batches]), np.concatenate(
        [labels for _, labels in batches]
    )


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
