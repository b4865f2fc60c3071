"""MNIST, its part that comes with the package, and the files that data sets like it have."""

from functools import partial

from dpps.data.cache import parsed
from dpps.data.formats import Bytes, parse_idx
from dpps.data.recipe import DATA_SETS, Files, Layout, Recipe, Source

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


def idx_sources(mirrors: tuple[str, ...], *hashes: str) -> tuple[Source, ...]:
    """The four files, on every mirror, with their SHA-256."""
    named = zip(IDX.files, hashes, strict=True)
    return tuple(Source(f"{name}.gz", mirrors, f"sha256:{digest}") for name, digest in named)


LECUN = (
    'Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, "Gradient-based learning applied to document recognition", '
    "Proceedings of the IEEE 86(11), 1998"
)

DATA_SETS.register("mnist-mini")(
    Recipe((IDX,), read_idx_files, LECUN, embedded="mini", examples=10_000, shape=(1, 28, 28))
)
DATA_SETS.register("mnist")(
    Recipe(
        (IDX,),
        read_idx_files,
        LECUN,
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
