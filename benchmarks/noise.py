"""Samples per second of every sampler beside numpy's Laplace, on one core, in one run.

Claim: the secure samplers reach at least 1/8 of numpy's speed.
"""

import numpy as np
import torch
from measure import in_turn

import dpps
from dpps.keystream import Keystream
from dpps.noise import NoiseSource, Outgoing
from dpps.secure import STEPS, SecureNoise

SIZE = 500_000


def release(source: NoiseSource, mechanism: dpps.Mechanism) -> None:
    """A whole message: draw, shape, add."""
    rows = torch.zeros(10, SIZE // 10)
    source.release(mechanism, 1.0, Outgoing(rows, rows, rows.clone(), range(10), 0, base_is_public=True))


def main() -> None:
    """Print a line per sampler."""
    torch.set_num_threads(1)
    generator, keystream = np.random.default_rng(0), Keystream()
    laplace, gaussian = dpps.Laplace(1.0), dpps.Gaussian(1.0)
    samplers = {
        "seeded Laplace, a whole message": lambda: release(dpps.Seeded(0), laplace),
        "seeded Gaussian, a whole message": lambda: release(dpps.Seeded(0), gaussian),
        "keystream discrete Laplace": lambda: keystream.discrete_laplace(STEPS, SIZE),
        "keystream discrete Gaussian": lambda: keystream.discrete_gaussian(STEPS, SIZE),
        "secure Laplace, a whole message": lambda: release(SecureNoise(keystream), laplace),
        "secure Gaussian, a whole message": lambda: release(SecureNoise(keystream), gaussian),
    }
    for name, sampler in samplers.items():
        ours, numpys, ratio = in_turn(sampler, lambda: generator.laplace(size=SIZE), 15)
        print(
            f"{name:<34} {SIZE / ours / 1e6:6.1f} M/s   numpy's Laplace {SIZE / numpys / 1e6:6.1f} M/s   {1 / ratio:5.2f} of it"
        )


if __name__ == "__main__":
    main()
