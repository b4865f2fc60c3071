"""What is called after every round of a run, and what it is given: the round's log, one line of rounds.csv."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dpps.disk import private_folder
from dpps.errors import UsageError
from dpps.protocol import RoundRecord

if TYPE_CHECKING:
    from dpps.runs.run import Run

COLUMNS = ("round", "real", "estimated", "used", "scale", "epsilon", "loss")
"""Of rounds.csv."""


@dataclass(frozen=True)
class RoundLog:
    """One round. `loss` is computed from the data without noise: it is for the node's own eyes.

    `epsilon` is that of this round's message alone, where its noise has a pure one (Laplace). A Gaussian round has none: what
    all of them cost together is in `Run.privacy`, which takes an accountant too long to be asked after every round.
    """

    round: int
    real: float | None
    estimated: float | None
    used: float | None
    scale: float
    epsilon: float | None
    loss: float
    bytes: int = 0
    watched: dict[str, float] = field(default_factory=dict)
    accuracy: float | None = None
    """Percent on the test set, after the last round of an epoch."""
    clipped: float | None = None
    """Share of the round's examples whose gradient was clipped (unit record), not noised: for the node's own eyes."""
    update_to_noise: float | None = None
    """Norm of a node's update over the expected norm of the noise of its message, not noised either."""

    @classmethod
    def of(cls, round_: int, record: RoundRecord | None, losses: Tensor) -> RoundLog:
        """From what the protocol recorded (nothing when nothing is shared) and every node's loss."""
        loss = float(losses.mean())
        if record is None:
            return cls(round_, None, None, None, 0.0, 0.0, loss)
        epsilon = record.epsilon if math.isfinite(record.epsilon) else None
        found = (record.real, record.estimated, record.used, record.scale, epsilon)
        watched = dict(record.watched)
        return cls(round_, *found, loss, record.bytes, watched, update_to_noise=record.update_to_noise)

    def row(self) -> list[object]:
        """The values of `COLUMNS`; empty where there is none."""
        return ["" if getattr(self, name) is None else getattr(self, name) for name in COLUMNS]

    def to_json(self) -> list[Any]:
        """For a checkpoint."""
        return [*self.row(), self.bytes, self.watched]

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> RoundLog:
        """What `to_json` gave."""
        *values, sent, watched = row
        named: dict[str, Any] = {n: None if v == "" else v for n, v in zip(COLUMNS, values, strict=True)}
        return cls(**named, bytes=sent, watched=watched)


Callback = Callable[["Run", RoundLog], bool | None]
"""Called after every round; a true answer ends the run early, finished as if it had been planned so."""


class TensorBoard:
    """A callback that writes loss, sensitivities, noise and accuracy as TensorBoard events (`pip install dpps[tensorboard]`)."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError(
                "--tensorboard needs the package tensorboard: pip install dpps[tensorboard]"
            ) from error
        self._folder, self._make = folder, SummaryWriter
        self._writer: SummaryWriter | None = None
        self._epochs = 0

    def __call__(self, run: Run, log: RoundLog) -> None:
        # only when the run has really begun: nothing is written before all checks have passed
        if self._writer is None:
            private_folder(self._folder)
            self._writer = self._make(str(self._folder))
            for events in self._folder.iterdir():
                events.chmod(0o600)
        values = {
            "loss": log.loss,
            "noise/scale": log.scale,
            "sensitivity/used": log.used,
            "sensitivity/real": log.real,
        }
        values |= {f"sensitivity/{name}": value for name, value in log.watched.items()}
        if len(run.accuracy_by_epoch) > self._epochs:
            self._epochs = len(run.accuracy_by_epoch)
            values["accuracy"] = run.accuracy_by_epoch[-1]
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, log.round)

    def close(self) -> None:
        """The run is over, or stopped: everything goes to disk. Rounds that still come begin another file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
