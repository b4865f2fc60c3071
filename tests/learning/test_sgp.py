"""SGP and SGPDP are PartPSP with everything shared; SGP has no noise."""

import pytest
import torch
from torch import nn

import dpps
from dpps.errors import UsageError
from dpps.learning import SGP, SGPDP

DATA = [(torch.randn(8, 3), torch.randint(0, 2, (8,))) for _ in range(3)]


def _shared(algorithm, **options) -> torch.Tensor:
    run = dpps.Run(algorithm, DATA, topology=dpps.Ring(3), seed=0, **options).fit(1)
    return run.shared


def test_without_noise_all_three_are_the_same() -> None:
    found = []
    for kind in (dpps.PartPSP, SGP, SGPDP):
        torch.manual_seed(0)
        found.append(_shared(kind(nn.Linear(3, 2), "all", batch_size=4)))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_sgp_refuses_a_unit() -> None:
    assert SGP.shares("1") == "all"
    with pytest.raises(UsageError):
        _shared(SGP(nn.Linear(3, 2), "all", batch_size=4), privacy=dpps.Record(noise_multiplier=1.0))
