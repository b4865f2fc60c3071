"""Keeps a run from ending before a test has reached it, however slow the test's own process is.

Python imports this by itself in programs that a test starts with the environment of `processes.holding`.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any


def hold(round_: int, gate: Path) -> None:
    """Every process stops before this round until the gate exists; ten minutes matter only if nobody opens it."""
    from dpps.protocol import DPPS

    step = DPPS.step

    def held(self: Any, state: Any, *arguments: Any, **options: Any) -> Any:
        deadline = time.monotonic() + 600
        while state.round == round_ and not gate.exists():
            assert time.monotonic() < deadline, f"{gate} was never opened"
            time.sleep(0.005)
        return step(self, state, *arguments, **options)

    DPPS.step = held  # type: ignore[method-assign]


def open_when_asked_to_stop(gate: Path) -> None:
    """A program that has taken notice of SIGTERM or Ctrl-C opens the gate itself."""
    install = signal.signal

    def noting(number: int, handler: Any) -> Any:
        if number not in (signal.SIGTERM, signal.SIGINT) or not callable(handler):
            return install(number, handler)

        def noted(*arguments: Any) -> None:
            try:
                handler(*arguments)
            finally:
                gate.touch()

        return install(number, noted)

    signal.signal = noting


if "HOLD_ROUND" in os.environ and os.environ["HOLD_NEEDS"] in os.environ:
    hold(int(os.environ["HOLD_ROUND"]), Path(os.environ["HOLD_GATE"]))
    open_when_asked_to_stop(Path(os.environ["HOLD_GATE"]))
