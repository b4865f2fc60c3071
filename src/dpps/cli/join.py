"""`dpps join`: take part in a run between organisations."""

import json
import logging
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

from rich import progress as bars
from rich.console import Console
from tyro.conf import Positional, arg

from dpps.cli import DONE, STOPPED
from dpps.cli.arguments import parse_options
from dpps.cli.console import log_lines, plain_console
from dpps.logs import only_from
from dpps.peers.join import Participation
from dpps.peers.status import LEFT, LivePage, Status, bytes_in_words, check_page
from dpps.privacy.accountant import label
from dpps.runs.log import RoundLog
from dpps.runs.run import Run

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class JoinConfig:
    """Take part in a run between organisations. Members start in any order; the run waits for the others.

    After a crash, a power cut or Ctrl-C the same command goes on where this member was: nothing is sent twice with other noise,
    and nothing is paid twice.

    Example: dpps join f/federation.toml --member me --node-data /srv/data --out run
    """

    file: Positional[Annotated[Path, arg(metavar="FILE")]]
    """The contract that the convener has signed, federation.toml. A later revision may be put in its place while the run goes on."""
    member: Annotated[Path, arg(metavar="DIR")]
    """Folder of this member's key, made by dpps member init."""
    out: Annotated[Path, arg(metavar="DIR")]
    """Folder of the run: ledger, outbox, log, models, summary."""
    node_data: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """Folder with this member's examples: train.csv (.tsv, .parquet, .npz), and the same for test if wanted."""
    data_dir: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """Where a data set is looked for that the plan names."""
    convener: Annotated[str, arg(metavar="FINGERPRINT", help_behavior_hint="")] = ""
    """Of the convener, as read out on the telephone; without it the one seen first is trusted."""
    metrics: Annotated[str | None, arg(metavar="NAME,NAME,..", help_behavior_hint="")] = None
    """Also measured at the end, as in dpps train; for this member's own eyes."""
    page: Annotated[str, arg(metavar="HOST:PORT", help_behavior_hint="")] = ""
    """Show a live page at this address of this machine, such as 127.0.0.1:8080; its whole URL, with a random part, is printed."""
    log_json: bool = False
    """One JSON object a line on the standard error, for operators, instead of words."""
    quiet: bool = False
    """No progress display."""


def main(arguments: list[str]) -> int:
    """Join as told."""
    config = parse_options(JoinConfig, arguments, "dpps join")
    if config.page:
        check_page(config.page)
    with _json_lines() if config.log_json else nullcontext():
        return _join(config)


def _join(config: JoinConfig) -> int:
    console = plain_console(quiet=config.log_json)
    shown = Shown(console, quiet=config.quiet or config.log_json)
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with ExitStack() as stack:
            participation = stack.enter_context(
                Participation(
                    config.file,
                    config.member,
                    config.out,
                    node_data=config.node_data,
                    data_dir=config.data_dir,
                    convener=config.convener,
                    metrics=config.metrics,
                    callbacks=(shown.after_round,),
                )
            )
            participation.prepare()
            _say_begun(console, participation)
            participation.start()
            if config.page:
                page = stack.enter_context(LivePage(config.page, lambda: participation.status))
                console.print(f"page       {page.url}", markup=False)
                log.info("page %s", page.url, extra={"event": "page", "url": page.url})
            stack.enter_context(shown)
            shown.begin(participation)
            participation.fit()
            shown.stop()
            _say_done(console, participation)
    except KeyboardInterrupt:
        shown.stop()
        console.print(
            f"stopped; everything is in {config.out}, and the same command goes on with it", markup=False
        )
        log.info("stopped", extra={"event": "stopped"})
        return STOPPED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return DONE


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say_begun(console: Console, participation: Participation) -> None:
    status, federation = participation.status, participation.channel.federation
    plan = federation.plan
    console.print(
        f"member     [bold]{status.member}[/] of federation {status.federation}, revision {status.revision}"
    )
    promised = "none: messages without noise" if status.unit == "none" else f"unit {status.unit}"
    if (total := participation.planned_epsilon) is not None:
        promised += f", {label(total)} in total"
    console.print(f"contract   {plan['algorithm']}, {promised}, {len(federation.active)} members")
    console.print(
        f"connects   to {', '.join(sorted(federation.neighbours(status.member)))}; listens at {participation.identity.listen or 'no port'}",
        markup=False,
    )


def _say_done(console: Console, participation: Participation) -> None:
    run, status = participation.run, participation.status
    if status.state == LEFT:
        console.print(
            f"left       after round {status.round} of {status.rounds}; its share of the model was handed over"
        )
    else:
        accuracy = run.told["test_accuracy"]
        own = run.told["own_accuracy"]
        if accuracy is not None:
            console.print(f"accuracy   [bold]{accuracy:.2f} %[/] on the test set")
        if own is not None:
            console.print(f"accuracy   [bold]{own:.2f} %[/] on data of this member's own")
    if run.unit is not None:
        console.print(f"privacy    [bold]{status.spent}[/], delta {status.delta:g}, unit {status.unit}")
    console.print(
        f"sent       {bytes_in_words(status.bytes_sent)} to {len(participation.channel.traffic)} neighbours since this start"
    )
    console.print(f"files      {participation.out}", markup=False)


class Shown:
    """Round, who is here, epsilon and bytes sent: a bar on a terminal, otherwise a line now and then."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self._console, self._quiet = console, quiet
        self._participation: Participation | None = None
        self._bar = bars.Progress(
            bars.TextColumn("round"),
            bars.MofNCompleteColumn(),
            bars.BarColumn(),
            bars.TextColumn("{task.fields[facts]}", markup=False),
            bars.TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._task: bars.TaskID | None = None

    def __enter__(self) -> "Shown":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the bar away."""
        self._bar.stop()

    def begin(self, participation: Participation) -> None:
        """The run is ready, and waits for the others."""
        self._participation = participation
        status = participation.status
        self._task = self._bar.add_task(
            "", total=status.rounds, completed=status.round, facts="waiting for the other members"
        )
        log.info("waiting for the other members", extra={"event": "waiting", "round": status.round})

    def after_round(self, run: Run, round_: RoundLog) -> None:
        """Move on."""
        if self._participation is None:
            return
        status = self._participation.status
        done, every = round_.round + 1, max(1, run.plan.count // 10)
        line = not self._quiet and not self._console.is_terminal and done % every == 0
        if line:
            self._participation.tell_epsilon()
        log.info("round %d of %d", done, status.rounds, extra={"event": "round", **_facts(status, done)})
        words = _words(status)
        if self._task is not None:
            self._bar.update(self._task, completed=done, facts=words)
        if line:
            self._console.print(f"round {done} of {status.rounds}: {words}", markup=False)


def _words(status: Status) -> str:
    epsilon = "" if status.epsilon is None else f", {status.spent}"
    return (
        f"{len(status.here)} of {len(status.members)} here{epsilon}, sent {bytes_in_words(status.bytes_sent)}"
    )


def _facts(status: Status, done: int) -> dict[str, Any]:
    return {
        "round": done,
        "rounds": status.rounds,
        "here": status.here,
        "epsilon": status.epsilon,
        "epsilon_round": status.epsilon_round,
        "bytes_sent": status.bytes_sent,
    }


class _JsonLines(logging.Formatter):
    """One JSON object a record: time, level, message, and what else it was given."""

    _OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

    def format(self, record: logging.LogRecord) -> str:
        facts = {k: v for k, v in vars(record).items() if k not in self._OWN}
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        about = {"time": at, "level": record.levelname.lower(), "logger": record.name}
        return json.dumps({**about, "message": record.getMessage(), **facts}, default=str)


@contextmanager
def _json_lines() -> Iterator[None]:
    """Within, what happens is told to operators: one JSON object a line on the standard error."""
    with log_lines(_JsonLines()), ExitStack() as levels:
        for name in ("dpps.peers", "dpps.cli"):
            levels.enter_context(only_from(logging.INFO, logging.getLogger(name)))
        yield
