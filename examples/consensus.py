"""Sensors agree on the average of what they measure, and nobody learns what one of them measured.

Every sensor holds a private reading between 15 and 25 degrees. They gossip over the EXP graph. The first message carries Laplace
noise for epsilon; later messages are computed from messages that were sent before, so they reveal nothing new.

    python examples/consensus.py        prints error against epsilon and draws consensus.png
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

import dpps

SENSORS, ROUNDS = 64, 12


def disagreement_and_error(
    readings: torch.Tensor, epsilon: float | None, seed: int
) -> tuple[list[float], float]:
    """How far apart the sensors are after every round, and how far the consensus is from the true average."""
    if epsilon is None:
        protocol = dpps.DPPS(dpps.Exponential(SENSORS))
    else:
        # two readings differ by at most 10 degrees; afterwards sensors add nothing of their own
        bound = dpps.Bounded(distance=0, clip=0, start_distance=10.0)
        protocol = dpps.DPPS(
            dpps.Exponential(SENSORS), dpps.Laplace(budget=epsilon), bound, noise=dpps.Seeded(seed)
        )
    state = protocol.start(readings)
    spread, spent = [], 0.0
    for _ in range(ROUNDS):
        spent += protocol.step(state).epsilon
        spread.append(float(state.y.max() - state.y.min()))
    assert epsilon is None or spent == epsilon
    return spread, abs(float(state.y.mean() - readings.mean()))


def main(file: Path) -> None:
    """Print a table and draw how agreement grows."""
    readings = 15 + 10 * torch.rand(
        SENSORS, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    figure, axis = plt.subplots(figsize=(6, 4))
    print(f"true average {float(readings.mean()):.3f} degrees, {SENSORS} sensors, {ROUNDS} rounds")
    for epsilon in (None, 10.0, 3.0, 1.0):
        runs = [disagreement_and_error(readings, epsilon, seed) for seed in range(20)]
        error = sum(error for _, error in runs) / len(runs)
        name = "no noise" if epsilon is None else f"epsilon {epsilon:g}"
        print(f"{name:>10}: the consensus is off by {error:.4f} degrees on average")
        axis.semilogy(
            range(1, ROUNDS + 1), [max(v, 1e-16) for v in runs[0][0]], marker="o", markersize=3, label=name
        )
    axis.set(xlabel="round", ylabel="largest disagreement (degrees)", ylim=(1e-16, 1e3))
    axis.legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")
    print(f"drawn to {file}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "consensus.png"))
