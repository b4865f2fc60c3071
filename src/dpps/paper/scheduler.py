"""Runs independent cells in worker processes, one core each, and keeps every result as soon as it is there."""

import json
import logging
import multiprocessing as mp
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dpps.errors import RunError, UsageError
from dpps.paper.cells import Cell, Result, identity, run

logger = logging.getLogger(__name__)


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Store:
    """One JSON file per cell. A file is written aside and renamed, so what is there is whole.

    Args:
        folder: where results are kept, in a sub-folder for each version of the code: numbers of another version are not taken for this one's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / identity()
        self.folder.mkdir(parents=True, exist_ok=True)

    def _path(self, cell: Cell) -> Path:
        return self.folder / f"{cell.key}.json"

    def get(self, cell: Cell) -> Result | None:
        """The result, if the cell has been run."""
        path = self._path(cell)
        if not path.exists():
            return None
        result: dict[str, Any] = json.loads(path.read_text())
        return result

    def put(self, cell: Cell, result: Result) -> None:
        """Keep a result."""
        aside = self.folder / f".{cell.key}.{os.getpid()}.part"
        aside.write_text(json.dumps(result, allow_nan=False) + "\n")
        aside.rename(self._path(cell))

    def all(self, cells: Sequence[Cell]) -> dict[Cell, Result]:
        """The results that are there."""
        found = ((cell, self.get(cell)) for cell in cells)
        return {cell: result for cell, result in found if result is not None}


@dataclass
class _Worker:
    """A process that runs one cell at a time."""

    process: Any
    pipe: Connection
    cell: Cell | None = None


@dataclass
class Scheduler:
    """Runs what is missing.

    Args:
        store: where results are looked for and kept.
        workers: processes at a time; each uses one core.
        data_dir: where data sets are.
        deadline: `time.monotonic()` after which no cell is begun, and none that is expected to end later.
        console: where progress goes.
    """

    store: Store
    workers: int = field(default_factory=cores)
    data_dir: Path | None = None
    deadline: float | None = None
    console: Console = field(default_factory=Console)
    errors: dict[Cell, str] = field(default_factory=dict)
    _spent: float = 0.0
    _paid: float = 0.0
    _warned: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"--workers is {self.workers}: it must be 1 or more")

    def run(self, cells: Sequence[Cell]) -> dict[Cell, Result]:
        """Run the missing cells in the order given; all results that are there afterwards."""
        unique = list(dict.fromkeys(cells))
        todo = [cell for cell in unique if self.store.get(cell) is None]
        if todo:
            with self._progress(len(unique), len(unique) - len(todo)) as tick, self._pool(len(todo)) as pool:
                self._work(todo, pool, tick)
        return self.store.all(unique)

    def raise_errors(self) -> None:
        """One error for all cells that failed; the others are kept."""
        if self.errors:
            failed = "; ".join(f"{cell.key}: {' '.join(text.split())}" for cell, text in self.errors.items())
            raise RunError(
                f"{len(self.errors)} cells failed, the others are in {self.store.folder} and are not run again: {failed}"
            )

    # The loop

    def _work(self, todo: list[Cell], pool: list[_Worker], tick: Any) -> None:
        while True:
            for worker in pool:
                if worker.cell is None and todo and self._in_time(todo[0]):
                    worker.cell = todo.pop(0)
                    with suppress(BrokenPipeError):  # a dead worker is met when its answer is read
                        worker.pipe.send(worker.cell)
            busy = [worker for worker in pool if worker.cell is not None]
            if not busy:
                return
            ready = wait([worker.pipe for worker in busy])
            for k, worker in enumerate(pool):
                if worker.pipe in ready:
                    pool[k] = self._finish(worker)
                    tick(self._left(todo, pool))

    def _finish(self, worker: _Worker) -> _Worker:
        """Keep what a worker reports; a worker that died is replaced."""
        assert worker.cell is not None
        cell, worker.cell = worker.cell, None
        try:
            kind, value, seconds, warnings = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join()
            self.errors[cell] = f"the process ended with code {worker.process.exitcode} (out of memory?)"
            return self._start()
        for warning in warnings:
            if warning not in self._warned:  # cells that differ in their seed have the same to say
                self._warned.add(warning)
                logger.warning("%s", warning)
        if kind == "failed":
            self.errors[cell] = value
        else:
            self._spent, self._paid = self._spent + seconds, self._paid + cell.cost
            self.store.put(cell, {**value, "wall_seconds": round(seconds, 2)})
        return worker

    def _expected(self, cost: float) -> float:
        return cost * self._spent / self._paid if self._paid else 0.0

    def _in_time(self, cell: Cell) -> bool:
        return self.deadline is None or time.monotonic() + self._expected(cell.cost) < self.deadline

    def _left(self, todo: Sequence[Cell], pool: Sequence[_Worker]) -> float:
        """Seconds left, from what finished cells took; a running cell counts half."""
        running = sum(worker.cell.cost for worker in pool if worker.cell) / 2
        return self._expected(sum(cell.cost for cell in todo) + running) / len(pool)

    # Processes and the bar

    def _start(self) -> _Worker:
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self.data_dir), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours)

    @contextmanager
    def _pool(self, cells: int) -> Iterator[list[_Worker]]:
        with _one_thread_each():
            pool = [self._start() for _ in range(min(self.workers, cells))]
            try:
                yield pool
            finally:
                for worker in pool:
                    worker.pipe.close()
                    worker.process.terminate()
                    worker.process.join()

    @contextmanager
    def _progress(self, total: int, done: int) -> Iterator[Any]:
        columns = (
            TextColumn("cells"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
        )
        with Progress(*columns, console=self.console) as bar:
            task = bar.add_task("cells", total=total, completed=done, left="")

            def tick(left: float) -> None:
                bar.update(
                    task,
                    advance=1,
                    left=f"about {left / 60:.0f} min left" if left >= 60 else f"about {left:.0f} s left",
                )

            yield tick


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """The numerical libraries of a worker read this when they are loaded."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


class _Collected(logging.Handler):
    """Keeps what a worker is warned of, for its parent to say."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _serve(pipe: Connection, data_dir: Path | None) -> None:
    """A worker's life: a cell in, its result or its error out, until the pipe closes."""
    torch.set_num_threads(1)
    warnings = _Collected()
    logging.getLogger().addHandler(warnings)
    while True:
        try:
            cell = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        begun = time.perf_counter()
        answer: tuple[str, Any, float]
        warnings.texts = []
        try:
            answer = ("done", run(cell, data_dir), time.perf_counter() - begun)
        except Exception as error:  # noqa: BLE001 - the parent reports it and goes on with the other cells
            last = traceback.extract_tb(error.__traceback__)[-1]
            answer = (
                "failed",
                f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})",
                0.0,
            )
        pipe.send((*answer, warnings.texts))
