"""Runs of many settings, wherever numbers over settings and seeds are wanted: a cell, its result, where results are kept, a pool.

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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, lru_cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dpps import data, features, models
from dpps.errors import RunError, UsageError
from dpps.learning import ALGORITHMS, accuracies
from dpps.privacy.promise import finite_or_none
from dpps.runs import Options, Run, deal
from dpps.sensitivity import Certified
from dpps.version import versions

logger = logging.getLogger(__name__)

Result = Mapping[str, Any]
"""What a cell leaves: see `run`."""
Train = Callable[["Cell", Path | None], dict[str, Any]]
"""Makes the result of a cell, given where data sets are: `run`, or a function of your own that knows more variants."""

#: Seconds of one node and round on one core, roughly: what the order of cost between models is.
_WEIGHT = {"mlp": 0.0013, "mlp-residual": 0.003, "resnet18": 0.6, "vit": 2.4}


@dataclass(frozen=True)
class Cell:
    """One training run, by the options of `dpps train` that are not left at their defaults.

    Attributes:
        options: names and values, sorted; `Cell.of(...)` makes them.
        examples: train on so many examples only (None: all).
        tests: test on so many examples only (None: all; 0: no test).
        certified: evaluate the certified bound along the run.
        variant: what else is different, for a `Train` function that knows it.
    """

    options: tuple[tuple[str, Any], ...] = ()
    examples: int | None = None
    tests: int | None = None
    certified: bool = False
    variant: str = ""

    @classmethod
    def of(cls, **given: Any) -> "Cell":
        """From options and attributes by name."""
        return cls().but(**given)

    def but(self, **changes: Any) -> "Cell":
        """The same with other options or attributes."""
        own = {f.name for f in dataclasses.fields(self)} - {"options"}
        options = dict(self.options) | {k: v for k, v in changes.items() if k not in own}
        rest = {k: v for k, v in changes.items() if k in own}
        return dataclasses.replace(self, options=tuple(sorted(options.items())), **rest)

    def __getitem__(self, option: str) -> Any:
        return dict(self.options).get(option, getattr(Options, option))

    @property
    def key(self) -> str:
        """Names the file of the result."""
        settings = json.dumps(dataclasses.asdict(self), sort_keys=True, default=str)
        digest = hashlib.sha256(settings.encode()).hexdigest()[:12]
        names = (self["model"], self["algorithm"], self["shared"].replace(",", "+"), self["topology"])
        return "-".join((*names, digest))

    @property
    def cost(self) -> float:
        """How long it takes compared with other cells."""
        size = self.examples or data.DATA_SETS[self["data"]].examples or 60_000
        batch = self["batch_size"] if isinstance(self["batch_size"], int) else 100
        batches: float = (self["epochs"] or 12) * max(size / batch, self["nodes"])
        return batches * _WEIGHT.get(self["model"], 0.002) + 2

    def config(self) -> Options:
        """The same as options of `dpps train`."""
        return _config(self.options)


@lru_cache(maxsize=1024)
def _config(options: tuple[tuple[str, Any], ...]) -> Options:
    """Solving for noise takes a second, so once."""
    return Options(**dict(options), quiet=True).resolve()


_NOT_COMPUTING = ("audit", "cli", "paper", "peers", "report")
"""Parts of the package that no number of a cell depends on; of `paper` this file alone counts."""


@cache
def identity() -> str:
    """A checksum of all that the numbers of cells depend on beside their settings: the code, and the versions of what computes."""
    package = Path(__file__).parent.parent
    computing = [p for p in package.rglob("*.py") if p.relative_to(package).parts[0] not in _NOT_COMPUTING]
    digest = hashlib.sha256(json.dumps({k: v for k, v in versions().items() if k != "platform"}).encode())
    for path in sorted([*computing, Path(__file__)]):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


# One cell


def run(
    cell: Cell, data_dir: Path | None = None, dataset: data.DataSet | None = None, **more: Any
) -> dict[str, Any]:
    """Run a cell; the result is plain JSON.

    A run that breaks off because its sensitivity or its loss grows beyond all numbers is a result too: `broke_off` says why.

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
        finished.seconds["processor"] = (
            time.process_time() - begun
        )  # other programs on the machine do not count
        outcome = _measured(cell, finished, _accuracy(finished, dataset.test, cell.tests))
    except RunError as error:
        outcome = {"broke_off": str(error), "accuracy": None}
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return (
        {"cell": json.loads(json.dumps(dataclasses.asdict(cell), default=str))}
        | outcome
        | {
            "finished": at,
            "versions": versions(),
        }
    )


def prepare(cell: Cell, dataset: data.DataSet, algorithm: Any = None, **more: Any) -> Run:
    """The run of a cell before it starts, as `dpps train` would make it, without a folder.

    Args:
        cell: the settings.
        dataset: its examples, see `dataset_of`.
        algorithm: another class than the options name.
        more: further arguments of `dpps.Run`, instead of those that follow from the options.
    """
    config = cell.config()
    torch.manual_seed(config.seed)
    chosen = algorithm or ALGORITHMS[config.algorithm]
    dropout = 0.0 if config.per_example else 0.1
    model, prefixes = models.build(
        config.model, chosen.shares(config.shared), dataset.train.shape, dataset.classes, config.norm, dropout
    )
    arguments: dict[str, Any] = {
        "topology": config.network(),
        "privacy": config.privacy(),
        "sync_every": config.sync_every,
        "mixes": config.mixes,
        "seed": config.seed,
        "watch": {"certified": Certified()} if cell.certified else None,
        "track_real": config.track_real,
    }
    node_sets = deal(dataset, config)[0]
    return Run(chosen(model, prefixes, **config.rates()), node_sets, **arguments | more)


def dataset_of(cell: Cell, data_dir: Path | None = None) -> data.DataSet:
    """The examples of a cell, or as many of them as it asks for."""
    dataset = _load(cell["data"], cell["features"], data_dir)
    if cell.examples is None:
        return dataset
    assert isinstance(dataset.train, data.Images)
    pixels, labels = dataset.train.pixels[: cell.examples], dataset.train.labels[: cell.examples]
    return dataclasses.replace(
        dataset, train=dataclasses.replace(dataset.train, pixels=pixels, labels=labels)
    )


@lru_cache(maxsize=2)
def _load(name: str, chosen: str, data_dir: Path | None) -> data.DataSet:
    """Read once per process; images of one channel are repeated here once, not in every cell."""
    dataset = data.load(name, data_dir, progress=False)
    if chosen != "none":
        return features.of_data_set(dataset, chosen, data.folder_beside(name, data_dir), progress=False)
    return dataclasses.replace(dataset, train=_repeated(dataset.train), test=_repeated(dataset.test))


def _repeated(images: data.Images | data.FeatureSet) -> data.Images:
    assert isinstance(images, data.Images)
    channels = images.shape[0]
    return dataclasses.replace(images, pixels=images.pixels.expand(-1, channels, -1, -1).contiguous())


def _accuracy(finished: Run, test: data.Images | data.FeatureSet, count: int | None) -> float | None:
    """Percent: the averaged s with each node's own l, mean over nodes, once at the end."""
    if count == 0:
        return None
    few = slice(0, count)
    x, labels = test.inputs(few), test.labels[few]
    return fmean(accuracies(finished.nodes.engine, finished.shared, finished.local, x, labels))


def _measured(cell: Cell, finished: Run, accuracy: float | None) -> dict[str, Any]:
    logs, partition, privacy = finished.log, finished.algorithm.partition, finished.privacy
    # with the real sensitivity in use, what was used is what was real
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
        "seconds": finished.seconds,
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
    """The rounds in which the real sensitivity was above the bound used."""
    pairs = zip(result.get("real", []), result.get(bound, []), strict=True)
    return [
        t for t, (real, limit) in enumerate(pairs) if None not in (real, limit) and real > limit * (1 + 1e-6)
    ]


# Many cells


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


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class _Worker:
    """A process that runs one cell at a time."""

    process: Any
    pipe: Connection
    cell: Cell | None = None


@dataclass
class Pool:
    """Runs what is missing.

    Args:
        store: where results are looked for and kept.
        workers: processes at a time; each uses one core.
        data_dir: where data sets are.
        deadline: `time.monotonic()` after which no cell is begun, and none that is expected to end later.
        console: where progress goes.
        train: makes the result of a cell; a function that worker processes can import.
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

    def _work(self, todo: list[Cell], pool: list[_Worker], tick: Callable[[float], None]) -> None:
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
                    # a running cell counts half
                    running = sum(w.cell.cost for w in pool if w.cell) / 2
                    tick(self._expected(sum(cell.cost for cell in todo) + running) / len(pool))

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
        """Seconds, from what finished cells took."""
        return cost * self._spent / self._paid if self._paid else 0.0

    def _in_time(self, cell: Cell) -> bool:
        return self.deadline is None or time.monotonic() + self._expected(cell.cost) < self.deadline

    def _start(self) -> _Worker:
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self.train, self.data_dir), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours)

    @contextmanager
    def _pool(self, cells: int) -> Iterator[list[_Worker]]:
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = (
            "1"  # read by the numerical libraries of a worker when they are loaded
        )
        pool = [self._start() for _ in range(min(self.workers, cells))]
        try:
            yield pool
        finally:
            for worker in pool:
                worker.pipe.close()
                worker.process.terminate()
                worker.process.join()
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = before

    @contextmanager
    def _progress(self, total: int, done: int) -> Iterator[Callable[[float], None]]:
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
                words = f"about {left / 60:.0f} min left" if left >= 60 else f"about {left:.0f} s left"
                bar.update(task, advance=1, left=words)

            yield tick


class _Collected(logging.Handler):
    """Keeps what a worker is warned of, for its parent to say."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _serve(pipe: Connection, train: Train, data_dir: Path | None) -> None:
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
            answer = ("done", train(cell, data_dir), time.perf_counter() - begun)
        except Exception as error:  # noqa: BLE001 - the parent reports it and goes on with the other cells
            last = traceback.extract_tb(error.__traceback__)[-1]
            answer = (
                "failed",
                f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})",
                0.0,
            )
        pipe.send((*answer, warnings.texts))
