"""Sensors agree on the average of what they measure, and nobody learns much about what one of them measured.

Every sensor holds a private reading between 15 and 25 degrees. They gossip over the EXP graph. The first message carries Laplace
noise for epsilon; later messages are computed from messages that were sent before, so they reveal nothing new.

    python examples/consensus.py        prints error against epsilon and draws consensus.png
"""

import math
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

import dpps

SENSORS, ROUNDS, EPSILONS, SHOWN = 64, 8, (0.3, 1.0, 3.0, 10.0), 3.0


def gossip(readings: torch.Tensor, epsilon: float | None, seed: int) -> torch.Tensor:
    """Every sensor's estimate of the average before the first and after each round: (rounds + 1, sensors)."""
    if epsilon is None:
        protocol = dpps.DPPS(dpps.Exponential(SENSORS))
    else:
        # two readings differ by at most 10 degrees; afterwards sensors add nothing of their own
        bound = dpps.Bounded(clip=0, start_distance=10.0)
        protocol = dpps.DPPS(
            dpps.Exponential(SENSORS), dpps.Laplace(budget=epsilon), bound, noise=dpps.Seeded(seed)
        )
    state = protocol.start(readings)
    estimates = [state.y.flatten().clone()]
    for _ in range(ROUNDS):
        protocol.step(state)
        estimates.append(state.y.flatten().clone())
    assert epsilon is None or math.isclose(protocol.privacy(delta=0).epsilon, epsilon)
    return torch.stack(estimates)


def main(file: Path) -> None:
    """Print a table; draw how the sensors come to agree, and how far off they are."""
    generator = torch.Generator().manual_seed(1)
    readings = 15 + 10 * torch.rand(SENSORS, 1, generator=generator, dtype=torch.float64)
    truth = float(readings.mean())
    print(f"true average {truth:.3f} degrees, {SENSORS} sensors, {ROUNDS} rounds")
    errors = {}
    for epsilon in (None, *EPSILONS):
        runs = [gossip(readings, epsilon, seed) for seed in range(20)]
        errors[epsilon] = sum(abs(float(run[-1].mean()) - truth) for run in runs) / len(runs)
        name = "no noise" if epsilon is None else f"epsilon {epsilon:g}"
        print(f"{name:>11}: the consensus is off by {errors[epsilon]:.4f} degrees on average")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(gossip(readings, SHOWN, seed=0).numpy(), color="tab:blue", linewidth=0.6)
    left.axhline(truth, color="black", linestyle="--", label="true average")
    left.set(
        xlabel="round",
        ylabel="estimate of every sensor (degrees)",
        title=f"epsilon {SHOWN:g}: noise, then agreement",
    )
    left.legend()
    right.loglog(EPSILONS, [errors[epsilon] for epsilon in EPSILONS], marker="o")
    right.set(xlabel="total epsilon", ylabel="mean error (degrees)", title="Error of the consensus")
    ticks = {"xticks": EPSILONS, "yticks": (0.2, 0.5, 1, 2, 5)}
    right.set(**ticks, **{name.replace("ticks", "ticklabels"): map(str, at) for name, at in ticks.items()})
    right.minorticks_off()
    figure.savefig(file, dpi=120)
    print(f"drawn to {file}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "consensus.png"))
