"""How a run ends: as planned, early, stopped, left."""

import errno
import json
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import dpps
from dpps.errors import DppsError, RunError, UsageError
from dpps.privacy import Charge, LedgerFile, total
from dpps.report import read_folder
from dpps.runs import Options, Run, RunFolder, Saved, TensorBoard, data_ledger, whole_rounds
from dpps.transport import Cluster
from tests.support import processes
from tests.support.learning import tiny, toy_data
from tests.support.runs import left, make

# A run that ends before its last planned round guarantees what was promised; what it has spent so far is no guarantee


EPSILON, DELTA = 2.0, 1e-5
UNITS = [
    dpps.Record(epsilon=EPSILON, delta=DELTA),
    dpps.Contribution(clip=1.0, epsilon=EPSILON, mechanism="gaussian"),
]


def by_callback(folder: Path | None, unit: Any) -> dpps.Run:
    return make(folder, unit, callbacks=[lambda run, log: log.round == 2]).fit(epochs=2)


def by_stop(folder: Path | None, unit: Any) -> dpps.Run:
    def callback(run: dpps.Run, log: Any) -> None:
        if log.round == 2:
            run.stop()

    return make(folder, unit, callbacks=[callback]).fit(epochs=2)


def by_leaving(folder: Path | None, unit: Any) -> dpps.Run:
    return left(make(folder, unit), 2)


def by_failing(error: type[BaseException]) -> Callable[[Path | None, Any], dpps.Run]:
    def end(folder: Path | None, unit: Any) -> dpps.Run:
        def callback(run: dpps.Run, log: Any) -> None:
            if log.round == 2:
                raise error

        run = make(folder, unit, callbacks=[callback])
        with pytest.raises(error):
            run.fit(epochs=2)
        return run

    return end


def by_steps(folder: Path | None, unit: Any) -> dpps.Run:
    run = make(folder, unit).start(epochs=2)
    for _ in range(3):
        run.step()
    return run


ENDS = [by_callback, by_stop, by_leaving, by_failing(KeyboardInterrupt), by_failing(ValueError), by_steps]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
@pytest.mark.parametrize("end", ENDS)
def test_the_guarantee_is_what_was_promised(end: Callable[..., dpps.Run], unit: Any) -> None:
    privacy = end(None, unit).privacy
    assert privacy.epsilon == EPSILON
    assert privacy.epsilon_spent is not None
    assert 0 < privacy.epsilon_spent < 0.9 * EPSILON
    assert privacy.to_json()["epsilon_spent"] == privacy.epsilon_spent
    assert "epsilon 2," in privacy.statement


@pytest.mark.parametrize("end", [by_callback, by_leaving])
def test_so_say_summary_and_models(end: Callable[..., dpps.Run], tmp_path: Path) -> None:
    run = end(tmp_path / "run", UNITS[0])
    if end is by_leaving:
        run.finish()  # a loop that is left stops the run; its results are written on request
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["rounds"] == 3
    assert summary["privacy"]["epsilon"] == EPSILON
    assert summary["privacy"]["epsilon_spent"] == run.privacy.epsilon_spent
    saved = Saved.read(tmp_path / "run" / "models" / "node-0.safetensors")
    assert saved.facts["privacy"]["epsilon"] == EPSILON


def test_a_run_that_went_to_its_end_guarantees_what_it_spent() -> None:
    run = make(unit=UNITS[0]).fit(epochs=2)
    assert run.privacy.epsilon == run.privacy.epsilon_spent
    assert 0.99 * EPSILON < run.privacy.epsilon <= EPSILON * (1 + 1e-9)


def test_a_run_that_goes_on_to_its_end_does_too(tmp_path: Path) -> None:
    by_leaving(tmp_path / "run", UNITS[0])
    again = make(tmp_path / "run", UNITS[0], opened=True).fit(epochs=2)
    assert again.privacy.epsilon == again.privacy.epsilon_spent


def test_where_the_noise_was_given_the_guarantee_is_that_of_all_planned_rounds() -> None:
    unit = dpps.Record(noise_multiplier=1.5, delta=DELTA)
    whole, ended = make(unit=unit).fit(epochs=2).privacy, by_callback(None, unit).privacy
    assert ended.epsilon == pytest.approx(whole.epsilon, rel=1e-6)
    assert ended.epsilon_spent is not None
    assert whole.epsilon is not None
    assert ended.epsilon_spent < 0.9 * whole.epsilon


def test_node_swap_promises_no_total_in_either_case() -> None:
    privacy = by_callback(None, dpps.NodeSwap(epsilon=1000.0)).privacy
    assert privacy.epsilon == privacy.epsilon_spent
    assert privacy.epsilon == pytest.approx(1000.0 * 3 / 8)


def test_nothing_sent_is_nothing_spent_and_nothing_to_guarantee() -> None:
    privacy = make(unit=UNITS[0]).start(epochs=1).privacy
    assert (privacy.epsilon, privacy.epsilon_spent) == (0.0, 0.0)


def test_a_run_killed_after_its_last_round_has_all_lines_of_its_log(tmp_path: Path) -> None:
    """As a member of a federation that was killed, and comes back when the others have finished."""
    out = tmp_path / "run"
    run = make(out, UNITS[0], secure_noise=True).fit(epochs=2)
    written = (out / "rounds.csv").read_text()
    (out / "summary.json").unlink()
    (out / "rounds.csv").write_text("")
    again = make(out, UNITS[0], opened=True, secure_noise=True).fit()
    assert len(again.log) == len(run.log)
    assert (out / "rounds.csv").read_text() == written


def test_a_report_of_an_unfinished_folder_says_the_same(tmp_path: Path) -> None:
    from dpps.cli import main

    out = tmp_path / "run"
    options = ["--nodes", "3", "--epochs", "2", "--batch-size", "500", "--quiet", "--epsilon", "2"]
    assert main(["train", *options, "--checkpoint-every", "1", "--out", str(out)]) == 0
    (out / "summary.json").unlink()
    ledger = (out / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    assert len(ledger) > 4
    for name, kept in (("ledger.jsonl", 4), ("rounds.csv", 4)):
        lines = (out / name).read_bytes().splitlines(keepends=True)
        (out / name).write_bytes(b"".join(lines[:kept]))
    (out / "ledger.jsonl.witness").unlink()
    privacy = read_folder(out, "run").summary.privacy
    assert privacy.epsilon == EPSILON
    assert privacy.epsilon_spent is not None
    assert privacy.epsilon_spent < EPSILON


def test_stopping_on_released_results_breaks_what_was_spent_and_not_what_was_promised() -> None:
    """Gaussian rounds of an honest node, and somebody who stops as soon as the messages point at the data strongly enough.

    The true delta at an epsilon that depends on the round t of the end is E[max(0, 1 - exp(epsilon_t - loss))] over runs on the data.
    """
    rounds, sigma, delta, runs = 60, 8.0, 1e-3, 200_000
    spent = np.array([total([Charge.gaussian(sigma, count=t)], delta).epsilon for t in range(1, rounds + 1)])
    random = np.random.default_rng(0)
    steps = np.cumsum(1 + sigma * random.standard_normal((runs, rounds)), axis=1)
    losses = (steps - np.arange(1, rounds + 1) / 2) / sigma**2
    suspicious = losses > spent + 0.1
    ends = np.where(suspicious.any(1), suspicious.argmax(1), rounds - 1)
    at_end = losses[np.arange(runs), ends]

    def true_delta(epsilon: np.ndarray | float) -> tuple[float, float]:
        found = np.maximum(0, -np.expm1(np.minimum(0, epsilon - at_end)))
        return float(found.mean()), 6 * float(found.std()) / math.sqrt(runs)

    broken, margin = true_delta(spent[ends])
    assert broken - margin > 1.5 * delta
    kept, margin = true_delta(spent[-1])
    assert kept - margin <= delta


# The end of a run: asked for in its last round, cut off before the results are written, and a disk that is full


FULL = OSError(errno.ENOSPC, "No space left on device")


UNIT = dpps.Record(noise_multiplier=2.0)


def test_a_request_to_stop_in_the_last_round_comes_too_late(tmp_path):
    """There is nothing to go on with later, so the results are written."""
    run = make(tmp_path / "run", UNIT, callbacks=[lambda run, log: run.stop() if log.round == 7 else None])
    run.fit(epochs=2)
    assert not run.stopped
    assert RunFolder(tmp_path / "run").read_summary()["rounds"] == 8
    assert len(RunFolder(tmp_path / "run").model_files()) == 3


def test_a_run_that_is_cut_off_before_its_results_are_written_sends_nothing_again(tmp_path):
    """All rounds are paid for, and no more could be: without its state the models would be lost for good."""
    folder, unit = RunFolder(tmp_path / "run"), dpps.Record(epsilon=2.0)
    with mock.patch.object(Run, "_write_results", side_effect=KeyboardInterrupt), suppress(KeyboardInterrupt):
        make(folder.path, unit, secure_noise=True).fit(epochs=2)
    assert not folder.summary.exists()
    again = make(folder.path, unit, opened=True, secure_noise=True).fit(epochs=2)
    assert LedgerFile.read(folder.ledger).messages == 8
    assert folder.read_summary()["privacy"]["epsilon"] == again.privacy.epsilon <= 2.0
    assert len(folder.model_files()) == 3
    with pytest.raises(UsageError, match="8 of 8"):
        make(folder.path, unit, opened=True, secure_noise=True).fit(epochs=2)


def test_a_simulation_can_be_repeated_and_keeps_no_state(tmp_path):
    make(tmp_path / "run", UNIT).fit(epochs=1)
    assert not (tmp_path / "run" / "checkpoint").exists()


@pytest.mark.parametrize("name", ["node-0.safetensors", "summary.json"])
def test_a_full_disk_is_one_line_and_the_run_can_go_on(tmp_path, name):
    replace = Path.replace

    def full(aside: Path, target: Path) -> Path:
        if target.name == name:
            raise FULL
        return replace(aside, target)

    with mock.patch.object(Path, "replace", full), pytest.raises(RunError, match=rf"{name}.*{FULL.strerror}"):
        make(tmp_path / "run", UNIT, secure_noise=True).fit(epochs=2)
    again = make(tmp_path / "run", UNIT, opened=True, secure_noise=True).fit(epochs=2)
    assert again.ledger.messages == 8
    assert RunFolder(tmp_path / "run").read_summary()["rounds"] == 8


def test_a_log_that_cannot_be_written_is_named(tmp_path):
    run = make(tmp_path / "run", UNIT).start(epochs=2)
    run._csv = mock.Mock(write=mock.Mock(side_effect=FULL))
    with pytest.raises(RunError, match=rf"rounds\.csv.*{FULL.strerror}"):
        run.step()
    run.close()


def test_rounds_of_earlier_starts_that_do_not_fit_on_the_disk_are_one_line(tmp_path):
    file = mock.Mock(flush=mock.Mock(side_effect=FULL))
    with mock.patch("builtins.open", return_value=file), pytest.raises(RunError, match=r"rounds\.csv"):
        RunFolder(tmp_path).open_log([])


def test_the_log_alone_does_not_keep_the_ledger_open(tmp_path):
    """What cannot be written at the very end is told, and the ledger is closed all the same."""
    run = make(tmp_path / "run", UNIT, secure_noise=True).start(epochs=1)
    run._csv = mock.Mock(close=mock.Mock(side_effect=FULL))
    run.close()
    LedgerFile.open(run.folder.ledger, run.ledger.header, durable=True).close()


def test_a_failed_first_round_of_an_epoch_leaves_rates_and_counts_as_they_were():
    algorithms = [dpps.PartPSP(tiny(), ["layer1"], batch_size=10, lr_step=2) for _ in range(2)]
    run, whole = (make(unit=UNIT, algorithm=each).start(epochs=2) for each in algorithms)
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


# A loop that is left early: by the only process, and by one of several


def test_whoever_leaves_the_loop_chose_the_end() -> None:
    run, whole = left(make(unit=UNIT), 0), left(make(unit=UNIT), 7)
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


# A run that ends before its last round: what is left on disk, whoever ended it, and how it goes on


class OwnError(Exception):
    """Of somebody's program."""


make_kept = partial(make, unit=UNIT)


def _break(run: Run) -> None:
    left(run, 4)


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
    leave(make_kept(folder.path))
    assert whole_rounds(folder.checkpoints) == [5]
    assert not folder.summary.exists()
    assert not folder.model_files()
    again = make_kept(folder.path, opened=True).fit(epochs=2)
    assert LedgerFile.read(folder.ledger).messages == 8
    assert folder.read_summary()["rounds"] == 8
    whole = make_kept().fit(epochs=2)
    assert again.shared.equal(whole.shared)


def test_results_of_a_stopped_run_are_written_when_asked_for(tmp_path):
    folder = RunFolder(tmp_path / "run")
    run = make_kept(folder.path)
    _break(run)
    assert run.stopped
    run.finish()
    assert folder.read_summary()["rounds"] == 5
    assert len(folder.model_files()) == 3
    assert make_kept(folder.path, opened=True).fit(epochs=2).state.round == 8


def test_a_loop_that_is_left_after_the_last_round_is_finished(tmp_path):
    run = left(make_kept(tmp_path / "run"), 7)
    assert not run.stopped
    assert RunFolder(tmp_path / "run").read_summary()["rounds"] == 8


def test_a_run_in_memory_goes_on_after_a_loop_that_was_left():
    run = make_kept()
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
    run = make_kept(tmp_path / "run", callbacks=[callback])
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
    run = make_kept(callbacks=[board, Closed(3, "stop")])
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
    run = make_kept()
    assert not hasattr(run, name)
    with pytest.raises(UsageError, match="start"):
        getattr(run, name)
    assert hasattr(run.start(1), name)
    assert not hasattr(run, "colour")


@pytest.mark.parametrize("epochs", [np.int64(2), np.int32(2), 2])
def test_whole_numbers_of_any_kind_are_numbers_of_epochs(epochs, tmp_path):
    run = make_kept(tmp_path / "run").fit(epochs=epochs)
    assert run.state.round == 8
    assert type(run.epochs) is int


@pytest.mark.parametrize("epochs", [2.0, "2", True, 0, -1])
def test_what_is_no_number_of_epochs_is_refused(epochs):
    with pytest.raises(UsageError, match=f"epochs is {epochs!r}"):
        make_kept().fit(epochs=epochs)


# The number of epochs is the run's own


@pytest.mark.parametrize("unit", ["none", "record"])
def test_a_run_of_the_command_line_goes_on_for_the_epochs_it_was_started_for(unit, tmp_path):
    options = {"nodes": 4, "epochs": 3, "batch_size": 500, "quiet": True, "unit": unit}
    left(Run.from_options(Options(out=tmp_path / "run", **options)), 6, epochs=3)
    again = Run.open(tmp_path / "run").fit()
    assert (again.epochs, again.state.round) == (3, 15)
    assert RunFolder(tmp_path / "run").read_summary()["rounds"] == 15


def test_a_run_made_by_options_has_their_epochs(tmp_path):
    config = Options(out=tmp_path / "run", nodes=4, epochs=2, batch_size=1000, unit="none", quiet=True)
    assert Run.from_options(config).fit().epochs == 2


@pytest.mark.parametrize("unit", [None, UNIT])
def test_a_run_made_in_python_goes_on_for_the_epochs_it_was_started_for(unit, tmp_path):
    _break(make(tmp_path / "run", unit))
    again = make(tmp_path / "run", unit, opened=True).fit()
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


# A request to stop takes effect after the same round at all processes


@dataclass
class Control:
    """As a fabric: everybody has heard after two more rounds, if there are as many."""

    stop_after: int | None = None
    coming: list[object] = field(default_factory=list)

    def rounds_until_heard(self, weights) -> int | None:
        self.coming = list(weights)
        return 2 if len(self.coming) >= 2 else None

    def ask_to_stop(self, round_: int) -> None:
        self.stop_after = round_


def _run(round_: int, count: int, control: Control) -> SimpleNamespace:
    return SimpleNamespace(
        state=SimpleNamespace(round=round_, shared=SimpleNamespace(clock=round_, rate=1.0)),
        plan=SimpleNamespace(count=count),
        rounds_per_epoch=4,
        algorithm=SimpleNamespace(
            partition=SimpleNamespace(shared=["w"]), rate=lambda epoch: 1.0 if epoch < 2 else 0.1
        ),
        protocol=SimpleNamespace(fabric=control, weights=lambda clock: clock),
    )


def stops(run: SimpleNamespace, *, asked: bool) -> bool:
    run.stop_asked, run.clocks = asked, lambda: Run.clocks(run)
    return Run._stops_here(run)


def test_nobody_asks_nobody_stops() -> None:
    assert not stops(_run(3, 8, Control()), asked=False)


def test_who_asks_stops_when_all_have_heard_and_clocks_restart_with_the_rates() -> None:
    control = Control()
    assert not stops(_run(3, 8, control), asked=True)
    assert control.stop_after == 4
    assert control.coming == [3, 0, 1, 2, 3]  # epoch 2 has another rate
    assert not stops(_run(4, 8, control), asked=True)
    assert stops(_run(5, 8, control), asked=True)


def test_a_run_that_ends_before_all_could_hear_goes_to_its_end() -> None:
    control = Control()
    assert not stops(_run(7, 8, control), asked=True)
    assert control.stop_after is None
