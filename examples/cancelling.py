"""Noise that cancels: the same promise with independent noise and with partners, and what more colluders would learn.

Run it: python examples/cancelling.py
"""

import torch
from torch.utils.data import TensorDataset

import dpps

torch.manual_seed(0)
nodes, classes = 8, 4
centres = 2 * torch.randn(classes, 20)


def examples(count: int) -> TensorDataset:
    """Noisy points around the centres of their classes."""
    labels = torch.randint(0, classes, (count,))
    return TensorDataset(centres[labels] + 2 * torch.randn(count, 20), labels)


data, test = [examples(100) for _ in range(nodes)], examples(2_000)
for trust in (dpps.Nobody(), dpps.Pairs(colluders=2)):
    algorithm = dpps.PartPSP(dpps.models.MLP((20, 4)), shared="all", lr_shared=2.0, batch_size=25)
    run = dpps.Run(
        algorithm,
        data,
        topology=dpps.Exponential(nodes),
        privacy=dpps.Record(epsilon=0.5, trust=trust),
        test=test,
        seed=1,
    ).fit(epochs=5)
    print(f"trust {trust.name}: {run.accuracy:.1f} %, epsilon {run.privacy.epsilon:.2f} (simulated)")

partners = dpps.Pairs(colluders=2).partners(nodes)
print(f"noise in the mean: {partners.shares().independent:.2f} times that without partners (deviation)")
print("what a round's noise is worth, over what was promised:")
for colluders in range(nodes):
    print(f"  {colluders} colluders: {partners.loss(colluders):.2f}")
