"""A loop that is left early: by the only process, and by one of several."""

from pathlib import Path

import pytest
import torch

import dpps
from dpps.errors import DppsError
from dpps.privacy import LedgerFile
from dpps.runs import whole_rounds
from dpps.transport import Cluster
from tests.support import processes
from tests.support.learning import tiny, toy_data

UNIT = dpps.Record(noise_multiplier=2.0)


def test_whoever_leaves_the_loop_chose_the_end() -> None:
    run = dpps.Run(
        dpps.PartPSP(tiny(), ["layer1"], batch_size=10), toy_data(3), topology="ring", privacy=UNIT, seed=0
    )
    for log in run.rounds(epochs=2):
        if log.loss < 99:
            break
    whole = dpps.Run(
        dpps.PartPSP(tiny(), ["layer1"], batch_size=10), toy_data(3), topology="ring", privacy=UNIT, seed=0
    )
    for log in whole.rounds(epochs=2):
        if log.round == 7:
            break
    assert whole.privacy.epsilon == whole.privacy.epsilon_spent, "that was the last one anyway"
    assert run.privacy.epsilon == pytest.approx(whole.privacy.epsilon)
    assert run.privacy.epsilon_spent < whole.privacy.epsilon_spent


def _one_leaves(cluster: Cluster, out: Path, at: int) -> tuple[int, bool, list[float], float]:
    torch.manual_seed(0)
    algorithm = dpps.PartPSP(tiny(), ["layer1"], batch_size=10)
    deployment = dpps.TorchDistributed(cluster.join())
    options = {"topology": dpps.Ring(3), "privacy": UNIT, "deployment": deployment}
    data = [toy_data(3)[cluster.rank]]
    run = dpps.Run(algorithm, data, folder=out, **options)
    try:
        for log in run.rounds(epochs=4):
            if cluster.rank == 1 and log.round == at:
                break
    except DppsError as error:
        cluster.give_up(error)
        raise
    weights = run.models()[0].layer1.weight.flatten().tolist()  # all processes average once more
    return run.state.round, run.stopped, weights, run.privacy.epsilon


@pytest.mark.parametrize(("at", "end"), [(4, None), (15, 16)])
def test_all_processes_end_after_the_same_round(tmp_path: Path, at: int, end: int | None) -> None:
    found = processes.run(3, _one_leaves, tmp_path / "run", at)
    rounds, stopped, weights, epsilon = found[0]
    assert all(other == (rounds, stopped, weights, epsilon) for other in found)
    assert at < rounds <= (end or 15)
    assert stopped == (end is None)
    for rank in range(3):
        folder = tmp_path / "run" / f"rank-{rank}"
        assert whole_rounds(folder / "checkpoint") == [rounds]
        assert LedgerFile.read(folder / "ledger.jsonl").messages == rounds
