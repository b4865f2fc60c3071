"""IDX and CIFAR-10 files are read exactly, and refused by name when anything about them is wrong."""

import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dpps.data import CIFAR_RECORD, parse_cifar
from dpps.errors import RunError
from tests.support.data import read_idx, write_idx

PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}
VALUES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


@pytest.mark.parametrize("suffix", PACK)
def test_idx_is_read_plain_and_compressed(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"values{suffix}"
    header = b"\x00\x00\x08\x03" + b"\x00\x00\x00\x02" + b"\x00\x00\x00\x03" + b"\x00\x00\x00\x04"
    file.write_bytes(PACK[suffix](header + bytes(range(24))))
    np.testing.assert_array_equal(read_idx(file, 3), VALUES)


@settings(deadline=None, max_examples=30)
@given(hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5)))
def test_idx_written_and_read_is_the_same(values: np.ndarray) -> None:
    class Memory:
        name = "values"

        def read_bytes(self) -> bytes:
            return write_idx(values)

    read = read_idx(Memory(), values.ndim)
    assert read.shape == values.shape
    np.testing.assert_array_equal(read, values)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 39))
def test_every_truncation_of_an_idx_file_is_refused(length: int) -> None:
    class Cut:
        name = "cut-file"

        def read_bytes(self) -> bytes:
            return write_idx(VALUES)[:length]

        def __str__(self) -> str:
            return self.name

    with pytest.raises(RunError, match=r"^cut-file: expected"):
        read_idx(Cut(), 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x00\x00\x08\x01" + bytes(20), "00 00 08 01"),
        (b"\x00\x00\x0d\x03" + bytes(20), "00 00 0d 03"),
        (b"<html>", "3c 68 74 6d"),
        (b"", "00 00 08 03"),
        (write_idx(VALUES) + b"!", "(2, 3, 4)"),
    ],
)
def test_wrong_idx_file_names_what_was_expected(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "wrong"
    file.write_bytes(content)
    with pytest.raises(RunError) as caught:
        read_idx(file, 3)
    assert str(file) in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "other"])
def test_damaged_compression_is_refused(tmp_path: Path, suffix: str, damage: str) -> None:
    packed = bytearray(PACK[suffix](write_idx(VALUES)))
    if damage == "flipped":
        packed[len(packed) // 2] ^= 0xFF
    content = {"cut": packed[:-9], "flipped": packed, "other": b"not compressed at all"}[damage]
    file = tmp_path / f"values{suffix}"
    file.write_bytes(content)
    with pytest.raises(RunError, match=rf"values\{suffix}: .*{suffix[1:]} file"):
        read_idx(file, 3)


def test_unreadable_file_is_a_run_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"missing: .*Errno 2"):
        read_idx(tmp_path / "missing", 3)


def test_cifar_planes_and_labels(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3, 32, 32), np.uint8)
    labels = np.array([3, 9, 0, 1], np.uint8)
    file = tmp_path / "batch.bin"
    file.write_bytes(b"".join(bytes([y]) + x.tobytes() for x, y in zip(pixels, labels, strict=True)))
    read_pixels, read_labels = parse_cifar(file.read_bytes(), file)
    np.testing.assert_array_equal(read_pixels, pixels)
    np.testing.assert_array_equal(read_labels, labels)


@pytest.mark.parametrize("size", [0, 1, CIFAR_RECORD - 1, 2 * CIFAR_RECORD + 1])
def test_cifar_of_no_whole_number_of_records_is_refused(tmp_path: Path, size: int) -> None:
    file = tmp_path / "batch.bin"
    file.write_bytes(bytes(size))
    with pytest.raises(RunError, match=rf"batch\.bin: .*3073 bytes.* {size} bytes"):
        parse_cifar(file.read_bytes(), file)
