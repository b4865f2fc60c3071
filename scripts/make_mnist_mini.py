"""Make the embedded data set mnist-mini from the four files of MNIST.

It keeps the first 10,000 training and the first 2,000 test images of one seeded shuffle each: a plain random
sample, so the classes are as uneven as in MNIST. Running it again writes the same images in the same order.

    python scripts/make_mnist_mini.py --data-dir DIR     # DIR/mnist/train-images-idx3-ubyte.gz, ...
"""

import argparse
import gzip
import os
from pathlib import Path

import numpy as np

from dpps.data import Bytes, load

SEED = 1998
KEPT = {"train": 10_000, "t10k": 2_000}
TARGET = Path(__file__).parents[1] / "src" / "dpps" / "data" / "mini"


def sample(folder: Path, part: str) -> dict[str, Bytes]:
    """File name (without `.gz`) to values, for the kept images and labels of one part of `folder`/mnist."""
    mnist = load("mnist", folder)
    images = mnist.train if part == "train" else mnist.test
    order = np.random.Generator(np.random.PCG64(SEED)).permutation(len(images))[: KEPT[part]]
    return {
        f"{part}-images-idx3-ubyte": images.pixels[order, 0].numpy(),
        f"{part}-labels-idx1-ubyte": images.labels[order].numpy().astype(np.uint8),
    }


def write_idx(values: Bytes) -> bytes:
    """The IDX file of an array of unsigned bytes."""
    return bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes() + values.tobytes()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=os.environ.get("DPPS_DATA"),
        required="DPPS_DATA" not in os.environ,
        help="the folder that holds mnist/ (default: $DPPS_DATA)",
    )
    parser.add_argument(
        "--out", type=Path, default=TARGET, help="where the four files go (default: %(default)s)"
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for part in KEPT:
        for name, values in sample(Path(arguments.data_dir), part).items():
            target = arguments.out / f"{name}.gz"
            # mtime=0: the file depends on the data alone, not on when it was made.
            target.write_bytes(gzip.compress(write_idx(values), compresslevel=9, mtime=0))
            print(f"{target}  {target.stat().st_size:,} bytes  {values.shape}")


if __name__ == "__main__":
    main()
