"""`dpps launch`: several processes of `dpps train` on this machine, without torchrun."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from dpps.cli import DONE, FAILED, STOPPED, WRONG
from dpps.cli.console import plain_console
from dpps.cli.outcome import put_together, say_outcome
from dpps.cli.train import LAUNCHED, read_config, refuse_together
from dpps.errors import UsageError
from dpps.runs.config import TrainConfig
from dpps.transport.cluster import SECRET, free_port, make_secret

_USAGE = "dpps launch --nproc 4 [options of dpps train]"


def main(arguments: list[str]) -> int:
    """Start the processes, hand signals on to them, and report what became of all of them."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: {_USAGE}\n\n{__doc__}\nEvery process holds some of the nodes. {read_config.__doc__}")
        return DONE
    count, options = _take_count(arguments)
    config = read_config(options)
    config.check()  # a wrong option is reported once, not by every process
    refuse_together(config)
    if count > config.nodes:
        raise UsageError(f"--nproc is {count}: with --nodes {config.nodes} it must be {config.nodes} or less")
    if config.out is None:
        raise UsageError("a distributed run needs --out DIR: every process writes to DIR/rank-K")
    launched = _Launched()
    with launched.handing_on():
        launched.start(count, options, together=config.node_data is None)
        outcome = _outcome(launched.wait(config.timeout), launched.asked)
    if outcome == DONE and config.node_data is None:
        _tell(config, config.out, count)
    return outcome


def _tell(config: TrainConfig, out: Path, count: int) -> None:
    """What came out of all processes, as `dpps train` tells it: on a named data set every node is tested on the same public data."""
    told = put_together(out, count)
    if told is not None:
        console = plain_console()
        say_outcome(console, told, out, private_noise=not config.seeded_noise)


def _take_count(arguments: list[str]) -> tuple[int, list[str]]:
    """--nproc N out of the options; `train` and `--` before them may be left out."""
    options = [word for word in arguments if word not in ("--", "train")]
    for k, word in enumerate(options):
        name, equals, value = word.partition("=")
        if name == "--nproc":
            rest = options[:k] + options[k + (1 if equals else 2) :]
            value = value if equals else "".join(options[k + 1 : k + 2])
            if not value.isdecimal() or int(value) < 1:
                raise UsageError(f"--nproc is {value!r}: it must be a number of processes, 1 or more")
            return int(value), rest
    raise UsageError(f"--nproc is missing: {_USAGE}")


class _Launched:
    """The processes, and whether they were asked to stop."""

    def __init__(self) -> None:
        self.all: list[subprocess.Popen[bytes]] = []
        self.asked = False

    def start(self, count: int, options: Sequence[str], *, together: bool) -> None:
        """`dpps train` in so many processes; where what came out is told together, each of them says nothing of it."""
        common = {
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        # the port is open to all who are on this machine
        secret = {SECRET: os.environ.get(SECRET) or make_secret()}
        # they share the cores
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count))}
        silent = {LAUNCHED: "1"} if together else {}
        command = [sys.executable, "-m", "dpps", "train", *options]
        for rank in range(count):
            environment = {
                **threads,
                **os.environ,
                **secret,
                **common,
                **silent,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            }
            self.all.append(subprocess.Popen(command, env=environment, start_new_session=True))
        if self.asked:  # in the meantime: the last ones were not there yet
            self._terminate()

    @contextmanager
    def handing_on(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C go to every process; they stop together after a round."""
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._kill()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if not self.asked:  # once is enough: a process that has stopped is about to end
            self.asked = True
            self._terminate()

    def _terminate(self) -> None:
        for process in self._running():
            process.terminate()

    def _running(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self.all if process.poll() is None]

    def _kill(self) -> None:
        for process in self._running():
            process.kill()

    def wait(self, timeout: float) -> list[int]:
        """The exit codes. After a failure the others have the timeout to notice; a hung one is ended then."""
        failed_at: float | None = None
        while self._running():
            if failed_at is None and any(process.returncode not in (None, DONE) for process in self.all):
                failed_at = time.monotonic()
            late = failed_at is not None and time.monotonic() > failed_at + timeout + 10
            if late or self._stopped_before_the_start():
                self._kill()
            time.sleep(0.05)
        return [process.returncode for process in self.all]

    def _stopped_before_the_start(self) -> bool:
        """Whether one was asked to stop while it was still loading: then the others wait for it and no round has begun."""
        return self.asked and any(process.returncode == -signal.SIGTERM for process in self.all)


def _outcome(codes: Sequence[int], asked: bool) -> int:
    """The worst of them; death by a signal is a failure, unless they were asked to stop before they could know how."""
    if asked and -signal.SIGTERM in codes and DONE not in codes:
        return STOPPED
    if any(code not in (DONE, WRONG, STOPPED) for code in codes):
        return FAILED
    return next((code for code in (WRONG, STOPPED) if code in codes), DONE)
