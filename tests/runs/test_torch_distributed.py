"""What a distributed run has spent is never forgotten: lost, older and restored ledgers, lost checkpoints, two writers, file modes."""

import os
import shutil
import signal
import stat
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpps
from dpps.errors import UsageError
from dpps.transport import Cluster, Rendezvous
from tests.support.processes import Trainers, free_port

OPTIONS = [
    *("--nodes", "4", "--batch-size", "100", "--seed", "3", "--quiet", "--epochs", "2", "--seeded-noise"),
    *("--unit", "contribution", "--epsilon", "50", "--timeout", "120"),
]


def _stopped(out: Path, rounds: int, *more: str) -> None:
    trainers = Trainers(2, out, *OPTIONS, *more, hold_before=rounds + 8)
    trainers.until(rounds)
    os.kill(trainers.all[1].pid or 0, signal.SIGTERM)
    trainers.let_go()
    assert trainers.wait() == [3, 3], trainers.said()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run stopped early, and the same run stopped again later."""
    folder = tmp_path_factory.mktemp("runs")
    _stopped(folder / "run", 6)
    shutil.copytree(folder / "run", folder / "early")
    _stopped(folder / "run", 20, "--resume")
    return folder / "early", folder / "run"


@pytest.fixture
def out(runs: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the run that was stopped later."""
    shutil.copytree(runs[1], tmp_path / "run")
    return tmp_path / "run"


def _files(out: Path) -> dict[Path, bytes]:
    """All but the witnesses, which say the same again whenever a ledger is closed."""
    return {
        path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.suffix != ".witness"
    }


def _refused(out: Path, named: str) -> None:
    before = _files(out)
    again = Trainers(2, out, *OPTIONS, "--resume")
    assert again.wait() == [1, 1], again.said()
    assert any(named in said for said in again.said()), again.said()
    assert _files(out) == before, "nothing was deleted or changed"


@pytest.mark.parametrize("with_checkpoints", [True, False])
def test_a_lost_ledger_is_refused(out: Path, with_checkpoints: bool) -> None:
    for rank in range(2):
        if not with_checkpoints:
            shutil.rmtree(out / f"rank-{rank}" / "checkpoint")
    (out / "rank-1" / "ledger.jsonl").unlink()
    _refused(out, "rank 1 ")


def test_an_older_copy_is_refused_without_a_checkpoint(out: Path) -> None:
    for rank in range(2):
        shutil.rmtree(out / f"rank-{rank}" / "checkpoint")
    ledger = out / "rank-1" / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:5]))
    _refused(out, "rank-1/ledger.jsonl")


def test_a_restored_backup_of_one_process_is_refused(runs: tuple[Path, Path], out: Path) -> None:
    """Ledger, witness and checkpoints of rank 1 from one earlier moment: only rank 0 knows better."""
    shutil.rmtree(out / "rank-1")
    shutil.copytree(runs[0] / "rank-1", out / "rank-1")
    _refused(out, "rank 0 ")


def test_a_checkpoint_folder_lost_at_one_process_deletes_nobodys(out: Path) -> None:
    """To begin again would cost more than what is left of the budget: refused, and rank 0 keeps its checkpoint."""
    shutil.rmtree(out / "rank-1" / "checkpoint")
    _refused(out, "--spare-rounds")
    assert any((out / "rank-0" / "checkpoint").iterdir())


def test_a_finished_run_is_not_run_again(out: Path) -> None:
    """Not even where its noise was given and no budget stands against it; results that one process lacks are made up for."""
    trainers = Trainers(2, out, *OPTIONS, "--resume")
    assert trainers.wait() == [0, 0], trainers.said()
    before = _files(out)
    again = Trainers(2, out, *OPTIONS, "--resume")
    assert again.wait() == [2, 2], again.said()
    assert all("50 of 50 rounds" in said for said in again.said())
    assert _files(out) == before
    (out / "rank-1" / "summary.json").unlink()
    again = Trainers(2, out, *OPTIONS, "--resume")
    assert again.wait() == [0, 0], again.said()
    assert (out / "rank-1" / "summary.json").exists()
    assert [again.charged(rank) for rank in range(2)] == [50, 50], "nothing was sent again"


def test_a_second_writer_is_refused(out: Path) -> None:
    first = Trainers(2, out, *OPTIONS, "--resume", hold_before=48)
    first.until(first.charged() + 2)
    for process in first.all:
        os.kill(process.pid or 0, signal.SIGSTOP)
    charged = [first.charged(rank) for rank in range(2)]
    try:
        second = Trainers(2, out, *OPTIONS, "--resume")
        assert second.wait() == [1, 1], second.said()
        assert any("ledger.jsonl" in said for said in second.said()), second.said()
        assert [first.charged(rank) for rank in range(2)] == charged
    finally:
        for process in first.all:
            process.kill()


def test_files_are_the_owners_alone(runs: tuple[Path, Path]) -> None:
    found = {path: stat.S_IMODE(path.stat().st_mode) for path in runs[1].rglob("*")}
    assert {mode for path, mode in found.items() if path.is_file()} == {0o600}
    assert {mode for path, mode in found.items() if path.is_dir()} == {0o700}


def _with_partners(folder: Path, secret: bytes, *, resumed: bool = False) -> dpps.Run:
    """Three partners in a run of one process."""
    torch.manual_seed(0)
    cluster = Cluster(Rendezvous(0, 1, "127.0.0.1", free_port()), 60, secret).join()
    data = [TensorDataset(torch.randn(20, 4), torch.randint(0, 2, (20,))) for _ in range(3)]
    run = (dpps.Run.open if resumed else dpps.Run)(
        folder=folder,
        algorithm=dpps.PartPSP(nn.Linear(4, 2), "all", batch_size=5),
        data=data,
        topology=dpps.Ring(3),
        privacy=dpps.Record(noise_multiplier=5.0, trust=dpps.Pairs(0)),
        deployment=dpps.TorchDistributed(cluster),
    )
    return run.start(epochs=2)


def test_partners_need_a_secret_and_keep_their_keys(tmp_path: Path) -> None:
    """Without a secret nobody knows whose keys are whose; and other keys at a resume could be anybody's."""
    with pytest.raises(UsageError, match=r"--trust pairs.*\$DPPS_SECRET"):
        _with_partners(tmp_path / "run", b"")
    secret = b"a secret of this test, long enough 1234"
    run = _with_partners(tmp_path / "run", secret)
    run.step()
    run.finish()
    key = run.folder.identity
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    key.rename(tmp_path / "kept")
    with pytest.raises(UsageError, match="its public_keys is"):
        _with_partners(tmp_path / "run", secret, resumed=True)
    key.unlink()
    (tmp_path / "kept").rename(key)
    with _with_partners(tmp_path / "run", secret, resumed=True) as again:
        assert again.state.round == 1
