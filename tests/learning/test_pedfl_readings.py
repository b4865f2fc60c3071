"""The readings of PEDFL in scripts/accuracy.py: a reading that is called synchronised is."""

import pytest
import torch
from torch.utils.data import TensorDataset

import dpps
from tests.support.scripts import load_script


@pytest.mark.parametrize("kind", ["Synchronised", "OwnRow"])
def test_the_nodes_of_a_synchronised_reading_agree_every_third_round(kind: str) -> None:
    script = load_script("accuracy")
    data = [TensorDataset(torch.randn(12, 6), torch.randint(0, 3, (12,))) for _ in range(4)]
    algorithm = getattr(script, kind)(dpps.models.MLP((6, 4, 3)), "all", lr_shared=0.1, batch_size=2)
    run = dpps.Run(algorithm, data, topology=dpps.Ring(4), seed=0, sync_every=3)
    agree = []
    for _ in run.rounds(epochs=1):
        rows = run.state.shared.y
        agree.append(bool((rows - rows.mean(0)).abs().max() < 1e-5))
    assert agree[1:] == [False, True, False, False, True]  # in the first round nobody has anything to add
