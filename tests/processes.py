"""Several processes on this machine, for tests."""

import multiprocessing
import socket
import traceback
from collections.abc import Callable
from queue import Empty
from typing import Any

import torch

from dpps.cluster import Cluster, Place

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    ["torch", "dpps", "dpps.cluster", "dpps.fabric.distributed", "dpps.simulation"]
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def _child(results: Any, function: Callable[..., Any], place: Place, timeout: float, arguments: Any) -> None:
    torch.set_num_threads(1)
    cluster = Cluster(place, timeout)
    try:
        result = function(cluster, *arguments)
    except Exception as error:  # noqa: BLE001 - handed to the test
        result = (type(error).__name__, str(error), traceback.format_exc())
    results.put((place.rank, result))
    cluster.leave()


class Processes:
    """`size` processes that each call `function(cluster, *arguments)`."""

    def __init__(self, size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 20) -> None:
        port = free_port()
        self.results = context.Queue()
        self.all = [
            context.Process(
                target=_child,
                args=(self.results, function, Place(r, size, "127.0.0.1", port), timeout, arguments),
            )
            for r in range(size)
        ]
        for process in self.all:
            process.start()

    def wait(self, count: int | None = None, seconds: float = 60) -> dict[int, Any]:
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


def run(size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 20) -> list[Any]:
    """Every rank's result in order."""
    found = Processes(size, function, *arguments, timeout=timeout).wait()
    for result in found.values():
        if isinstance(result, tuple) and len(result) == 3 and isinstance(result[2], str):
            raise AssertionError(result[2])
    return [found[r] for r in range(size)]
