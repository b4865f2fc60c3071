"""The end of a run: asked for in its last round, cut off before the results are written, and a disk that is full."""

import errno
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest

import dpps
from dpps.errors import RunError, UsageError
from dpps.privacy import LedgerFile
from dpps.runs import Run, RunFolder
from tests.support.learning import tiny, toy_data

FULL = OSError(errno.ENOSPC, "No space left on device")


def make(folder: Path | None, opened: bool = False, **options) -> Run:
    algorithm = dpps.PartPSP(tiny(), ["layer1"], batch_size=10, lr_step=options.pop("lr_step", 0))
    defaults = {
        "topology": dpps.Ring(3),
        "privacy": dpps.Record(noise_multiplier=2.0),
        "seed": 0,
        "secure_noise": True,
    }
    made = dpps.Run.open if opened else dpps.Run
    return made(folder=folder, algorithm=algorithm, data=toy_data(3), **defaults | options)


def test_a_request_to_stop_in_the_last_round_comes_too_late(tmp_path):
    """There is nothing to go on with later, so the results are written."""
    run = make(tmp_path / "run", callbacks=[lambda run, log: run.stop() if log.round == 7 else None])
    run.fit(epochs=2)
    assert not run.stopped
    assert RunFolder(tmp_path / "run").read_summary()["rounds"] == 8
    assert len(RunFolder(tmp_path / "run").model_files()) == 3


def test_a_run_that_is_cut_off_before_its_results_are_written_sends_nothing_again(tmp_path):
    """All rounds are paid for, and no more could be: without its state the models would be lost for good."""
    folder, unit = RunFolder(tmp_path / "run"), dpps.Record(epsilon=2.0)
    with mock.patch.object(Run, "_write_results", side_effect=KeyboardInterrupt), suppress(KeyboardInterrupt):
        make(folder.path, privacy=unit).fit(epochs=2)
    assert not folder.summary.exists()
    again = make(folder.path, opened=True, privacy=unit).fit(epochs=2)
    assert LedgerFile.read(folder.ledger).messages == 8
    assert folder.read_summary()["privacy"]["epsilon"] == again.privacy.epsilon <= 2.0
    assert len(folder.model_files()) == 3
    with pytest.raises(UsageError, match="8 of 8"):
        make(folder.path, opened=True, privacy=unit).fit(epochs=2)


def test_a_simulation_can_be_repeated_and_keeps_no_state(tmp_path):
    make(tmp_path / "run", secure_noise=False).fit(epochs=1)
    assert not (tmp_path / "run" / "checkpoint").exists()


@pytest.mark.parametrize("name", ["node-0.safetensors", "summary.json"])
def test_a_full_disk_is_one_line_and_the_run_can_go_on(tmp_path, name):
    replace = Path.replace

    def full(aside: Path, target: Path) -> Path:
        if target.name == name:
            raise FULL
        return replace(aside, target)

    with (
        mock.patch.object(Path, "replace", full),
        pytest.raises(RunError, match=rf"{name}.*{FULL.strerror}"),
    ):
        make(tmp_path / "run").fit(epochs=2)
    again = make(tmp_path / "run", opened=True).fit(epochs=2)
    assert again.ledger.messages == 8
    assert RunFolder(tmp_path / "run").read_summary()["rounds"] == 8


def test_a_log_that_cannot_be_written_is_named(tmp_path):
    run = make(tmp_path / "run").start(epochs=2)
    run._csv = mock.Mock(write=mock.Mock(side_effect=FULL))
    with pytest.raises(RunError, match=rf"rounds\.csv.*{FULL.strerror}"):
        run.step()
    run.close()


def test_the_log_alone_does_not_keep_the_ledger_open(tmp_path):
    """What cannot be written at the very end is told, and the ledger is closed all the same."""
    run = make(tmp_path / "run").start(epochs=1)
    run.step()
    run._files.callback(mock.Mock(side_effect=RunError("rounds.csv cannot be written")))
    run.close()
    LedgerFile.open(run.folder.ledger, run.ledger.header, durable=True).close()


def test_a_failed_first_round_of_an_epoch_leaves_rates_and_counts_as_they_were():
    run, whole = (make(None, secure_noise=False, lr_step=2).start(epochs=2) for _ in range(2))
    for _ in range(4):
        run.step()
        whole.step()
    before = (run.state.shared.clock, run.state.shared.rate)
    with mock.patch.object(run.protocol, "step", side_effect=RunError("lost")), pytest.raises(RunError):
        run.step()
    assert (run.state.shared.clock, run.state.shared.rate) == before == (4, 1.0)
    assert run.step() == whole.step()
    assert (run.state.shared.clock, run.state.shared.rate) == (1, 0.1)
    assert run.clipped == whole.clipped
    assert run._clipped == whole._clipped
