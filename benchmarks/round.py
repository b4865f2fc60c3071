"""One DPPS round with Laplace noise, beside only drawing that much Laplace noise in place: sign and -log1p of torch.rand.

Claim: round / draw is at most 2.5 at N=10 and at most 2.0 at N=100 and N=1000 (EXP, d = 7,850, the paper's sensitivity).
"""

from collections.abc import Iterator
from functools import partial

import torch
from measure import Row, compare, main

import dpps

DIMENSION = 7850


def draw(shape: tuple[int, int]) -> torch.Tensor:
    """The fastest way found to draw Laplace noise with torch alone."""
    u = torch.rand(shape).sub_(0.5)
    sign = u.sign()
    return u.abs_().mul_(-2).log1p_().mul_(sign)


def rows(quick: bool) -> Iterator[Row]:
    """A ratio per network size."""
    sizes = ((4, 2, 2.5),) if quick else ((10, 300, 2.5), (100, 60, 2.0), (1000, 15, 2.0))
    for nodes, turns, target in sizes:
        mechanism, sensitivity = dpps.Laplace(5, 1e-3), dpps.Paper(0.78, 0.55)
        protocol = dpps.DPPS(
            dpps.Exponential(nodes), mechanism, sensitivity, sync_every=5, noise=dpps.Seeded(0)
        )
        state = protocol.start(torch.zeros(nodes, DIMENSION))
        ours = partial(protocol.step, state, torch.randn(nodes, DIMENSION) * 1e-4)
        what = f"DPPS round, N={nodes}, d={DIMENSION:,}"
        yield compare(what, ours, "drawing that much noise", partial(draw, (nodes, DIMENSION)), turns, target)


if __name__ == "__main__":
    main(rows)
