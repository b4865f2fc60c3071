"""Hospitals with different patients: accuracy against epsilon, on everybody's patients and on each hospital's own.

Five hospitals see breast cancer patients of different kinds (small tumours go to one, large ones to another). They share the first layer and
keep their own head. Draws hospitals.png.

    python examples/hospitals.py
"""

from statistics import fmean

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpps

HOSPITALS, EPSILONS = 5, (0.5, 1.0, 3.0, 8.0)


def patients() -> tuple[list[TensorDataset], list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """Each hospital's training set, held-out patients of its own kind, and 69 patients of all kinds."""
    source = load_breast_cancer()
    x, y = torch.tensor(source.data, dtype=torch.float32), torch.tensor(source.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    x, y = x[order], y[order]
    public, public_y = x[:69], y[:69]  # standardised by these only: statistics of private data would leak
    x, y = (x[69:] - public.mean(0)) / public.std(0), y[69:]
    by_size = torch.argsort(x[:, 0] + 0.5 * torch.randn(len(x), generator=torch.Generator().manual_seed(2)))
    parts = [part[torch.randperm(len(part))] for part in by_size.chunk(HOSPITALS)]
    train = [TensorDataset(x[p[:80]], y[p[:80]]) for p in parts]
    return (
        train,
        [(x[p[80:]], y[p[80:]]) for p in parts],
        ((public - public.mean(0)) / public.std(0), public_y),
    )


def main() -> None:
    """Three seeds for every epsilon."""
    torch.manual_seed(0)
    train, own, everybody = patients()
    lines: dict[str, list[float]] = {"all kinds of patients": [], "patients of its own kind": []}
    for epsilon in EPSILONS:
        runs = []
        for seed in range(3):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 2))
            run = dpps.Run(
                dpps.PartPSP(model, shared=["0"], lr_shared=0.5, lr_local=0.5, batch_size=20),
                train,
                topology=dpps.Exponential(HOSPITALS),
                privacy=dpps.Record(epsilon=epsilon, delta=1e-3),
                test=everybody,
                held_out=own,
                seed=seed,
            )
            runs.append(run.fit(epochs=10))
        lines["all kinds of patients"].append(fmean(run.accuracy or 0 for run in runs))
        lines["patients of its own kind"].append(fmean(run.own_accuracy or 0 for run in runs))
        print(
            f"epsilon {epsilon:>4}: {lines['all kinds of patients'][-1]:.1f} % / {lines['patients of its own kind'][-1]:.1f} % on its own kind"
        )
    figure, axis = plt.subplots(figsize=(6, 4))
    for name, values in lines.items():
        axis.semilogx(EPSILONS, values, marker="o", label=name)
    axis.set(xlabel="total epsilon per patient (delta 1e-3)", ylabel="accuracy %", ylim=(40, 100))
    axis.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
    axis.minorticks_off()
    axis.legend()
    figure.savefig("hospitals.png", dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main()
