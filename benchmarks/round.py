"""One DPPS round with Laplace noise, beside only drawing that much Laplace noise in place: sign and -log1p of torch.rand.

Claim: round / draw is at most 2.5 at N=10 and at most 2.0 at N=100 and N=1000 (EXP, d = 7,850, the paper's sensitivity).
"""

import torch
from measure import in_turn

import dpps

DIMENSION = 7850


def draw(shape: tuple[int, int]) -> torch.Tensor:
    """The fastest way found to draw Laplace noise with torch alone."""
    u = torch.rand(shape).sub_(0.5)
    sign = u.sign()
    return u.abs_().mul_(-2).log1p_().mul_(sign)


def main() -> None:
    """Print a ratio per network size."""
    print(
        f"{'N':>5} {'round ms':>9} {'draw ms':>8} {'ratio':>6} {'claim':>6}   threads {torch.get_num_threads()}"
    )
    for nodes, repetitions, claim in ((10, 300, 2.5), (100, 60, 2.0), (1000, 15, 2.0)):
        protocol = dpps.DPPS(
            dpps.Exponential(nodes),
            dpps.Laplace(5, 1e-3),
            dpps.Paper(0.78, 0.55),
            sync_every=5,
            noise=dpps.Seeded(0),
        )
        state = protocol.start(torch.zeros(nodes, DIMENSION))
        perturbation = torch.randn(nodes, DIMENSION) * 1e-4

        def one_round(
            state: dpps.State = state, protocol: dpps.DPPS = protocol, eps: torch.Tensor = perturbation
        ) -> None:
            protocol.step(state, eps)

        a, b, ratio = in_turn(one_round, lambda nodes=nodes: draw((nodes, DIMENSION)), repetitions)  # type: ignore[misc]
        print(f"{nodes:>5} {a * 1e3:>9.3f} {b * 1e3:>8.3f} {ratio:>6.2f} {claim:>6.1f}")


if __name__ == "__main__":
    main()
