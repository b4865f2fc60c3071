"""Callbacks after every round, and the round's log that they receive (one line of rounds.csv)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dpps.disk import private_folder
from dpps.errors import UsageError
from dpps.privacy.accountant import NO_PROTECTION
from dpps.protocol import DPPS, RoundRecord

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from dpps.runs.run import Run

TOTAL = "epsilon_total"
COLUMNS = ("round", "real", "estimated", "used", "scale", "epsilon", "loss", TOTAL)
"""Of rounds.csv."""

TOTALS = 20
"""How often in a run the total so far is computed: each time takes an accountant up to 10 ms."""


@dataclass(frozen=True)
class RoundLog:
    """The log of one round. `loss` is computed without noise: do not publish it.

    `epsilon` is the epsilon of this round's message alone, if the noise is Laplace. A Gaussian round has
    none.
    `epsilon_total` is the cost of all rounds so far, repeated ones included; in the unit node-swap it is
    the sum over rounds. Computing it takes as long as a round of a small model: it is given twenty times
    during a run and after the last round, and is None in between.
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
    """Share of the round's examples whose gradient was clipped (unit record). Not noised: do not publish
    it."""
    update_to_noise: float | None = None
    """Norm of a node's update divided by the expected norm of its noise. Not noised: do not publish it."""
    epsilon_total: float | None = None

    @classmethod
    def of(
        cls, round_: int, record: RoundRecord | None, losses: Tensor, protocol: DPPS, rows: Tensor
    ) -> RoundLog:
        """From what the protocol recorded (nothing when nothing is shared), every node's loss, and the protocol's rows."""
        loss = float(losses.mean())
        if record is None:
            return cls(round_, None, None, None, 0.0, 0.0, loss)
        epsilon = record.epsilon if math.isfinite(record.epsilon) else None
        found = (record.watched.get("real"), record.estimated, record.used, record.scale, epsilon)
        watched = {name: value for name, value in record.watched.items() if name != "real"}
        sent, ratio = bytes_sent(protocol, record.clock, rows), update_to_noise(protocol, record, rows)
        return cls(round_, *found, loss, sent, watched, update_to_noise=ratio)

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
        # 0.2 had no totals
        named: dict[str, Any] = {n: None if v == "" else v for n, v in zip(COLUMNS, values, strict=False)}
        return cls(**named, bytes=sent, watched=watched)


def bytes_sent(protocol: DPPS, clock: int, rows: Tensor) -> int:
    """By the busiest node in a round: its row and 8 bytes more to each peer, or an all-reduce mean; and the scalar S_i to
    everybody where one is broadcast."""
    nodes, row = protocol.fabric.nodes, rows.shape[1] * rows.element_size() + 8
    scalar = 8 * (nodes - 1) if protocol.hides_rows else 0
    if protocol.synchronises(clock):
        return 2 * (nodes - 1) * row // nodes + scalar
    return sum(int(w.out_degree.max()) for w in protocol.gossip_weights(clock)) * row + scalar


def update_to_noise(protocol: DPPS, record: RoundRecord, rows: Tensor) -> float | None:
    """Norm of a perturbation over the expected norm of the noise of its message, mean over the rows here; None without noise."""
    d, mechanism, scale = rows.shape[1], protocol.mechanism, record.scale
    if scale == 0 or not d:
        return None
    present = protocol.topology.present(record.clock * protocol.mixes)
    # with partners the noise is more than the scale
    spread = protocol.noise.standard_deviation(mechanism, scale, present)
    return record.perturbation / (scale * d if mechanism.norm == 1 else spread * math.sqrt(d))


Callback = Callable[["Run", RoundLog], bool | None]
"""Called after every round; a true answer ends the run early, finished as if it had been planned so."""


def rounds_bar(console: Console, *, shown: bool) -> RichProgress:
    """A bar for the rounds of a run, with its facts next to it; it is gone when it stops."""
    from rich import progress as bars

    return bars.Progress(
        bars.TextColumn("round"),
        bars.MofNCompleteColumn(),
        bars.BarColumn(),
        bars.TextColumn("{task.fields[facts]}", markup=False),
        bars.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not shown,
    )


class Progress:
    """A bar: round, loss, sensitivity, epsilon so far and time left; nothing when the output is not a terminal, or it shall not be shown."""

    def __init__(self, console: Console, *, shown: bool) -> None:
        self._bar = rounds_bar(console, shown=shown and console.is_terminal)
        self._task: TaskID | None = None
        self._epsilon = ""

    def __enter__(self) -> Progress:
        self._bar.start()
        self._task = self._bar.add_task("", total=None, facts="reading data, solving for the noise")
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, run: Run) -> None:
        """The run is prepared: show where it stands."""
        assert self._task is not None
        self._bar.reset(self._task, total=run.plan.count, completed=run.state.round, facts="")

    def after_round(self, run: Run, log: RoundLog) -> None:
        """Move on."""
        if self._bar.disable or self._task is None:
            return
        if run.unit is not None and log.epsilon_total is not None:
            useless = " (no protection)" if log.epsilon_total > NO_PROTECTION else ""
            simulated = "" if run.protocol.noise.private else " (simulated)"
            what = "epsilon" if run.unit.has_total else "sum of rounds"
            self._epsilon = f"  {what} {log.epsilon_total:.3g}{useless}{simulated}"
        used = "" if log.used is None else f"  S {log.used:.3g}"
        facts = f"loss {log.loss:.3f}{used}{self._epsilon}"
        self._bar.update(self._task, completed=log.round + 1, facts=facts)


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
