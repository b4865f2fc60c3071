"""The samplers beside numpy's Laplace, and what safe noise makes of a node's whole round; one core, one run.

Claims: the secure samplers take at most 8 times as long as numpy's Laplace for as many numbers. A round of one node in its own
process (MLP, batch 100, d_s = 7,850; peers cost nothing here) is with safe noise at most 3.0 times what it is with fast noise.
"""

from collections.abc import Iterator

import numpy as np
import torch
from learners import learner
from measure import Row, Work, compare, main
from torch import Tensor

import dpps
from dpps.noise import STEPS, Keystream, NoiseSource, Outgoing, SecureNoise
from dpps.topology import Weights
from dpps.transport import Stacked


class OneRow(Stacked):
    """The first of two nodes by itself, as in a distributed run; what the other one would send costs nothing."""

    def __init__(self) -> None:
        super().__init__(2)
        self.rows = range(1)

    def mix(self, weights: Weights, *xs: Tensor) -> list[Tensor]:
        """What this node keeps, as if its peer had sent the same."""
        return [x.clone() for x in xs]

    def mean(self, x: Tensor, present: np.ndarray | None = None) -> Tensor:
        """The same."""
        return x[0].clone()

    def gather(self, v: Tensor) -> Tensor:
        """Both nodes have the same number."""
        return v.repeat(2)


def release(source: NoiseSource, mechanism: dpps.Mechanism, size: int) -> None:
    """A whole message: draw, shape, add."""
    rows = torch.zeros(10, size // 10)
    source.release(mechanism, 1.0, Outgoing(rows, rows, rows.clone(), range(10), 0, base_is_public=True))


def samplers(size: int) -> dict[str, tuple[Work, float | None]]:
    """By name, with their targets."""
    keystream, laplace, gaussian = Keystream(), dpps.Laplace(1.0), dpps.Gaussian(1.0)
    return {
        "seeded Laplace, a whole message": (lambda: release(dpps.Seeded(0), laplace, size), None),
        "seeded Gaussian, a whole message": (lambda: release(dpps.Seeded(0), gaussian, size), None),
        "keystream discrete Laplace": (lambda: keystream.discrete_laplace(STEPS, size), 8.0),
        "keystream discrete Gaussian": (lambda: keystream.discrete_gaussian(STEPS, size), 8.0),
        "secure Laplace, a whole message": (lambda: release(SecureNoise(keystream), laplace, size), 8.0),
        "secure Gaussian, a whole message": (lambda: release(SecureNoise(keystream), gaussian, size), 8.0),
    }


def rows(quick: bool) -> Iterator[Row]:
    """Every sampler, then whole rounds."""
    size, turns = (1000, 2) if quick else (500_000, 15)
    generator = np.random.default_rng(0)
    for name, (sampler, target) in samplers(size).items():
        beside = f"numpy's Laplace, {size:,} numbers"
        yield compare(name, sampler, beside, lambda: generator.laplace(size=size), turns, target)
    batch, examples, turns = (4, 8, 2) if quick else (100, 600, 200)
    for unit in ("node-swap", "contribution", "record"):
        runs = [
            learner(2, batch, examples, unit=unit, noise=noise, fabric=OneRow())
            for noise in (SecureNoise(), dpps.Seeded(0))
        ]
        what = f"round of one node with safe noise, {unit}, MLP, batch {batch}"
        yield compare(what, runs[0].step, "with fast noise", runs[1].step, turns, 3.0)


if __name__ == "__main__":
    main(rows, threads=1)
