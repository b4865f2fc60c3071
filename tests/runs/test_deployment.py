"""All nodes here: seeded noise unless asked for, and a run that cannot be paid to its end is not taken up."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpps.errors import RunError, UsageError
from dpps.learning import PartPSP
from dpps.noise import SecureNoise, Seeded
from dpps.privacy import Record
from dpps.runs import TRACKED, Run, RunFolder, Simulation
from dpps.sensitivity import Oracle, Sensitivity
from dpps.topology import Ring
from dpps.transport import Stacked


def test_a_simulation_is_seeded_and_in_one_tensor_unless_told_otherwise() -> None:
    where = Simulation()
    assert isinstance(where.noise(False, 7), Seeded)
    assert isinstance(where.noise(True, 7), SecureNoise)
    assert isinstance(where.connect(SimpleNamespace(topology=Ring(3))), Stacked)
    assert where.rows(3) == range(3)
    assert Simulation(Stacked(2)).rows(5) == range(2)
    assert where.decide_resume(None, True, False) == (True, False)
    assert (where.processes, where.durable, where.header()) == (1, False, {})


def _resumed(folder: Path, *, affords: bool, rounds: int = 0) -> SimpleNamespace:
    place = RunFolder(folder)
    if rounds:
        place.write_summary({"rounds": rounds})
    return SimpleNamespace(
        resumed=True,
        folder=place,
        plan=SimpleNamespace(count=8),
        restore=lambda: 3,
        affords_rest=lambda found: affords,
    )


def test_a_resumed_run_must_be_unfinished_and_paid_for(tmp_path: Path) -> None:
    Simulation().resume(SimpleNamespace(resumed=False))
    Simulation().resume(_resumed(tmp_path, affords=True))
    with pytest.raises(RunError, match=r"round 3 .* 5 rounds .*--spare-rounds"):
        Simulation().resume(_resumed(tmp_path, affords=False))
    with pytest.raises(UsageError, match="8 of 8"):
        Simulation().resume(_resumed(tmp_path, affords=True, rounds=8))


@pytest.mark.parametrize(("track", "watch"), [(True, {}), (False, {"real": Oracle()}), (False, {})])
def test_the_statement_names_sensitivities_that_were_computed_of_rows_without_noise(
    track: bool, watch: dict[str, Sensitivity]
) -> None:
    data = [TensorDataset(torch.randn(20, 4), torch.randint(0, 2, (20,))) for _ in range(3)]
    run = Run(
        PartPSP(nn.Linear(4, 2), "all", batch_size=5),
        data,
        topology=Ring(3),
        privacy=Record(noise_multiplier=2.0),
        track_real=track,
        watch=watch,
    ).fit(epochs=1)
    assert (TRACKED in run.privacy.statement) == bool(track or watch)
