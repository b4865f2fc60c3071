"""A cell: one training run behind one number or curve of the paper, and how it is run."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from dpps import data, models
from dpps.errors import RunError
from dpps.learning.algorithm import ALGORITHMS
from dpps.learning.evaluation import accuracies
from dpps.privacy.statement import finite_or_none
from dpps.runs.from_options import deal
from dpps.runs.options import Options
from dpps.runs.run import Run
from dpps.sensitivity import Certified
from dpps.version import versions

#: Seconds of one node and round on one core, roughly: what the order of cost between models is.
_WEIGHT = {"mlp": 0.0013, "mlp-residual": 0.003, "resnet18": 0.6, "vit": 2.4}


@dataclass(frozen=True)
class Cell:
    """The settings of one run. The defaults are the authors': N = 10, batch 100, rates 0.1, gamma_n 0.001, real sensitivity."""

    model: str = "mlp"
    data: str = "mnist"
    algorithm: str = "partpsp"
    shared: str = "1"
    topology: str = "exp"
    nodes: int = 10
    unit: str = "node-swap"
    sensitivity: str = "oracle"
    mechanism: str = "laplace"
    budget: float | None = 5.0
    epsilon: float | None = None
    c_prime: float = 0.78
    decay: float = 0.55
    clip: float | None = None
    sync_every: int = 0
    epochs: int = 12
    lr_step: int = 5
    lr_shared: float = 0.1
    lr_local: float = 0.1
    batch_size: int = 100
    examples: int | None = None
    """Train on so many examples only (None: all)."""
    tests: int | None = None
    """Test on so many examples only (None: all; 0: no test)."""
    certified: bool = False
    """Evaluate the certified bound along the run."""
    track: bool = True
    """Record the real sensitivity (unit node-swap); it costs time."""
    seed: int = 2024
    """The paper's."""

    @property
    def key(self) -> str:
        """Names the file of the result."""
        settings = json.dumps(dataclasses.asdict(self), sort_keys=True)
        digest = hashlib.sha256(settings.encode()).hexdigest()[:12]
        return f"{self.model}-{self.algorithm}-{self.shared.replace(',', '+')}-{self.topology}-{digest}"

    @property
    def cost(self) -> float:
        """How long it takes compared with other cells."""
        size = self.examples or {"mnist-mini": 10_000, "cifar-10": 50_000}.get(self.data, 60_000)
        batches = self.epochs * max(size / self.batch_size, self.nodes)
        return batches * _WEIGHT[self.model] + 2

    def config(self) -> Options:
        """The same as options of `dpps train`."""
        known = {f.name for f in dataclasses.fields(Options)}
        settings = {k: v for k, v in dataclasses.asdict(self).items() if k in known}
        known_anyway = self.sensitivity == "oracle" or bool(ALGORITHMS[self.algorithm].own_sensitivity)
        track = self.track and self.unit == "node-swap" and not known_anyway
        return Options(**settings, track_real=track, quiet=True).resolve()


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


Result = Mapping[str, Any]
"""What a cell leaves: see `run`."""


def run(cell: Cell, data_dir: Path | None = None) -> dict[str, Any]:
    """Run a cell; the result is plain JSON.

    A run that breaks off because its sensitivity or its loss grows beyond all numbers is a result too: `broke_off` says why.
    """
    try:
        outcome = _summary(cell, *_train(cell, data_dir))
    except RunError as error:
        outcome = {"broke_off": str(error), "accuracy": None}
    finished = datetime.now(UTC).isoformat(timespec="seconds")
    return {"cell": dataclasses.asdict(cell), "finished": finished, "versions": versions()} | outcome


def _train(cell: Cell, data_dir: Path | None) -> tuple[Run, float | None]:
    config, dataset = cell.config(), _part(_load(cell.data, data_dir), cell.examples)
    node_sets, _, _ = deal(dataset, config)
    torch.manual_seed(cell.seed)
    algorithm = ALGORITHMS[cell.algorithm]
    layers = algorithm.shares(cell.shared)
    model, prefixes = models.build(cell.model, layers, dataset.train.shape, dataset.classes)
    run = Run(
        algorithm(model, prefixes, **config.rates()),
        node_sets,
        topology=config.network(),
        privacy=config.privacy(),
        sync_every=config.sync_every,
        seed=config.seed,
        watch={"certified": Certified()} if cell.certified else None,
        track_real=config.track_real,
    )
    begun = time.process_time()
    finished = run.fit(epochs=cell.epochs)
    finished.seconds["processor"] = time.process_time() - begun  # other programs on the machine do not count
    return finished, _accuracy(finished, dataset.test, cell.tests)


def _accuracy(finished: Run, test: data.Images | data.FeatureSet, count: int | None) -> float | None:
    """Percent: the averaged s with each node's own l, mean over nodes, once at the end."""
    if count == 0:
        return None
    few = slice(0, count)
    x, labels = test.inputs(few), test.labels[few]
    return fmean(accuracies(finished.nodes.engine, finished.shared, finished.local, x, labels))


def _summary(cell: Cell, finished: Run, accuracy: float | None) -> dict[str, Any]:
    logs, partition = finished.log, finished.algorithm.partition
    privacy = finished.privacy
    # With the real sensitivity in use, what was used is what was real.
    real = [log.real if log.real is not None else log.estimated for log in logs]
    known = cell.unit == "node-swap" and cell.track
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


@lru_cache(maxsize=2)
def _load(name: str, data_dir: Path | None) -> data.DataSet:
    """Read once per process; images of one channel are repeated here once, not in every cell."""
    dataset = data.load(name, data_dir, progress=False)
    return dataclasses.replace(dataset, train=_repeated(dataset.train), test=_repeated(dataset.test))


def _repeated(images: data.Images | data.FeatureSet) -> data.Images:
    assert isinstance(images, data.Images)
    channels = images.shape[0]
    return dataclasses.replace(images, pixels=images.pixels.expand(-1, channels, -1, -1).contiguous())


def _part(dataset: data.DataSet, examples: int | None) -> data.DataSet:
    if examples is None:
        return dataset
    assert isinstance(dataset.train, data.Images)
    train = dataclasses.replace(
        dataset.train, pixels=dataset.train.pixels[:examples], labels=dataset.train.labels[:examples]
    )
    return dataclasses.replace(dataset, train=train)


# What tables ask of results


def mean_real(result: Result) -> float | None:
    """The paper's RAS: the mean over rounds of the real sensitivity."""
    values = [v for v in result["real"] if v is not None] if result.get("real") else []
    return fmean(values) if values else None


def rounds_above(result: Result, bound: str = "estimated") -> list[int]:
    """The rounds in which the real sensitivity was above the bound used."""
    pairs = zip(result.get("real", []), result.get(bound, []), strict=True)
    return [
        t for t, (real, limit) in enumerate(pairs) if None not in (real, limit) and real > limit * (1 + 1e-6)
    ]
