"""Two things timed in turn in one run, so that whatever else the machine does hits both alike."""

import time
from collections.abc import Callable
from statistics import median


def seconds(work: Callable[[], object]) -> float:
    """How long one call takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def in_turn(
    first: Callable[[], object], second: Callable[[], object], repetitions: int
) -> tuple[float, float, float]:
    """Median seconds of both, and the median of their ratios first / second, over so many turns."""
    first(), second()  # warm up
    pairs = [(seconds(first), seconds(second)) for _ in range(repetitions)]
    return median(a for a, _ in pairs), median(b for _, b in pairs), median(a / b for a, b in pairs)
