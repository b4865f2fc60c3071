"""Several processes on this machine, for tests."""

import itertools
import multiprocessing
import os
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
import torch

from dpps.errors import DppsError
from dpps.transport import Cluster, Rendezvous
from tests.support.holding.sitecustomize import hold, open_when_asked_to_stop

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["dpps.cli.train", "dpps.learning.gradients.choose", "torch.func"])


PATIENCE = 300.0
"""Seconds after which a test says that something hangs; nothing else depends on it."""


needs_proc = pytest.mark.skipif(not Path("/proc/self").exists(), reason="reads /proc, which only Linux has")


def open_files() -> int:
    """How many this process has open, on Linux and macOS."""
    return len(os.listdir("/dev/fd"))


def holding(round_: int, gate: Path, needs: str = "PATH") -> dict[str, str]:
    """The environment of a program whose runs wait before this round until they are asked to stop, or the gate exists.

    With `needs` only processes that have this variable: "RANK" leaves torchrun itself alone.
    """
    paths = [str(Path(__file__).parent / "holding"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "HOLD_ROUND": str(round_),
        "HOLD_GATE": str(gate),
        "HOLD_NEEDS": needs,
    }


_given: set[int] = set()
_gates = itertools.count()


def free_port() -> int:
    """A port of this machine that nobody listens at and that this process has given to nobody else. It lies below those that
    systems choose by themselves for connections, so that it is still free when a process that is started now listens at it."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        if port not in _given:
            with suppress(OSError), socket.create_server(("127.0.0.1", port)):  # otherwise it is taken
                _given.add(port)
                return port
    raise AssertionError("no port of 127.0.0.1 can be listened at")


def _child(
    results: Any, function: Callable[..., Any], place: Rendezvous, timeout: float, arguments: Any
) -> None:
    torch.set_num_threads(1)
    cluster = Cluster(place, timeout)
    cluster.join_timeout = (
        PATIENCE  # however short the time for everything else is, a slow machine may take long to start them
    )
    try:
        result = function(cluster, *arguments)
    except Exception as error:  # noqa: BLE001 - handed to the test
        result = (type(error).__name__, str(error), traceback.format_exc())
    results.put((place.rank, result))
    cluster.leave()  # a test is over when all are: nobody goes before the others have asked


def outcome(cluster: Cluster, action: Callable[[], object]) -> str:
    """What the action fails with, once the others have been told; or "accepted"."""
    try:
        action()
    except DppsError as error:
        cluster.give_up(error)
        return str(error)
    return "accepted"


class Processes:
    """`size` processes that each call `function(cluster, *arguments)`."""

    def __init__(
        self, size: int, function: Callable[..., Any], *arguments: Any, timeout: float = PATIENCE
    ) -> None:
        port = free_port()
        self.results = context.Queue()
        self.all = [
            context.Process(
                target=_child,
                args=(self.results, function, Rendezvous(r, size, "127.0.0.1", port), timeout, arguments),
            )
            for r in range(size)
        ]
        for process in self.all:
            process.start()

    def wait(self, count: int | None = None, seconds: float = PATIENCE) -> dict[int, Any]:
        """The results of `count` processes by rank; what a failed one raised is (type, message, traceback)."""
        found: dict[int, Any] = {}
        try:
            for _ in range(len(self.all) if count is None else count):
                rank, result = self.results.get(timeout=seconds)
                found[rank] = result
        except Empty:
            raise AssertionError(f"only ranks {sorted(found)} came back: {found}") from None
        finally:
            for process in self.all:
                if count is None or process.exitcode is not None:
                    process.join(10)
                process.kill()
                process.join()
        return found


def _execute(text: str, words: Sequence[str], environment: dict[str, str]) -> None:
    torch.set_num_threads(1)
    sys.argv = ["program", *words]
    os.environ.update(environment)
    exec(compile(text, "program", "exec"), {"__name__": "__main__"})


def program(text: str, *words: object, **environment: object) -> multiprocessing.context.ForkServerProcess:
    """A program that runs in a process of its own, which need not wait for its imports."""
    named = {name: str(value) for name, value in environment.items()}
    process = context.Process(target=_execute, args=(text, list(map(str, words)), named), daemon=True)
    process.start()
    return process


def _command(words: Sequence[str], log: Path, held: tuple[int, Path] | None) -> None:
    from dpps.cli import main

    if held is not None:
        hold(*held)
        open_when_asked_to_stop(held[1])
    torch.set_num_threads(1)
    _write_to(log)
    sys.exit(main(words))


def _write_to(log: Path) -> None:
    """What this process prints goes to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def command(
    words: Sequence[str], log: Path, hold_before: int | None = None
) -> multiprocessing.context.ForkServerProcess:
    """`dpps` with these words in a process of its own; it may wait before a round until it is asked to stop."""
    held = None if hold_before is None else (hold_before, log.with_suffix(".gate"))
    process = context.Process(target=_command, args=(words, log, held))
    process.start()
    return process


def until(true: Callable[[], bool], what: str = "") -> None:
    """Wait for something that another thread or process does."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def run(size: int, function: Callable[..., Any], *arguments: Any, timeout: float = PATIENCE) -> list[Any]:
    """Every rank's result in order."""
    found = Processes(size, function, *arguments, timeout=timeout).wait()
    for result in found.values():
        if isinstance(result, tuple) and len(result) == 3 and isinstance(result[2], str):
            raise AssertionError(result[2])
    return [found[r] for r in range(size)]


def _train(
    place: Rendezvous,
    options: Sequence[str],
    log: Path,
    environment: dict[str, str],
    held: tuple[int, Path] | None = None,
) -> None:
    from dpps.cli import main

    if held is not None:
        hold(*held)

    torch.set_num_threads(1)
    os.environ.update(environment)
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.size))
    os.environ.update(MASTER_ADDR=place.host, MASTER_PORT=str(place.port))
    _write_to(log)
    sys.exit(main(["train", *options]))


class Trainers:
    """`dpps train` in several processes; what they print is in `OUT.log-K`.

    With `hold_before` all of them wait before that round until `let_go`: a test that disturbs the run meets it before its end.
    """

    def __init__(
        self,
        size: int,
        out: Path,
        *options: str,
        environment: dict[str, str] | None = None,
        hold_before: int | None = None,
    ) -> None:
        port, self.out = free_port(), out
        self._gate = out.parent / f"{out.name}.gate-{next(_gates)}"
        self.logs = [out.parent / f"{out.name}.log-{r}" for r in range(size)]
        self.all = [
            context.Process(
                target=_train,
                args=(
                    Rendezvous(r, size, "127.0.0.1", port),
                    [*options, "--out", str(out)],
                    self.logs[r],
                    environment or {},
                    None if hold_before is None else (hold_before, self._gate),
                ),
            )
            for r in range(size)
        ]
        for process in self.all:
            process.start()

    def let_go(self) -> None:
        """Whoever waits goes on."""
        self._gate.touch()

    def charged(self, rank: int = 0) -> int:
        """Rounds in a rank's ledger."""
        path = self.out / f"rank-{rank}" / "ledger.jsonl"
        return path.read_bytes().count(b"\n") - 1 if path.exists() else 0

    def until(self, rounds: int, rank: int = 0, pause: float = 0.002) -> None:
        """Wait until a rank has charged so many rounds; look again after each pause."""
        deadline = time.monotonic() + PATIENCE
        while self.charged(rank) < rounds:
            assert time.monotonic() < deadline, self.said()
            assert any(p.is_alive() for p in self.all), self.said()
            time.sleep(pause)

    def wait(self, seconds: float = PATIENCE) -> list[int]:
        """The exit codes; whoever still runs then is ended and has none of ours."""
        deadline = time.monotonic() + seconds
        for process in self.all:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        return [process.exitcode for process in self.all]

    def said(self) -> list[str]:
        """What each process printed."""
        return [log.read_text() if log.exists() else "" for log in self.logs]
