"""Your own model and data: five hospitals of different size, a shared trunk and a local head, every patient protected.

The data is scikit-learn's breast cancer set (`pip install dpps[examples]`).

    python examples/own_model.py
"""

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import TensorDataset

import dpps

SIZES = (160, 120, 80, 60, 49)  # patients per hospital; the remaining 100 are for testing


def hospitals() -> tuple[list[TensorDataset], TensorDataset]:
    """Five private data sets and a test set, standardised by the test set: statistics of private data would leak."""
    data = load_breast_cancer()
    x, y = torch.tensor(data.data, dtype=torch.float32), torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    public = x[order[sum(SIZES) :]]
    x, y = ((x - public.mean(0)) / public.std(0))[order], y[order]
    parts = torch.split(torch.arange(len(x)), [*SIZES, len(x) - sum(SIZES)])
    sets = [TensorDataset(x[p], y[p]) for p in parts]
    return sets[:-1], sets[-1]


def main() -> None:
    """Train three times: without noise, and privately with a total epsilon of 8 and 3."""
    nodes, test = hospitals()
    for unit in (None, dpps.Record(epsilon=8, delta=1e-4), dpps.Record(epsilon=3, delta=1e-4)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 2))
        # the trunk is shared; the head "2" never leaves its hospital
        algorithm = dpps.PartPSP(model, shared=["0"], lr_shared=0.5, lr_local=0.5, batch_size=24)
        network = dpps.Exponential(len(SIZES))
        run = dpps.Run(algorithm, nodes, topology=network, privacy=unit, test=test, seed=0).fit(epochs=10)
        cost = "no privacy" if unit is None else f"epsilon {run.privacy.epsilon:.2f} per patient (simulated)"
        print(
            f"{cost:>38}: {run.accuracy:.1f} % of 100 unseen patients, worst hospital {min(run.accuracy_by_node):.1f} %"
        )


if __name__ == "__main__":
    main()
