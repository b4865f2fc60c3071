"""What a run refuses when it starts, before anything is written."""

from pathlib import Path

import pytest
import torch
from torch import nn

import dpps
from dpps.errors import UsageError
from dpps.privacy import LedgerFile

DATA = [(torch.randn(8, 3), torch.randint(0, 2, (8,))) for _ in range(3)]


def _run(data=DATA, **options) -> dpps.Run:
    rates = {"lr_shared": options.pop("lr_shared", 0.1)}
    return dpps.Run(
        dpps.PartPSP(nn.Linear(3, 2), batch_size=4, **rates), data, topology=dpps.Ring(3), **options
    )


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda: _run(DATA[:2]), "2 data sets.*3 nodes"),
        (lambda: _run([*DATA[:2], (torch.empty(0, 3), torch.empty(0))]), "node 2 "),
        (lambda: _run(privacy=dpps.Record(epsilon=3), lr_shared=0.0), "lr_shared.*0"),
    ],
)
def test_a_request_that_cannot_work_leaves_no_folder(tmp_path: Path, run, said: str) -> None:
    made = run()
    made.folder = made.deployment.folder(tmp_path / "run")
    with pytest.raises(UsageError, match=said):
        made.start(1)
    assert not (tmp_path / "run").exists()


def test_a_ledger_is_written_where_there_is_a_folder_and_a_promise(tmp_path: Path) -> None:
    unit = dpps.Record(noise_multiplier=2.0)
    with _run(privacy=unit, folder=tmp_path / "private").start(1) as run:
        assert isinstance(run.ledger, LedgerFile)
        header = LedgerFile.read_header(tmp_path / "private" / "ledger.jsonl")
        assert header["contract"]["noise"] == 2.0
    with _run(privacy=unit).start(1) as run:
        assert not isinstance(run.ledger, LedgerFile)
    with _run(folder=tmp_path / "plain").start(1) as run:
        assert not isinstance(run.ledger, LedgerFile)


def test_where_messages_really_leave_nobody_brings_noise_of_another_kind() -> None:
    """With noise from a seed, say, nothing would be private, and the statement would call it a simulation."""

    class Away(dpps.Simulation):
        durable = True

    with pytest.raises(UsageError, match=r"noise.*Seeded.*deployment=Simulation\(\)"):
        _run(privacy=dpps.Record(epsilon=3), noise=dpps.Seeded(1), deployment=Away())
    assert isinstance(_run(noise=dpps.Seeded(1))._noise, dpps.Seeded)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, True),
        ({"spare_rounds": 3}, False),
        ({"secure_noise": False}, False),  # a simulation: nothing that was sent has to be paid for
        ({"privacy": dpps.Record(noise_multiplier=2.0)}, False),  # no target to keep within
    ],
)
def test_a_run_that_a_crash_would_end_for_good_is_told_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict, told: bool
) -> None:
    given = {"privacy": dpps.Record(epsilon=3), "secure_noise": True} | options
    with _run(folder=tmp_path / "run", **given).start(1):
        assert ("--spare-rounds" in caplog.text) == told
