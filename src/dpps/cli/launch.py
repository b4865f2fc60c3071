"""`dpps launch`: several processes of `dpps train` on this machine, without torchrun."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from dpps.cli import DONE, FAILED, STOPPED, WRONG
from dpps.cli.train import read_config
from dpps.errors import UsageError

_USAGE = "dpps launch --nproc 4 [options of dpps train]"


def main(arguments: list[str]) -> int:
    """Start the processes, hand signals on to them, and report what became of all of them."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: {_USAGE}\n\n{__doc__}\nEvery process holds some of the nodes. {read_config.__doc__}")
        return DONE
    count, options = _take_count(arguments)
    config = read_config(options)  # a wrong option is reported once, not by every process
    if count > config.nodes:
        raise UsageError(f"--nproc is {count}: with --nodes {config.nodes} it must be {config.nodes} or less")
    if config.out is None:
        raise UsageError("a distributed run needs --out DIR: every process writes to DIR/rank-K")
    processes = _start(count, options)
    with _handing_on(processes):
        return _outcome(_wait(processes, config.timeout))


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


def _start(count: int, options: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # they share the cores
    command = [sys.executable, "-m", "dpps", "train", *options]
    return [
        subprocess.Popen(
            command, env={**os.environ, **threads, **common, "RANK": str(rank)}, start_new_session=True
        )
        for rank in range(count)
    ]


@contextmanager
def _handing_on(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """SIGTERM and Ctrl-C go to every process; they stop together after a round."""

    def hand_on(number: int, frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for process in processes:
            if process.poll() is None:
                process.kill()


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> list[int]:
    """The exit codes. After a failure the others have the timeout to notice; a hung one is ended then."""
    failed_at: float | None = None
    while any(process.poll() is None for process in processes):
        if failed_at is None and any(process.returncode not in (None, DONE) for process in processes):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() > failed_at + timeout + 10:
            for process in processes:
                process.kill()
        time.sleep(0.05)
    return [process.returncode for process in processes]


def _outcome(codes: Sequence[int]) -> int:
    """The worst of them; death by a signal is a failure."""
    if any(code not in (DONE, WRONG, STOPPED) for code in codes):
        return FAILED
    return next((code for code in (WRONG, STOPPED) if code in codes), DONE)
