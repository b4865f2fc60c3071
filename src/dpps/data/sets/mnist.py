"""MNIST, its part that comes with the package, and Fashion-MNIST, which has the same kind of files."""

from functools import partial
from pathlib import Path

import numpy as np

from dpps.data.catalog import DATA_SETS, Bytes, Files, Layout, Recipe, Source, parsed
from dpps.errors import RunError

UBYTE = 0x08
"""IDX code of the element type unsigned byte, the only one the image sets use."""

IDX = Layout(
    train=("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    test=("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
)


def read_idx_files(files: Files) -> tuple[Bytes, Bytes]:
    """Images and labels."""
    images, labels = files
    return (
        parsed(images, partial(parse_idx, dimensions=3))[:, None],
        parsed(labels, partial(parse_idx, dimensions=1)),
    )


def parse_idx(content: bytes, path: Path, dimensions: int) -> Bytes:
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


def idx_sources(mirrors: tuple[str, ...], *hashes: str) -> tuple[Source, ...]:
    """The four files, on every mirror, with their SHA-256."""
    named = zip(IDX.files, hashes, strict=True)
    return tuple(Source(f"{name}.gz", mirrors, f"sha256:{digest}") for name, digest in named)


_LECUN = (
    'Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, "Gradient-based learning applied to document recognition", '
    "Proceedings of the IEEE 86(11), 1998"
)

DATA_SETS.register("mnist-mini")(
    Recipe((IDX,), read_idx_files, _LECUN, embedded="mini", examples=10_000, shape=(1, 28, 28))
)
DATA_SETS.register("mnist")(
    Recipe(
        (IDX,),
        read_idx_files,
        _LECUN,
        idx_sources(
            (
                "https://ossci-datasets.s3.amazonaws.com/mnist",
                "https://storage.googleapis.com/cvdf-datasets/mnist",
            ),
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
        examples=60_000,
        shape=(1, 28, 28),
    )
)

_XIAO = (
    'H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning '
    'Algorithms", arXiv:1708.07747, 2017'
)
# as three channels: the paper trains ResNet-18 on it
DATA_SETS.register("fashion-mnist")(
    Recipe(
        (IDX,),
        read_idx_files,
        _XIAO,
        idx_sources(
            (
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
                "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
            ),
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
        mean=(0.0, 0.0, 0.0),
        deviation=(1.0, 1.0, 1.0),
        examples=60_000,
        shape=(1, 28, 28),
    )
)
