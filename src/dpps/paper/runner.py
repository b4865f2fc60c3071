"""Runs over many settings and seeds: a cell, its result, where results are kept, and a pool of processes.

A `Cell` holds options of `dpps train` and says what is measured. `Pool.run` runs the cells that a `Store` does not have yet, in
worker processes of one core each, and keeps every result as soon as it is there::

    cells = [Cell.of(data="mnist", unit="record", epsilon=e, seed=s) for e in (1.0, 3.0) for s in range(5)]
    results = Pool(Store(Path("out/cells"))).run(cells)
    accuracies = {cell: results[cell]["accuracy"] for cell in results}
"""

import dataclasses
import hashlib
import json
import logging
import multiprocessing as mp
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, lru_cache
from logging.handlers import QueueHandler
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import Queue
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dpps import data, features, models
from dpps.disk import write_aside
from dpps.errors import RunError, UsageError
from dpps.learning import ALGORITHMS, accuracies
from dpps.privacy.accountant import finite_or_none
from dpps.runs import Options, Run, deal
from dpps.sensitivity import Certified
from dpps.version import versions

logger = logging.getLogger(__name__)

Result = Mapping[str, Any]
"""What `run` returns."""
Train = Callable[["Cell", Path | None], dict[str, Any]]
"""Computes the result of a cell from the folder of data sets: `run`, or a function of your own that knows more variants."""

#: Rough seconds of one node's round on one core.
_WEIGHT = {"mlp": 0.0013, "mlp-residual": 0.003, "resnet18": 0.6, "vit": 2.4}


@dataclass(frozen=True)
class Cell:
    """One training run, by the options of `dpps train` that differ from their defaults.

    Attributes:
        options: names and values, sorted; `Cell.of(...)` makes them.
        examples: train on only this many examples (None: all).
        tests: test on only this many examples (None: all; 0: no test).
        certified: evaluate the certified bound along the run.
        variant: anything else that differs, for a `Train` function that knows it.
    """

    options: tuple[tuple[str, Any], ...] = ()
    examples: int | None = None
    tests: int | None = None
    certified: bool = False
    variant: str = ""

    @classmethod
    def of(cls, **given: Any) -> "Cell":
        """A cell from options and attributes by name."""
        return cls().but(**given)

    def but(self, **changes: Any) -> "Cell":
        """A copy with other options or attributes."""
        own = {f.name for f in dataclasses.fields(self)} - {"options"}
        options = dict(self.options) | {k: v for k, v in changes.items() if k not in own}
        rest = {k: v for k, v in changes.items() if k in own}
        return dataclasses.replace(self, options=tuple(sorted(options.items())), **rest)

    def __getitem__(self, option: str) -> Any:
        return dict(self.options).get(option, getattr(Options, option))

    @property
    def key(self) -> str:
        """The name of the result's file."""
        settings = json.dumps(dataclasses.asdict(self), sort_keys=True, default=str)
        digest = hashlib.sha256(settings.encode()).hexdigest()[:12]
        names = (self["model"], self["algorithm"], self["shared"].replace(",", "+"), self["topology"])
        return "-".join((*names, digest))

    @property
    def cost(self) -> float:
        """Roughly how long it takes, relative to other cells."""
        size = self.examples or data.DATA_SETS[self["data"]].examples or 60_000
        batch = self["batch_size"] if isinstance(self["batch_size"], int) else 100
        batches: float = (self["epochs"] or 12) * max(size / batch, self["nodes"])
        return batches * _WEIGHT.get(self["model"], 0.002) + 2

    def config(self) -> Options:
        """The options of `dpps train`."""
        return _config(self.options)


@lru_cache(maxsize=1024)
def _config(options: tuple[tuple[str, Any], ...]) -> Options:
    """Cached: solving for noise takes a second."""
    return Options(**dict(options), quiet=True).resolve()


@cache
def identity() -> str:
    """A checksum of everything but the settings that results depend on: the code and the versions of libraries."""
    package, other = Path(__file__).parent.parent, ("audit", "cli", "paper", "peers", "report")
    computing = [path for path in package.rglob("*.py") if path.relative_to(package).parts[0] not in other]
    digest = hashlib.sha256(json.dumps({k: v for k, v in versions().items() if k != "platform"}).encode())
    for path in sorted([*computing, Path(__file__)]):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


# One cell


def run(
    cell: Cell, data_dir: Path | None = None, dataset: data.DataSet | None = None, **more: Any
) -> dict[str, Any]:
    """Run a cell; the result is plain JSON.

    A run whose sensitivity or loss becomes infinite is a result too: `broke_off` says why it stopped.

    Args:
        cell: the settings.
        data_dir: where data sets are.
        dataset: examples to use instead of those that the options name.
        more: further arguments of `prepare`.
    """
    dataset = dataset or dataset_of(cell, data_dir)
    try:
        prepared, begun = prepare(cell, dataset, **more), time.process_time()
        finished = prepared.fit(epochs=cell.config().epochs or 1, progress=False)
        seconds = finished.seconds | {"processor": time.process_time() - begun}  # without other programs
        accuracy = None
        if cell.tests != 0:  # percent: the averaged s with each node's own l, mean over nodes
            x, labels = dataset.test.inputs(slice(0, cell.tests)), dataset.test.labels[: cell.tests]
            accuracy = fmean(accuracies(finished.nodes.engine, finished.shared, finished.local, x, labels))
        outcome = _measured(cell, finished, accuracy, seconds)
    except RunError as error:
        outcome = {"broke_off": str(error), "accuracy": None}
    settings = json.loads(json.dumps(dataclasses.asdict(cell), default=str))
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return {"cell": settings, **outcome, "finished": at, "versions": versions()}


def prepare(cell: Cell, dataset: data.DataSet, algorithm: Any = None, **more: Any) -> Run:
    """The run of a cell before it starts, as `dpps train` would make it, without a folder.

    Args:
        cell: the settings.
        dataset: its examples, see `dataset_of`.
        algorithm: another class than the options name.
        more: further arguments of `dpps.Run`, instead of those that follow from the options.
    """
    config = cell.config()
    assert config.norm is not None, "resolved"
    torch.manual_seed(config.seed)
    chosen = algorithm or ALGORITHMS[config.algorithm]
    dropout = 0.0 if config.per_example else 0.1
    model, prefixes = models.build(
        config.model, chosen.shares(config.shared), dataset.train.shape, dataset.classes, config.norm, dropout
    )
    passed_on = ("sync_every", "mixes", "seed", "track_real")
    arguments: dict[str, Any] = {name: getattr(config, name) for name in passed_on}
    arguments |= {"topology": config.network(), "privacy": config.privacy()}
    arguments |= {"watch": {"certified": Certified()} if cell.certified else None}
    return Run(chosen(model, prefixes, **config.rates()), deal(dataset, config)[0], **arguments | more)


def dataset_of(cell: Cell, data_dir: Path | None = None) -> data.DataSet:
    """The examples of a cell, or the first `cell.examples` of them."""
    dataset = _load(cell["data"], cell["features"], data_dir)
    if cell.examples is None:
        return dataset
    return dataclasses.replace(dataset, train=dataset.train.part(0, cell.examples))


@lru_cache(maxsize=2)
def _load(name: str, chosen: str, data_dir: Path | None) -> data.DataSet:
    """Read once per process."""
    dataset = data.load(name, data_dir, progress=False)
    if chosen == "none":
        return dataset
    return features.of_data_set(dataset, chosen, data.folder_beside(name, data_dir), progress=False)


def _measured(cell: Cell, finished: Run, accuracy: float | None, seconds: dict[str, float]) -> dict[str, Any]:
    logs, partition, privacy = finished.log, finished.algorithm.partition, finished.privacy
    # where the real sensitivity sets the noise, the sensitivity that was used is the real one
    oracle = cell["sensitivity"] == "oracle" or bool(finished.algorithm.own_sensitivity)
    known = cell["unit"] == "node-swap" and (oracle or cell["track_real"])
    real = [log.estimated if oracle and log.real is None else log.real for log in logs]
    return {
        "accuracy": accuracy,
        "rounds": len(logs),
        "shared_parameters": partition.shared_size,
        "parameters": partition.shared_size + partition.local_size,
        "real": [_short(v) for v in real] if known else [],
        "estimated": [_short(log.estimated) for log in logs] if known else [],
        "certified": [_short(log.watched.get("certified")) for log in logs] if cell.certified else [],
        "bytes_per_round": fmean(log.bytes for log in logs),
        "seconds": seconds,
        "epsilon_per_round": finite_or_none(privacy.epsilon_per_round_max),
        "epsilon_sum": finite_or_none(privacy.epsilon_sum),
        "epsilon": finite_or_none(privacy.epsilon),
        "delta": privacy.delta,
    }


def _short(value: float | None) -> float | None:
    value = finite_or_none(value)
    return None if value is None else float(f"{value:.6g}")


def mean_real(result: Result) -> float | None:
    """The paper's RAS: the mean over rounds of the real sensitivity."""
    values = [v for v in result.get("real", []) if v is not None]
    return fmean(values) if values else None


def rounds_above(result: Result, bound: str = "estimated") -> list[int]:
    """The rounds in which the real sensitivity exceeded the bound."""
    pairs = enumerate(zip(result.get("real", []), result.get(bound, []), strict=True))
    return [t for t, (real, limit) in pairs if None not in (real, limit) and real > limit * (1 + 1e-6)]


# Many cells


class Store:
    """One JSON file per cell, in a sub-folder for each version of the code: results of other versions are not reused."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / identity()
        self.folder.mkdir(parents=True, exist_ok=True)

    def _path(self, cell: Cell) -> Path:
        return self.folder / f"{cell.key}.json"

    def get(self, cell: Cell) -> Result | None:
        """The result, if the cell has been run."""
        path = self._path(cell)
        result: Result | None = json.loads(path.read_text()) if path.exists() else None
        return result

    def put(self, cell: Cell, result: Result) -> None:
        """Keep a result."""
        write_aside(self._path(cell), (json.dumps(result, allow_nan=False) + "\n").encode())

    def all(self, cells: Sequence[Cell]) -> dict[Cell, Result]:
        """The results that are there."""
        return {cell: result for cell in cells if (result := self.get(cell)) is not None}


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(eq=False)
class _Worker:
    """A process that runs one cell at a time."""

    process: Any
    pipe: Connection
    cell: Cell | None = None


@dataclass
class Pool:
    """Runs the cells that are missing.

    Args:
        store: where results are looked for and kept.
        workers: how many processes; each uses one core.
        data_dir: where data sets are.
        deadline: `time.monotonic()` after which no cell begins, and none that is expected to end later.
        console: where progress goes.
        train: computes the result of a cell; a function that worker processes can import.
    """

    store: Store
    workers: int = field(default_factory=cores)
    data_dir: Path | None = None
    deadline: float | None = None
    console: Console = field(default_factory=Console)
    train: Train = run
    errors: dict[Cell, str] = field(default_factory=dict)
    _spent: float = 0.0
    _paid: float = 0.0
    _warned: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"--workers is {self.workers}: it must be 1 or more")

    def run(self, cells: Sequence[Cell]) -> dict[Cell, Result]:
        """Run the missing cells in the order given; returns all results that are there afterwards."""
        unique = list(dict.fromkeys(cells))
        todo = [cell for cell in unique if self.store.get(cell) is None]
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        pool: list[_Worker] = []
        if todo:
            with Progress(*columns, console=self.console, speed_estimate_period=1e9) as bar:
                task = bar.add_task("cells", total=sum(cell.cost for cell in todo))
                try:
                    pool += [self._start() for _ in range(min(self.workers, len(todo)))]
                    for done, cell in enumerate(self._work(todo, pool), start=len(unique) - len(todo) + 1):
                        bar.update(task, advance=cell.cost, description=f"cells {done}/{len(unique)}")
                finally:
                    for worker in pool:
                        worker.pipe.close()
                        worker.process.terminate()
                        worker.process.join()
        return self.store.all(unique)

    def raise_errors(self) -> None:
        """Raise one error for all cells that failed; the others are kept."""
        if self.errors:
            failed = "; ".join(f"{cell.key}: {' '.join(text.split())}" for cell, text in self.errors.items())
            raise RunError(
                f"{len(self.errors)} cells failed, the others are in {self.store.folder} and are not run again: {failed}"
            )

    def _work(self, todo: list[Cell], pool: list[_Worker]) -> Iterator[Cell]:
        """Keep all workers busy; yields every cell that has ended."""
        while True:
            for worker in pool:
                if worker.cell is None and todo and self._in_time(todo[0]):
                    worker.cell = todo.pop(0)
                    with suppress(BrokenPipeError):  # a dead worker is found when its answer is read
                        worker.pipe.send(worker.cell)
            busy: dict[Any, _Worker] = {worker.pipe: worker for worker in pool if worker.cell is not None}
            if not busy:
                return
            for worker in map(busy.__getitem__, wait(list(busy))):
                cell, worker.cell = worker.cell, None
                assert cell is not None
                try:
                    self._keep(cell, *worker.pipe.recv())
                except (EOFError, ConnectionResetError):
                    worker.process.join()
                    code = worker.process.exitcode
                    self.errors[cell] = f"the process ended with code {code} (out of memory?)"
                    pool[pool.index(worker)] = self._start()
                yield cell

    def _keep(self, cell: Cell, result: Result, error: str, seconds: float, warnings: list[str]) -> None:
        for warning in warnings:
            if warning not in self._warned:  # cells that differ only in their seed give the same warnings
                self._warned.add(warning)
                logger.warning("%s", warning)
        if error:
            self.errors[cell] = error
        else:
            self._spent, self._paid = self._spent + seconds, self._paid + cell.cost
            self.store.put(cell, {**result, "wall_seconds": round(seconds, 2)})

    def _in_time(self, cell: Cell) -> bool:
        expected = cell.cost * self._spent / self._paid if self._paid else 0.0
        return self.deadline is None or time.monotonic() + expected < self.deadline

    def _start(self) -> _Worker:
        context, environment = mp.get_context("spawn"), dict(os.environ)
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self.train, self.data_dir), daemon=True)
        os.environ["OMP_NUM_THREADS"] = "1"  # a worker's numerical libraries read it when they are loaded
        try:
            process.start()
        finally:
            del os.environ["OMP_NUM_THREADS"]
            os.environ |= environment
        theirs.close()
        return _Worker(process, ours)


def _serve(pipe: Connection, train: Train, data_dir: Path | None) -> None:
    """What a worker does: receive a cell, send its result or its error, until the pipe closes."""
    torch.set_num_threads(1)
    warned: Queue[logging.LogRecord] = Queue()  # the parent logs them
    handler = QueueHandler(warned)
    handler.setLevel(logging.WARNING)
    logging.getLogger().addHandler(handler)
    while True:
        try:
            cell = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        begun, result, failed = time.perf_counter(), None, ""
        try:
            result = train(cell, data_dir)
        except Exception as error:  # noqa: BLE001 - the parent reports it and goes on with the other cells
            last = traceback.extract_tb(error.__traceback__)[-1]
            failed = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
        warnings = [warned.get().getMessage() for _ in range(warned.qsize())]
        pipe.send((result, failed, time.perf_counter() - begun, warnings))
