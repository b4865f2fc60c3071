"""The live display, and signals that stop a run after its round."""

import os
import signal
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from dpps.cli import Progress, stopped_by_signals
from dpps.cli.console import working
from dpps.privacy import NodeSwap, Record


def run(unit: Any, epsilon: float | None, *, simulated: bool = False) -> Any:
    return SimpleNamespace(
        unit=unit,
        plan=SimpleNamespace(count=10),
        state=SimpleNamespace(round=0),
        privacy=SimpleNamespace(epsilon=3.0, epsilon_spent=epsilon, simulated=simulated),
    )


def shown(finished: Any, *, terminal: bool = True, quiet: bool = False) -> str:
    console = Console(file=StringIO(), force_terminal=terminal, width=150)
    progress = Progress(console, shown=not quiet)
    with progress:
        progress.begin(finished)
        for k in range(10):
            progress.after_round(finished, SimpleNamespace(round=k, loss=0.5, used=2.0))  # type: ignore[arg-type]
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("unit", "epsilon", "words"),
    [
        (Record(epsilon=3), 1.5, "epsilon 1.5"),
        (Record(epsilon=3), 1e6, "(no protection)"),
        (Record(epsilon=3), None, "epsilon inf (no protection)"),
        (NodeSwap(), 1.5, "sum of rounds 1.5"),
        (None, None, "S 2"),
    ],
)
def test_what_was_spent_is_called_what_it_is(unit: Any, epsilon: float | None, words: str) -> None:
    said = shown(run(unit, epsilon))
    assert words in said
    assert "loss 0.500" in said
    assert ("epsilon" in said) == isinstance(unit, Record)


@pytest.mark.parametrize("simulated", [True, False])
def test_what_was_spent_on_seeded_noise_is_called_simulated(simulated: bool) -> None:
    assert ("simulated" in shown(run(Record(epsilon=3), 1.5, simulated=simulated))) == simulated


@pytest.mark.parametrize("how", [{"terminal": False}, {"quiet": True}])
def test_nothing_is_shown_to_nobody(how: dict[str, bool]) -> None:
    assert "loss" not in shown(run(Record(epsilon=3), 1.0), **how)


def test_a_spinner_only_on_a_terminal() -> None:
    quiet = Console(file=StringIO(), force_terminal=False)
    with working(quiet, "solving"):
        pass
    assert quiet.file.getvalue() == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_run_and_afterwards_means_what_it_did_before(number: int) -> None:
    before = signal.getsignal(number)
    asked = []
    with stopped_by_signals(SimpleNamespace(stop=lambda: asked.append(True))):  # type: ignore[arg-type]
        os.kill(os.getpid(), number)
    assert asked == [True]
    assert signal.getsignal(number) is before
