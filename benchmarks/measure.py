"""Two things timed in turn in one run, so that whatever else the machine does hits both alike; and what a benchmark reports."""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import quantiles
from typing import Any, Self

import torch

Work = Callable[[], object]


class Spread(float):
    """A median that also knows its quartiles."""

    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Of these measurements."""
        if len(values) == 1:
            return cls.known(values[0], values[0], values[0], 1)
        low, middle, high = quantiles(values, n=4, method="inclusive")
        return cls.known(middle, low, high, len(values))

    @classmethod
    def known(cls, median: float, low: float, high: float, count: int) -> Self:
        """As read from a file."""
        spread = cls(median)
        spread.low, spread.high, spread.count = low, high, count
        return spread

    def to_json(self) -> dict[str, float]:
        """The reverse of `known`."""
        return {"median": float(self), "low": self.low, "high": self.high, "count": self.count}


CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
_clock = "wall"


def seconds(work: Work) -> float:
    """How long one call takes, by the clock that `main` was told."""
    begun = CLOCKS[_clock]()
    work()
    return CLOCKS[_clock]() - begun


def times(works: Sequence[Work], repetitions: int) -> list[list[float]]:
    """Seconds of every work over so many turns; in a turn each runs once."""
    turns = [[seconds(work) for work in works] for _ in range(repetitions)]
    return [list(own) for own in zip(*turns, strict=True)]


def in_turn(first: Work, second: Work, repetitions: int) -> tuple[Spread, Spread, Spread]:
    """Median seconds of both, and the median of their ratios first / second, over so many turns."""
    first(), second()  # warm up
    return spreads(*times((first, second), repetitions))


def spreads(first: Sequence[float], second: Sequence[float]) -> tuple[Spread, Spread, Spread]:
    """Of both, and of their ratios first / second turn by turn."""
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    return Spread.of(first), Spread.of(second), Spread.of(ratios)


TOLERATED = 0.2
"""Cores that other programs may use before a row says that the machine was busy."""


@dataclass(frozen=True)
class Row:
    """One line of the table. What is judged is the ratio, or `ours` where nothing stands beside it."""

    what: str
    ours: Spread | None = None
    """None: skipped, and `note` says why."""
    beside_what: str = ""
    beside: Spread | None = None
    ratio: Spread | None = None
    target: float | None = None
    """At most."""
    unit: str = "s"
    note: str = ""
    at: tuple[str, float] | None = None
    """Where on which axis of the plot."""
    threads: int = field(default_factory=torch.get_num_threads)
    load: float | None = None
    """Average number of waiting and running processes during the minute before the row was finished."""
    others: float | None = None
    """Cores that other programs used while the row was measured; None: not known."""

    @property
    def busy(self) -> bool:
        """Whether other programs used the machine so much that the time cannot be trusted."""
        return self.others is not None and self.others > TOLERATED

    @property
    def judged(self) -> Spread | None:
        """What the target is about."""
        return self.ours if self.ratio is None else self.ratio

    @property
    def verdict(self) -> str:
        """met, missed, skipped, or nothing where there is no target."""
        if self.judged is None:
            return "skipped"
        return "" if self.target is None else "met" if self.judged <= self.target else "missed"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        plain = asdict(self)
        for name in ("ours", "beside", "ratio"):
            value: Spread | None = getattr(self, name)
            plain[name] = None if value is None else value.to_json()
        return plain

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Self:
        """The reverse of `to_json`."""
        spreads = {k: plain[k] and Spread.known(**plain[k]) for k in ("ours", "beside", "ratio")}
        at = plain["at"] and (plain["at"][0], plain["at"][1])
        return cls(**plain | spreads | {"at": at})


def compare(
    what: str,
    ours: Work,
    beside_what: str,
    beside: Work,
    turns: int,
    target: float | None = None,
    **more: Any,
) -> Row:
    """`ours` and `beside` in turn."""
    first, second, ratio = in_turn(ours, beside, turns)
    return Row(what, first, beside_what, second, ratio, target, **more)


# A table, as text or Markdown

HEADINGS = ("what", "ours", "beside", "", "ratio", "at most", "")


def cells(row: Row) -> tuple[str, ...]:
    """The texts of one line, in the order of HEADINGS."""
    if row.ours is None:
        return row.what, "", "", "", "", _number(row.target), f"skipped: {row.note}"
    busy = f"measured on a busy machine: others used {row.others:.1f} cores" if row.busy else ""
    remarks = "; ".join(filter(None, (row.note, busy)))
    last = row.verdict + (f" ({remarks})" if remarks else "")
    ours, beside = amount(row.ours, row.unit), "" if row.beside is None else amount(row.beside, row.unit)
    target = _number(row.target) if row.ratio is not None else amount(row.target, row.unit)
    return row.what, ours, row.beside_what, beside, ratio(row.ratio), target, last


def amount(value: float | None, unit: str) -> str:
    """A time or a size with three digits."""
    if value is None:
        return ""
    if unit == "s" and value < 1:
        return f"{1e3 * value:.3g} ms"
    return f"{value:.3g} {unit}"


def ratio(value: Spread | None) -> str:
    """The median, and the quartiles behind it."""
    return "" if value is None else f"{value:.2f} ({value.low:.2f}-{value.high:.2f})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def text_table(lines: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their longest entry."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (zip(line, widths, strict=True) for line in lines)
    return "\n".join("  ".join(cell.ljust(width) for cell, width in line).rstrip() for line in padded)


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """The first line is the heading."""
    rule = "|".join("---" for _ in lines[0])
    rows = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([rows[0], f"|{rule}|", *rows[1:]])


# A benchmark as a program

Rows = Callable[[bool], Iterable[Row]]
"""What every benchmark is: given whether to be quick (smallest sizes, only to see that it runs), the rows of its table."""


def main(rows: Rows, threads: int = 2) -> None:
    """Run one benchmark on so many threads: a table, or with --json a line of JSON per row as it is measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="smallest sizes, only to see that it runs")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--threads", type=int, default=threads, help="by default %(default)s")
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="processor: time of all threads, for a machine that is busy",
    )
    options = parser.parse_args()
    global _clock  # noqa: PLW0603  (one benchmark per process)
    _clock = options.clock
    torch.set_num_threads(1 if options.quick else options.threads)
    measured, others = [], Others()
    for row in rows(options.quick):
        measured.append(replace(row, load=round(os.getloadavg()[0], 2), others=others.cores()))
        if options.json:
            print(json.dumps(measured[-1].to_json()), flush=True)
    if not options.json:
        print(text_table([HEADINGS, *map(cells, measured)]))


class Others:
    """What other programs take of the machine: processor time that is not of this process group. Linux only."""

    def __init__(self) -> None:
        self._before = self._now()

    def cores(self) -> float | None:
        """How many cores they used since the last call."""
        before, self._before = self._before, self._now()
        if before is None or self._before is None:
            return None
        elapsed, everybody, ours = (b - a for a, b in zip(before, self._before, strict=True))
        return round(max(0.0, everybody - ours) / elapsed, 2)

    def _now(self) -> tuple[float, float, float] | None:
        """Seconds of the clock, of all processors at work, and of this process group."""
        whole = Path("/proc/stat")
        if not whole.exists():
            return None
        ticks = [int(word) for word in whole.read_text().split("\n", 1)[0].split()[1:9]]
        idle, group, ours = ticks[3] + ticks[4], str(os.getpgrp()), 0
        for file in Path("/proc").glob("[0-9]*/stat"):
            try:
                words = file.read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
                continue
            if words[2] == group:
                ours += sum(map(int, words[11:15]))  # itself and children it has waited for
        second = os.sysconf("SC_CLK_TCK")
        return time.monotonic(), (sum(ticks) - idle) / second, ours / second


def dpps(words: str, *more: object) -> list[str]:
    """A `dpps` command for a process of its own: words with spaces between them, and such as may have spaces in them."""
    return [sys.executable, "-m", "dpps", *words.split(), *map(str, more)]


def in_fresh_process(file: str, *arguments: object) -> dict[str, float]:
    """Run `file` with these arguments in a process of its own; the numbers it prints, as JSON."""
    command = [sys.executable, file, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    numbers: dict[str, float] = json.loads(done.stdout)
    return numbers


def peak_memory() -> float:
    """Gigabytes (2^30 bytes) this process held at most."""
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30  # macOS counts bytes
    # Linux's ru_maxrss of a child includes its parent's
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 2**20
