"""SGPDP is PartPSP with everything shared, noise included."""

import torch
from torch import nn

import dpps
from dpps.learning import SGPDP

DATA = [(torch.randn(8, 3), torch.randint(0, 2, (8,))) for _ in range(3)]


def shared(kind: type[dpps.PartPSP], model: nn.Module, privacy: dpps.Record | None) -> torch.Tensor:
    algorithm = kind(model, "all", batch_size=4)
    return dpps.Run(algorithm, DATA, topology=dpps.Ring(3), privacy=privacy, seed=0).fit(1).shared


def test_it_is_partpsp_with_everything_shared_and_the_same_noise() -> None:
    assert SGPDP.shares("1") == "all"
    model, unit = nn.Linear(3, 2), dpps.Record(noise_multiplier=1.0)
    noisy = shared(SGPDP, model, unit)
    assert torch.equal(noisy, shared(dpps.PartPSP, model, unit))
    assert not torch.allclose(noisy, shared(SGPDP, model, None))
