"""From the first round to the last: epochs, evaluation, records, checkpoints, and what comes out."""

import csv
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import IO, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from dpps.checkpoint import load_checkpoint, save_checkpoint
from dpps.data import Images
from dpps.errors import RunError, UsageError
from dpps.learning.evaluation import accuracies, own_accuracies
from dpps.learning.partpsp import Learner
from dpps.privacy.statement import Booked, Privacy, Tally, account
from dpps.protocol import Record

COLUMNS = ("round", "real", "estimated", "used", "scale", "epsilon", "loss")


@dataclass(frozen=True)
class RoundLog:
    """One line of rounds.csv."""

    round: int
    real: float | None
    estimated: float | None
    used: float | None
    scale: float
    epsilon: float
    loss: float
    bytes: int = 0
    watched: dict[str, float] = field(default_factory=dict)

    def row(self) -> list[object]:
        """The values of `COLUMNS`; empty where there is none."""
        return ["" if getattr(self, name) is None else getattr(self, name) for name in COLUMNS]


Callback = Callable[["Training", RoundLog], None]
"""Called after every round."""


class Stopped(Exception):  # noqa: N818 - not an error: somebody asked for it
    """A callback asked to stop after this round; everything so far is in the state."""


@dataclass
class Run:
    """What a training run produced."""

    learner: Learner
    shared: Tensor
    """The averaged s."""
    local: Tensor
    """Every node's l, one row each."""
    rounds: list[RoundLog]
    accuracy: float | None
    """Percent: the averaged s with each node's own l on the whole test set, mean over nodes."""
    accuracy_by_node: list[float]
    accuracy_by_epoch: list[float]
    own_accuracy: float | None
    """Percent: each node on examples held out of its own data, mean over nodes."""
    own_accuracy_by_node: list[float]
    privacy: Privacy
    seconds: dict[str, float]

    def models(self) -> list[nn.Module]:
        """Each node's ready model: the averaged shared parameters with its own local ones and buffers."""
        return [self._model(k) for k in range(len(self.local))]

    def _model(self, k: int) -> nn.Module:
        import copy

        model = copy.deepcopy(self.learner.config.model)
        model.load_state_dict(self.state_dict(k), strict=False)
        return model.eval()

    def state_dict(self, k: int) -> dict[str, Tensor]:
        """Parameters and buffers of the k-th node held here."""
        named = self.learner.partition.views(self.shared, self.local[k])
        prefix = f"{k}."
        buffers = {
            n.removeprefix(prefix): b for n, b in self.learner.engine.state().items() if n.startswith(prefix)
        }
        return {name: tensor.detach().clone().contiguous() for name, tensor in (named | buffers).items()}

    def report(self, path: str | Path) -> Path:
        """One self-contained HTML page about this run."""
        from dpps.report import from_run

        return from_run(self, path)

    def save(self, folder: str | Path) -> list[Path]:
        """Write every node's model as `node-K.safetensors`; load with `model.load_state_dict(load_file(path))`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for k, node in enumerate(self.learner.rows):
            paths.append(folder / f"node-{node}.safetensors")
            save_file(self.state_dict(k), paths[-1])
        return paths


@dataclass
class Training:
    """The loop. `run()` goes from where the learner stands to the last epoch.

    Args:
        learner: the run in progress.
        epochs: how many in all.
        charges: what the learner's protocol charges.
        test: inputs and labels for the paper's evaluation after every epoch.
        held_out: per row, examples of the node's own kind.
        callbacks: called after every round; raising `Stopped` ends the run resumably.
        folder: where rounds.csv and checkpoints go; None writes nothing.
        checkpoint_every: rounds between checkpoints (0 = only when stopped).
    """

    learner: Learner
    epochs: int
    charges: Tally | Booked
    test: tuple[Tensor, Tensor] | None = None
    held_out: Sequence[tuple[Tensor, Tensor]] = ()
    callbacks: Sequence[Callback] = ()
    folder: Path | None = None
    checkpoint_every: int = 0
    rounds: list[RoundLog] = field(default_factory=list)
    accuracy_by_epoch: list[float] = field(default_factory=list)
    seconds: dict[str, float] = field(
        default_factory=lambda: {"gradients": 0.0, "protocol": 0.0, "evaluation": 0.0}
    )

    @property
    def total_rounds(self) -> int:
        """Planned."""
        return self.learner.plan.count

    def run(self) -> Run:
        """Train to the end and evaluate."""
        begun, before = time.perf_counter(), self.seconds.get("total", 0.0)
        with self._csv() as writer:
            while self.learner.state.round < self.total_rounds:
                log = self._one_round(writer)
                self.seconds["total"] = before + time.perf_counter() - begun
                try:
                    for callback in self.callbacks:
                        callback(self, log)
                except Stopped:
                    self.checkpoint()
                    raise
                if self.checkpoint_every and self.learner.state.round % self.checkpoint_every == 0:
                    self.checkpoint()
        by_node = self._evaluate(log=False) if self._by_node is None else self._by_node
        return self._finish(by_node)

    def _one_round(self, writer: Any) -> RoundLog:
        """A round, its line in rounds.csv, and the evaluation at the end of an epoch."""
        epoch, within = divmod(self.learner.state.round, self.learner.rounds_per_epoch)
        if within == 0:
            self.learner.start_epoch(epoch + 1)
        round_, t0 = self.learner.state.round, time.perf_counter()
        record, losses = self.learner.round()
        spent = time.perf_counter() - t0
        self.seconds["protocol"] += self.learner.protocol_seconds
        self.seconds["gradients"] += spent - self.learner.protocol_seconds
        log = _log(round_, record, losses)
        self.rounds.append(log)
        if writer is not None:
            writer.writerow(log.row())
        if within + 1 == self.learner.rounds_per_epoch:
            self._by_node = self._evaluate()
        return log

    def _evaluate(self, log: bool = True) -> list[float]:
        if self.test is None:
            return []
        t0 = time.perf_counter()
        by_node = accuracies(self.learner.engine, self.learner.mean_shared(), self.learner.local, *self.test)
        if log:
            self.accuracy_by_epoch.append(fmean(by_node))
        self.seconds["evaluation"] += time.perf_counter() - t0
        return by_node

    def _finish(self, by_node: list[float]) -> Run:
        shared = self.learner.mean_shared()
        own = own_accuracies(self.learner.engine, shared, self.learner.local, self.held_out)
        return Run(
            learner=self.learner,
            shared=shared,
            local=self.learner.local,
            rounds=self.rounds,
            accuracy=fmean(by_node) if by_node else None,
            accuracy_by_node=by_node,
            accuracy_by_epoch=self.accuracy_by_epoch,
            own_accuracy=fmean(own) if own else None,
            own_accuracy_by_node=own,
            privacy=self.privacy(),
            seconds=self.seconds,
        )

    def privacy(self) -> Privacy:
        """What has been spent so far, from what was charged."""
        noise, unit = self.learner.protocol.noise, self.learner.config.privacy
        charges = self.charges.charges()
        distance = self.learner.noise_distance(sum(charge.count for charge in charges))
        return account(unit, charges, private_noise=noise.private, distance=distance)

    # Files

    @contextmanager
    def _csv(self) -> Iterator[Any]:
        if self.folder is None:
            yield None
            return
        path = self.folder / "rounds.csv"
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows(log.row() for log in self.rounds)
            self._file = file
            yield writer

    _file: IO[str] | None = field(default=None, init=False, repr=False)
    _by_node: list[float] | None = field(default=None, init=False, repr=False)

    def checkpoint(self) -> None:
        """Put everything on disk that a resumed run needs; the ledger first."""
        if self.folder is None:
            return
        if isinstance(self.charges, Booked):
            self.charges.ledger.flush()
        if self._file is not None:
            self._file.flush()
        meta = {
            "accuracy_by_epoch": self.accuracy_by_epoch,
            "seconds": self.seconds,
            "rounds": [[*log.row(), log.bytes, log.watched] for log in self.rounds],
            **self.learner.meta(),
        }
        save_checkpoint(self.folder / "checkpoint", self.learner.state.round, self.learner.tensors(), meta)

    def resume(self, at: int | None = None) -> int:
        """Take up the newest whole checkpoint, or that of round `at`; the round it stands at (0 when there is none)."""
        if self.folder is None:
            raise UsageError("nothing to resume: the run has no folder")
        found = load_checkpoint(self.folder / "checkpoint", at)
        if found is None:
            return 0
        try:
            self.learner.load(found.tensors, found.meta, found.round)
        except (KeyError, RuntimeError) as error:
            raise RunError(f"the checkpoint in {self.folder} is of another model: {error}") from error
        self.accuracy_by_epoch, self.seconds = found.meta["accuracy_by_epoch"], found.meta["seconds"]
        self.rounds = [_unlog(row) for row in found.meta["rounds"]]
        return found.round


def _log(round_: int, record: Record | None, losses: Tensor) -> RoundLog:
    loss = float(losses.mean())
    if record is None:
        return RoundLog(round_, None, None, None, 0.0, 0.0, loss)
    return RoundLog(
        round_,
        record.real,
        record.estimated,
        record.used,
        record.scale,
        record.epsilon,
        loss,
        record.bytes,
        dict(record.watched),
    )


def _unlog(row: Sequence[Any]) -> RoundLog:
    *values, sent, watched = row
    named: dict[str, Any] = {n: None if v == "" else v for n, v in zip(COLUMNS, values, strict=True)}
    return RoundLog(**named, bytes=sent, watched=watched)


def as_tensors(data: Dataset[Any] | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A whole data set as (inputs, labels)."""
    if isinstance(data, tuple):
        return data
    if isinstance(data, TensorDataset):
        return data.tensors[0], data.tensors[1]
    if isinstance(data, Images):
        return data.inputs(), data.labels
    x, labels = default_collate([data[i] for i in range(len(data))])  # type: ignore[arg-type]
    return x, labels


def check_labels(model: nn.Module, x: Tensor, labels: Tensor) -> None:
    """Integer labels must fit the model's outputs; asked before any work starts."""
    if labels.is_floating_point() or not len(labels):
        return
    model.eval()
    with torch.no_grad():
        outputs = model(x[:1]).shape[-1]
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= outputs:
        raise UsageError(
            f"labels run from {low} to {high} and the model has {outputs} outputs: use a model with {high + 1} classes"
        )
