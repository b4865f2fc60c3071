"""Named data sets: what `load` returns, where it looks, what it keeps, and what it says when the files are not right."""

import gzip
import hashlib
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dpps.data import DATA_SETS, Layout, Recipe, catalog, load
from dpps.data.sets.cifar_10 import RECORD, parse_cifar
from dpps.data.sets.mnist import parse_idx
from dpps.errors import RunError, UsageError
from tests.support.data import cifar_records, write_idx
from tests.support.scripts import load_script

PIXELS = np.random.default_rng(2).integers(0, 256, (30, 28, 28), np.uint8)
LABELS = (np.arange(30) % 10).astype(np.uint8)
PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}
VALUES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
SOMEWHERE = Path("some-file")
LAYOUTS = (Layout(("a/train",), ("a/test",)), Layout(("train",), ("test",)))


@pytest.fixture(autouse=True)
def _apart(tmp_path, monkeypatch):
    """A cache of our own, and no address to reach."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("dpps.data.catalog.fetch", refuse)


@pytest.fixture
def _no_environment(monkeypatch):
    monkeypatch.delenv("DPPS_DATA", raising=False)


def refuse(*_):
    raise RunError("nothing must be downloaded here")


def write_mnist(folder, pixels=PIXELS, labels=LABELS):
    folder.mkdir(parents=True)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(write_idx(pixels)))
    (folder / "train-labels-idx1-ubyte.xz").write_bytes(lzma.compress(write_idx(labels)))
    (folder / "t10k-images-idx3-ubyte").write_bytes(write_idx(pixels[:5]))
    (folder / "t10k-labels-idx1-ubyte").write_bytes(write_idx(labels[:5]))
    return folder


@pytest.mark.usefixtures("_no_environment")
def test_mini_is_part_of_the_package():
    data = load("mnist-mini")
    assert (data.name, data.classes) == ("mnist-mini", 10)
    assert "LeCun" in data.citation
    for images, count in ((data.train, 10_000), (data.test, 2_000)):
        assert images.pixels.shape == (count, 1, 28, 28)
        assert images.pixels.dtype == torch.uint8
        assert images.labels.dtype == torch.int64
        assert len(images) == count
        # MNIST has 9.0 % (digit 5) to 11.2 % (digit 1) of each; a sample is within a few tenths of a percent.
        shares = images.labels.bincount(minlength=10) / count
        assert shares.min() > 0.08
        assert shares.max() < 0.125
    mini = Path(catalog.__file__).parent / "mini"
    assert "CC BY-SA 3.0" in (mini / "ATTRIBUTION.md").read_text()
    assert sum(file.stat().st_size for file in mini.iterdir()) < 2_100_000


def test_mini_pixels_are_those_committed():
    data = load("mnist-mini")
    content = hashlib.sha256()
    for images in (data.train, data.test):
        content.update(images.pixels.numpy().tobytes())
        content.update(images.labels.numpy().astype(np.uint8).tobytes())
    assert content.hexdigest() == "52970e738a513d859d71c21dad863eeafc7009fd28a76fa5102a35d9533fb2bc"


def test_fashion_is_repeated_to_three_channels(tmp_path):
    write_mnist(tmp_path / "fashion-mnist")
    train = load("fashion-mnist", tmp_path).train
    assert train.pixels.shape == (30, 1, 28, 28)
    assert train.shape == (3, 28, 28)
    inputs = train.inputs(np.array([[0, 1], [2, 3]]))
    assert inputs.shape == (2, 2, 3, 28, 28)
    for channel in range(3):
        np.testing.assert_allclose(inputs[1, 0, channel].numpy(), PIXELS[2] / 255, rtol=1e-6)


@pytest.mark.parametrize("layout", ["whole", "batches", "folder"])
def test_cifar_layouts_and_normalisation(tmp_path, layout):
    folder = tmp_path / "cifar-10" / ("cifar-10-batches-bin" if layout == "folder" else "")
    folder.mkdir(parents=True)
    batches = [cifar_records(range(start, start + 2)) for start in range(0, 10, 2)]
    if layout == "whole":
        (folder / "train.bin.xz").write_bytes(lzma.compress(b"".join(batches)))
        (folder / "test.bin.gz").write_bytes(gzip.compress(batches[0]))
    else:
        for number, batch in enumerate(batches, 1):
            (folder / f"data_batch_{number}.bin").write_bytes(batch)
        (folder / "test_batch.bin").write_bytes(batches[0])
    data = load("cifar-10", tmp_path)
    assert data.train.labels.tolist() == list(range(10))
    assert data.test.labels.tolist() == [0, 1]
    record = np.frombuffer(batches[1], np.uint8)[1:3073].reshape(3, 32, 32)
    np.testing.assert_array_equal(data.train.pixels[2].numpy(), record)
    green = (record[1] / 255 - 0.4822) / 0.1994
    np.testing.assert_allclose(data.train.inputs(slice(2, 3))[0, 1].numpy(), green, atol=1e-5)


def test_unknown_name_gives_the_nearest():
    with pytest.raises(UsageError) as caught:
        load("mnist-min")
    assert ", ".join(DATA_SETS.names()) in str(caught.value)
    assert "'mnist-mini'" in str(caught.value)
    assert DATA_SETS.names() == ("cifar-10", "fashion-mnist", "mnist", "mnist-mini")


def test_directory_comes_before_the_environment(tmp_path, monkeypatch):
    write_mnist(tmp_path / "a" / "mnist", PIXELS[:7], LABELS[:7])
    write_mnist(tmp_path / "b" / "mnist")
    monkeypatch.setenv("DPPS_DATA", str(tmp_path / "b"))
    assert len(load("mnist", tmp_path / "a").train) == 7
    assert len(load("mnist").train) == 30


def test_environment_must_name_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DPPS_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match=r"\$DPPS_DATA .*nowhere"):
        load("mnist")


def test_environment_with_half_a_data_set_is_an_error(tmp_path, monkeypatch):
    (write_mnist(tmp_path / "mnist") / "t10k-labels-idx1-ubyte").unlink()
    monkeypatch.setenv("DPPS_DATA", str(tmp_path))
    with pytest.raises(UsageError, match=r"mnist .*t10k-labels-idx1-ubyte \(.*\.gz or \.xz\)"):
        load("mnist")


@pytest.mark.parametrize("environment", [True, False])
def test_last_resort_is_the_download(tmp_path, monkeypatch, environment):
    """Also when $DPPS_DATA holds other data sets, but not this one."""
    monkeypatch.delenv("DPPS_DATA", raising=False)
    if environment:
        monkeypatch.setenv("DPPS_DATA", str(tmp_path))
    with pytest.raises(RunError, match="downloaded here"):
        load("mnist")


@pytest.mark.parametrize(
    ("pixels", "labels", "message"),
    [
        (PIXELS, LABELS[:-1], "30 images, 29 labels"),
        (PIXELS, LABELS + np.uint8(1), r"0\.\.9.* 10$"),
        (PIXELS[:0], LABELS[:0], r"0\.\.9"),
    ],
)
def test_files_that_do_not_fit(tmp_path, pixels, labels, message):
    write_mnist(tmp_path / "mnist", pixels, labels)
    with pytest.raises(RunError, match=message):
        load("mnist", tmp_path)


def full_data():
    if not os.environ.get("DPPS_DATA"):
        pytest.skip("needs $DPPS_DATA")
    return Path(os.environ["DPPS_DATA"])


def script():
    return load_script("make_mnist_mini")


@pytest.mark.slow
def test_mini_is_what_the_script_makes():
    made = script().sample(full_data(), "train") | script().sample(full_data(), "t10k")
    data = load("mnist-mini")
    for part, images in (("train", data.train), ("t10k", data.test)):
        np.testing.assert_array_equal(made[f"{part}-images-idx3-ubyte"], images.pixels[:, 0].numpy())
        np.testing.assert_array_equal(made[f"{part}-labels-idx1-ubyte"], images.labels.numpy())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("mnist", [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]),
        ("fashion-mnist", [6000] * 10),
        ("cifar-10", [5000] * 10),
    ],
)
def test_full_sets_are_complete(name, counts):
    data = load(name, full_data())
    assert data.train.labels.bincount().tolist() == counts
    assert len(data.test) == 10_000
    if name == "mnist":
        assert data.train.labels[:5].tolist() == [5, 0, 4, 1, 9]


def test_file_that_cannot_be_read_is_said(tmp_path, monkeypatch):
    write_mnist(tmp_path / "mnist")

    def forbidden(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", forbidden)
    with pytest.raises(RunError, match=r"train-images-idx3-ubyte\.gz: .*Errno 13"):
        load("mnist", tmp_path)


# Recipes


def _recipe(labels):
    found = np.zeros((2, 1, 2, 2), np.uint8), np.array(labels, np.uint8)
    return Recipe(LAYOUTS, lambda files: found, "nobody", classes=3)


def test_the_first_whole_layout_is_taken_plain_or_compressed(tmp_path):
    (tmp_path / "a").mkdir()
    for name in ("a/train", "train.gz", "test.xz"):
        (tmp_path / name).touch()
    found = _recipe([0, 1]).find(tmp_path)
    assert found == ((tmp_path / "train.gz",), (tmp_path / "test.xz",))
    (tmp_path / "a" / "test").touch()
    assert _recipe([0, 1]).find(tmp_path) == ((tmp_path / "a/train",), (tmp_path / "a/test",))
    assert _recipe([0, 1]).find(tmp_path / "b") is None


# File formats


@settings(deadline=None, max_examples=30)
@given(hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5)))
def test_idx_written_and_read_is_the_same(values):
    read = parse_idx(write_idx(values), SOMEWHERE, values.ndim)
    assert read.shape == values.shape
    np.testing.assert_array_equal(read, values)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 39))
def test_every_truncation_of_an_idx_file_is_refused(length):
    with pytest.raises(RunError, match=r"^some-file: expected"):
        parse_idx(write_idx(VALUES)[:length], SOMEWHERE, 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x00\x00\x08\x01" + bytes(20), "00 00 08 01"),
        (b"\x00\x00\x0d\x03" + bytes(20), "00 00 0d 03"),
        (write_idx(VALUES) + b"!", "(2, 3, 4)"),
    ],
)
def test_wrong_idx_file_names_what_was_expected(content, message):
    with pytest.raises(RunError) as caught:
        parse_idx(content, SOMEWHERE, 3)
    assert message in str(caught.value)


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damaged_compression_is_refused(tmp_path, suffix, damage):
    folder = write_mnist(tmp_path / "mnist")
    packed = bytearray(PACK[suffix](write_idx(PIXELS)))
    if damage == "flipped":
        packed[len(packed) // 2] ^= 0xFF
    (folder / "train-images-idx3-ubyte.gz").unlink()
    (folder / f"train-images-idx3-ubyte{suffix}").write_bytes(packed[:-9] if damage == "cut" else packed)
    with pytest.raises(RunError, match=rf"train-images-idx3-ubyte\{suffix}: .*{suffix[1:]} file"):
        load("mnist", tmp_path)


def test_cifar_planes_and_labels():
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3, 32, 32), np.uint8)
    labels = np.array([3, 9, 0, 1], np.uint8)
    content = b"".join(bytes([y]) + x.tobytes() for x, y in zip(pixels, labels, strict=True))
    read_pixels, read_labels = parse_cifar(content, SOMEWHERE)
    np.testing.assert_array_equal(read_pixels, pixels)
    np.testing.assert_array_equal(read_labels, labels)


@pytest.mark.parametrize("size", [0, 1, RECORD - 1, 2 * RECORD + 1])
def test_cifar_of_no_whole_number_of_records_is_refused(size):
    with pytest.raises(RunError, match=rf"some-file: .*3073 bytes.* {size} bytes"):
        parse_cifar(bytes(size), SOMEWHERE)
