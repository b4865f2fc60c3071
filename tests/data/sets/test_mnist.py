"""MNIST as it is published: files, readers and hashes."""

import gzip
from pathlib import Path

import numpy as np

from dpps.data import DATA_SETS, IDX, idx_sources, read_idx_files
from tests.support.data import write_idx


def test_images_get_a_channel_and_labels_stay(tmp_path: Path) -> None:
    images, labels = np.arange(18, dtype=np.uint8).reshape(2, 3, 3), np.array([7, 1], np.uint8)
    files = tmp_path / "images.gz", tmp_path / "labels"
    files[0].write_bytes(gzip.compress(write_idx(images)))
    files[1].write_bytes(write_idx(labels))
    found = read_idx_files(files)
    assert found[0].shape == (2, 1, 3, 3)
    np.testing.assert_array_equal(found[0][:, 0], images)
    np.testing.assert_array_equal(found[1], labels)


def test_every_published_file_has_a_hash_of_its_own() -> None:
    assert [source.file for source in idx_sources(("x",), "a", "b", "c", "d")] == [
        f"{name}.gz" for name in IDX.files
    ]
    hashes = [source.hash for name in DATA_SETS.names() for source in DATA_SETS[name].sources]
    assert len(hashes) == len(set(hashes)) == 9
