"""The scheduler keeps what worked, and a dead worker costs its cell only."""

import dataclasses
import time
from pathlib import Path

import pytest
import torch

from dpps.errors import RunError
from dpps.paper import Cell, Scheduler, Scope, Store, run

SMALLEST = Scope("smallest", (7,), ("mlp",))
TINY = Cell(data="mnist-mini", batch_size=5, examples=100, tests=20, epochs=1, sync_every=2, seed=7)


def test_scheduler_keeps_what_worked_reports_what_failed_and_does_not_repeat(tmp_path):
    bad = dataclasses.replace(TINY, batch_size=5000)
    scheduler = Scheduler(Store(tmp_path), workers=1)
    results = scheduler.run([TINY, bad, TINY])
    assert list(results) == [TINY]
    with pytest.raises(RunError, match=r"1 cells.*: UsageError"):
        scheduler.raise_errors()
    again = Scheduler(Store(tmp_path), workers=1)
    again._start = lambda: pytest.fail("nothing is missing")  # type: ignore[method-assign]
    assert again.run([TINY]) == results
    torch.manual_seed(0)
    assert results[TINY]["real"] == run(TINY)["real"]


def test_a_dead_worker_costs_its_cell_only(tmp_path, monkeypatch):
    scheduler = Scheduler(Store(tmp_path), workers=1)
    start = Scheduler._start
    first = []

    def start_and_kill(self):
        worker = start(self)
        if not first:
            first.append(worker)
            worker.process.kill()
        return worker

    monkeypatch.setattr(Scheduler, "_start", start_and_kill)
    other = dataclasses.replace(TINY, seed=8)
    assert list(scheduler.run([TINY, other])) == [other]
    assert "-9" in scheduler.errors[TINY]


def test_nothing_is_begun_after_the_deadline(tmp_path):
    scheduler = Scheduler(Store(tmp_path), workers=1, deadline=time.monotonic() - 1)
    assert scheduler.run([TINY]) == {}
    scheduler.raise_errors()


def test_a_half_written_result_does_not_count(tmp_path):
    store = Store(tmp_path)
    (store.folder / f".{TINY.key}.1.part").write_text('{"accuracy": 1')
    assert store.get(TINY) is None
    store.put(TINY, {"accuracy": 1.0})
    assert store.get(TINY) == {"accuracy": 1.0}


def test_results_of_another_version_are_not_this_one_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are neither reused nor lost."""
    Store(tmp_path).put(TINY, {"accuracy": 1.0})
    monkeypatch.setattr("dpps.paper.scheduler.identity", lambda: "another")
    assert Store(tmp_path).get(TINY) is None
    Store(tmp_path).put(TINY, {"accuracy": 2.0})
    monkeypatch.undo()
    assert Store(tmp_path).get(TINY) == {"accuracy": 1.0}


def test_a_warning_of_many_cells_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    growing = dataclasses.replace(TINY, sensitivity="paper", epochs=5, sync_every=5, shared="all")
    cells = [dataclasses.replace(growing, seed=seed) for seed in (1, 2)]
    Scheduler(Store(tmp_path), workers=2).run(cells)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "--sync-every" in said
    assert said not in capfd.readouterr().err
