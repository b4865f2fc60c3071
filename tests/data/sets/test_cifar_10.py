"""CIFAR-10 from its binary batches."""

from pathlib import Path

from dpps.data import ARCHIVE, read_cifar_files


def test_batches_are_read_one_behind_the_other(tmp_path: Path) -> None:
    files = tuple(tmp_path / name for name in ("1.bin", "2.bin"))
    for label, file in enumerate(files):
        file.write_bytes(bytes([label]) + bytes(3072))
    images, labels = read_cifar_files(files)
    assert images.shape == (2, 3, 32, 32)
    assert labels.tolist() == [0, 1]
    assert len(ARCHIVE.files) == 6
