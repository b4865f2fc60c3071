"""A run that ends before its last round: what is left on disk, whoever ended it, and how it goes on."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dpps
from dpps.errors import RunError, UsageError
from dpps.privacy import LedgerFile
from dpps.runs import Options, Run, RunFolder, TensorBoard, data_ledger, whole_rounds
from tests.support.learning import tiny, toy_data

UNIT = dpps.Record(noise_multiplier=2.0)


class OwnError(Exception):
    """Of somebody's program."""


def make(folder: Path | None = None, *, opened: bool = False, **options: Any) -> Run:
    algorithm = dpps.PartPSP(tiny(), ["layer1"], batch_size=10)
    options = {"topology": "ring", "privacy": UNIT, "seed": 0} | options
    if opened:
        assert folder is not None
        return dpps.Run.open(folder, algorithm, toy_data(3), **options)
    return dpps.Run(algorithm, toy_data(3), folder=folder, **options)


def _break(run: Run) -> None:
    for log in run.rounds(epochs=2):
        if log.round == 4:
            break


def _raise(run: Run) -> None:
    with pytest.raises(OwnError):
        _loop_with_a_mistake(run)


def _raise_within(run: Run) -> None:
    with pytest.raises(OwnError) as kept, run:
        _loop_with_a_mistake(run)
    assert kept.value.__traceback__ is not None  # the loop is still referred to
    assert run.folder is not None
    assert whole_rounds(run.folder.checkpoints) == [5]


def _loop_with_a_mistake(run: Run) -> None:
    for log in run.rounds(epochs=2):
        if log.round == 4:
            raise OwnError


@pytest.mark.parametrize("leave", [_break, _raise, _raise_within])
def test_a_loop_that_is_left_early_stops_the_run_and_can_go_on(leave, tmp_path):
    """An exception in the loop is not taken for a chosen end: no summary, no models."""
    folder = RunFolder(tmp_path / "run")
    leave(make(folder.path))
    assert whole_rounds(folder.checkpoints) == [5]
    assert not folder.summary.exists()
    assert not folder.model_files()
    again = make(folder.path, opened=True).fit(epochs=2)
    assert LedgerFile.read(folder.ledger).messages == 8
    assert folder.read_summary()["rounds"] == 8
    whole = make().fit(epochs=2)
    assert again.shared.equal(whole.shared)


def test_results_of_a_stopped_run_are_written_when_asked_for(tmp_path):
    folder = RunFolder(tmp_path / "run")
    run = make(folder.path)
    _break(run)
    assert run.stopped
    run.finish()
    assert folder.read_summary()["rounds"] == 5
    assert len(folder.model_files()) == 3
    assert make(folder.path, opened=True).fit(epochs=2).state.round == 8


def test_a_loop_that_is_left_after_the_last_round_is_finished(tmp_path):
    run = make(tmp_path / "run")
    for log in run.rounds(epochs=2):
        if log.round == 7:
            break
    assert not run.stopped
    assert RunFolder(tmp_path / "run").read_summary()["rounds"] == 8


def test_a_run_in_memory_goes_on_after_a_loop_that_was_left():
    run = make()
    _break(run)
    assert run.fit().state.round == 8
    assert not run.stopped


class Closed:
    """A callback that holds something."""

    def __init__(self, at: int, end: str) -> None:
        self.at, self.end, self.closed = at, end, 0

    def __call__(self, run: Run, log: Any) -> bool:
        if log.round == self.at and self.end == "raise":
            raise OwnError
        if log.round == self.at and self.end == "stop":
            run.stop()
        return log.round == self.at and self.end == "enough"

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("end", ["raise", "stop", "enough", "last"])
def test_callbacks_are_closed_however_a_run_ends(end, tmp_path):
    callback = Closed(3, end)
    run = make(tmp_path / "run", callbacks=[callback])
    if end == "raise":
        with pytest.raises(OwnError):
            run.fit(epochs=2)
    else:
        run.fit(epochs=2)
    assert callback.closed == 1


def test_the_last_event_of_tensorboard_is_on_disk_when_a_run_is_stopped(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    before = set(threading.enumerate())
    board = TensorBoard(tmp_path / "events")
    run = make(callbacks=[board, Closed(3, "stop")])
    run.fit(epochs=2)
    assert run.state.round == 4
    assert set(threading.enumerate()) <= before, "the thread that writes has ended"
    (file,) = (tmp_path / "events").iterdir()
    events = event_accumulator.EventAccumulator(str(file)).Reload()
    assert [event.step for event in events.Scalars("loss")] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "name", ["state", "nodes", "plan", "shared", "local", "privacy", "ledger", "accuracy"]
)
def test_a_run_that_has_not_started_has_no_state_and_says_so(name):
    run = make()
    assert not hasattr(run, name)
    with pytest.raises(UsageError, match="start"):
        getattr(run, name)
    assert hasattr(run.start(1), name)
    assert not hasattr(run, "colour")


@pytest.mark.parametrize("epochs", [np.int64(2), np.int32(2), 2])
def test_whole_numbers_of_any_kind_are_numbers_of_epochs(epochs, tmp_path):
    run = make(tmp_path / "run").fit(epochs=epochs)
    assert run.state.round == 8
    assert type(run.epochs) is int


@pytest.mark.parametrize("epochs", [2.0, "2", True, 0, -1])
def test_what_is_no_number_of_epochs_is_refused(epochs):
    with pytest.raises(UsageError, match=f"epochs is {epochs!r}"):
        make().fit(epochs=epochs)


# The number of epochs is the run's own


@pytest.mark.parametrize("unit", ["none", "record"])
def test_a_run_of_the_command_line_goes_on_for_the_epochs_it_was_started_for(unit, tmp_path):
    options = {"nodes": 4, "epochs": 3, "batch_size": 500, "quiet": True, "unit": unit}
    run = Run.from_options(Options(out=tmp_path / "run", **options))
    for log in run.rounds(3):
        if log.round == 6:
            break
    again = Run.open(tmp_path / "run").fit()
    assert (again.epochs, again.state.round) == (3, 15)
    assert RunFolder(tmp_path / "run").read_summary()["rounds"] == 15


def test_a_run_made_by_options_has_their_epochs(tmp_path):
    config = Options(out=tmp_path / "run", nodes=4, epochs=2, batch_size=1000, unit="none", quiet=True)
    assert Run.from_options(config).fit().epochs == 2


@pytest.mark.parametrize("unit", [None, UNIT])
def test_a_run_made_in_python_goes_on_for_the_epochs_it_was_started_for(unit, tmp_path):
    _break(make(tmp_path / "run", privacy=unit))
    again = make(tmp_path / "run", opened=True, privacy=unit).fit()
    assert (again.epochs, again.state.round) == (2, 8)


# Notes of what a data set has spent


def test_notes_of_another_version_are_read_as_far_as_they_can_be(tmp_path, monkeypatch):
    """A field more is no damage; a line whose version is not known may mean more than is counted."""
    monkeypatch.setenv(data_ledger.STATE, str(tmp_path))
    note = {
        "data": str(tmp_path),
        "checksum": "c",
        "ledger": "l",
        "first_seal": "s",
        "node": 0,
        "unit": "record",
    }
    note |= {"delta": 1e-5, "records_per_user": 1, "promised": 1.0, "distance": 0.0, "started": "now"}
    file = tmp_path / data_ledger._FILE

    def write(**more: Any) -> None:
        file.write_text(json.dumps(note | more) + "\n")

    for more in ({}, {"version": 1}, {"version": 1, "colour": "red"}):
        write(**more)
        assert [found.promised for found in data_ledger._notes()] == [1.0]
    write(version=2)
    with pytest.raises(RunError, match="version 2"):
        list(data_ledger._notes())
    for damaged in ("[1]", "{}", "{"):
        file.write_text(damaged + "\n")
        with pytest.raises(RunError, match="line 1"):
            list(data_ledger._notes())
