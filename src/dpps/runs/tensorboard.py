"""Rounds as TensorBoard scalars: an extra (`pip install dpps[tensorboard]`)."""

from pathlib import Path

from dpps.disk import private_folder
from dpps.errors import UsageError
from dpps.runs.log import RoundLog
from dpps.runs.run import Run


class TensorBoard:
    """A callback that writes loss, sensitivities, noise and accuracy to an event file."""

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
