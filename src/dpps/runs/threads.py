"""How many threads a run should use: as many as pay.

A second thread makes small models slower and costs the processor twice, and a large one nearly twice as fast. Nobody has to know:
the gradients of a round on made-up examples are timed with one thread, with two, and so on,
once per model and size; what was found is kept in the user's cache folder. Results depend on the number of
threads by rounding only.
"""

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from dpps.disk import write_aside
from dpps.learning.rehearsal import rehearsal, size_of
from dpps.runs.run import Run

_log = logging.getLogger(__name__)

PAYS = 0.8
"""Twice as many threads must take at most this part of the time."""
_SHORT = 2.0  # seconds: a run that takes no longer with one thread is not worth measuring for
_ENOUGH, _TURNS = 0.3, 5  # seconds and repetitions after which a time is known

_GIVEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def set_threads(run: Run, asked: int = 0, environment: Mapping[str, str] = os.environ) -> int:
    """Use as many threads as asked for, as the environment says, or as pay; returns how many.

    Args:
        run: one that has been started.
        asked: 0 leaves the choice to the environment, and then to measuring.
        environment: OMP_NUM_THREADS (or MKL_NUM_THREADS) says how many torch starts with, and that stays.
    """
    if asked:
        torch.set_num_threads(asked)
    elif not any(environment.get(name) for name in _GIVEN):
        torch.set_num_threads(_chosen(run, _most(environment)))
    return torch.get_num_threads()


def _most(environment: Mapping[str, str]) -> int:
    """Processes on the same machine share its cores."""
    return max(1, torch.get_num_threads() // max(1, int(environment.get("LOCAL_WORLD_SIZE") or 1)))


def _chosen(run: Run, most: int) -> int:
    if most == 1 or run.nodes.device.type != "cpu":
        return most
    work = rehearsal(run.nodes, run.state)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        first = _seconds(work)
        if first < _ENOUGH:  # short enough to be asked again: what is done only once is not counted
            first = _seconds(work)
        if first * (run.plan.count - run.state.round) < _SHORT:
            return 1
        known = Known(_file())
        key = _key(size_of(run.nodes), most)
        found = known.get(key)
        if found is None:
            found = fewest_that_pay(work, most)
            known.put(key, found)
            _log.info("threads: %d of %d pay for this model (kept in %s)", found, most, known.path)
        return found
    finally:
        torch.set_num_threads(before)


def fewest_that_pay(work: Callable[[], None], most: int) -> int:
    """Doubled as long as that saves a fifth of the time, up to `most`."""
    chosen = 1
    while chosen < most:
        more = min(2 * chosen, most)
        few, many = _in_turn(work, (chosen, more))
        if many > PAYS * few:
            break
        chosen = more
    return chosen


def _in_turn(work: Callable[[], None], threads: tuple[int, int]) -> list[float]:
    """The shortest time with each number of threads: what else the machine does meanwhile hits both."""
    best = [float("inf")] * len(threads)
    begun = time.perf_counter()
    for _ in range(_TURNS):
        for k, count in enumerate(threads):
            torch.set_num_threads(count)
            best[k] = min(best[k], _seconds(work))
        if time.perf_counter() - begun > 2 * _ENOUGH:
            break
    return best


def _seconds(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


class Known:
    """What was measured before, in a file that may be deleted at any time.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self, key: str) -> int | None:
        """How many threads pay; None: not measured yet."""
        found = self._read().get(key)
        return found if isinstance(found, int) and found > 0 else None

    def put(self, key: str, threads: int) -> None:
        """Keep it; where the folder cannot be written the next run measures again."""
        try:
            write_aside(self.path, json.dumps(self._read() | {key: threads}, indent=1).encode())
        except OSError as error:
            _log.info("threads: %s cannot be written (%s); the next run measures again", self.path, error)

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_text())
        except (OSError, ValueError):  # there is none yet; cut off, or somebody else's
            return {}
        return found if isinstance(found, dict) else {}


def _key(size: Mapping[str, Any], most: int) -> str:
    """Another machine, torch or size is measured anew."""
    here = {"torch": torch.__version__, "processor": _processor(), "most": most}
    return hashlib.sha256(json.dumps({**size, **here}, sort_keys=True).encode()).hexdigest()[:24]


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    names = (
        [line for line in file.read_text().splitlines() if line.startswith("model name")]
        if file.is_file()
        else []
    )
    return names[0].partition(":")[2].strip() if names else platform.machine()


def _file() -> Path:
    import pooch  # slow to load, and a short run does without

    return Path(pooch.os_cache("dpps")) / "threads.json"
