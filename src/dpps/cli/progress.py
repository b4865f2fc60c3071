"""A live display of a run, and stopping it with Ctrl-C or SIGTERM without losing anything."""

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType

from rich import progress as bars
from rich.console import Console

from dpps.privacy.accountant import NO_PROTECTION
from dpps.runs.config import TrainConfig
from dpps.runs.log import RoundLog
from dpps.runs.run import Run


class Progress:
    """Round, loss, sensitivity, epsilon so far and time left; nothing when the output is not a terminal."""

    def __init__(self, config: TrainConfig, console: Console) -> None:
        self._shown = console.is_terminal and not config.quiet
        self._bar = bars.Progress(
            bars.TextColumn("round"),
            bars.MofNCompleteColumn(),
            bars.BarColumn(),
            bars.TextColumn("{task.fields[facts]}"),
            bars.TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not self._shown,
        )
        self._task: bars.TaskID | None = None
        self._epsilon: str = ""

    def __enter__(self) -> "Progress":
        self._bar.start()
        self._task = self._bar.add_task("", total=None, facts="reading data, solving for the noise")
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, run: Run) -> None:
        """The run is prepared: show where it stands."""
        assert self._task is not None
        done, planned = run.state.round, run.plan.count
        self._bar.reset(self._task, total=planned, completed=done, facts="")

    def after_round(self, run: Run, log: RoundLog) -> None:
        """Move on. The epsilon is recomputed now and then only: accountants take a while."""
        if not self._shown or self._task is None:
            return
        if run.unit and (log.round + 1) % max(10, run.plan.count // 10) == 0:
            epsilon = run.privacy.epsilon_spent
            useless = " (no protection)" if epsilon is None or epsilon > NO_PROTECTION else ""
            simulated = " (simulated)" if run.privacy.simulated else ""
            what = "epsilon" if run.unit.has_total else "sum of rounds"
            self._epsilon = f"  {what} {'inf' if epsilon is None else f'{epsilon:.3g}'}{useless}{simulated}"
        used = "" if log.used is None else f"  S {log.used:.3g}"
        self._bar.update(
            self._task, completed=log.round + 1, facts=f"loss {log.loss:.3f}{used}{self._epsilon}"
        )


def working(console: Console, what: str) -> AbstractContextManager[object]:
    """A spinner for what takes a few seconds; nothing when the output is not a terminal."""
    return console.status(what) if console.is_terminal else nullcontext()


@contextmanager
def stopped_by_signals(run: Run) -> Iterator[None]:
    """While inside, SIGTERM and Ctrl-C stop the run after the current round, at all processes."""

    def ask(number: int, frame: FrameType | None) -> None:
        run.stop()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
