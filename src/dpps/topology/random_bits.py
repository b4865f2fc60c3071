"""Random numbers that every process, machine and version of NumPy draws alike."""

from zlib import crc32

import numpy as np
from numpy.typing import NDArray


def random_bits(purpose: str, seed: int, t: int, count: int) -> NDArray[np.uint64]:
    """``count`` random 64-bit numbers of round t, keyed by (purpose, seed, t).

    Raw output of PCG64: NumPy promises to keep it, unlike that of its distributions and permutations.
    """
    key = np.random.SeedSequence([crc32(purpose.encode()), seed, t])
    bits: NDArray[np.uint64] = np.random.PCG64(key).random_raw(count)
    return bits
