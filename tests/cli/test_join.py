"""What `dpps join` shows: a line now and then without a terminal, JSON for operators, and the end in words."""

import json
import logging
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from dpps.cli import Shown
from dpps.cli.join import _JsonLines, _say_done
from dpps.peers.status import LEFT
from tests.support.peers import status


def participation(**facts: Any) -> Any:
    told = status()
    for name, value in facts.items():
        setattr(told, name, value)
    run = SimpleNamespace(
        plan=SimpleNamespace(count=20), unit=object(), told={"test_accuracy": 91.234, "own_accuracy": None}
    )
    return SimpleNamespace(
        status=told, run=run, out="run", channel=SimpleNamespace(traffic={"hospital-b": 1, "hospital-c": 2})
    )


def plain() -> Console:
    return Console(file=StringIO(), highlight=False, soft_wrap=True, width=200)


def test_without_a_terminal_there_is_a_line_for_every_tenth_of_the_rounds() -> None:
    console = plain()
    taking_part = participation()
    with Shown(console, quiet=False) as shown:
        shown.begin(taking_part)
        for k in range(20):
            shown.after_round(taking_part.run, SimpleNamespace(round=k))  # type: ignore[arg-type]
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "round 2 of 100: 4 of 8 here, epsilon 1.24 spent of 3, sent 123.5 MB"


def test_quiet_is_quiet() -> None:
    console = plain()
    with Shown(console, quiet=True) as shown:
        shown.begin(participation())
        shown.after_round(participation().run, SimpleNamespace(round=1))  # type: ignore[arg-type]
    assert console.file.getvalue() == ""


@pytest.mark.parametrize(
    ("state", "words"),
    [("finished", "91.23 % on the test set"), (LEFT, "its share of the model was handed over")],
)
def test_the_end_says_what_came_of_it_and_what_it_cost(state: str, words: str) -> None:
    console = plain()
    _say_done(console, participation(state=state))
    said = console.file.getvalue()
    assert words in said
    assert "epsilon 1.24 spent of 3, delta 1e-05, unit record" in said
    assert "123.5 MB to 2 neighbours" in said


def test_operators_get_one_json_object_a_line_with_what_the_event_is_about() -> None:
    record = logging.makeLogRecord(
        {
            "name": "dpps.cli.join",
            "levelname": "INFO",
            "msg": "round %d",
            "args": (3,),
            "event": "round",
            "round": 3,
        }
    )
    line = _JsonLines().format(record)
    found = json.loads(line)
    assert "\n" not in line
    assert {k: found[k] for k in ("level", "logger", "message", "event", "round")} == {
        "level": "info",
        "logger": "dpps.cli.join",
        "message": "round 3",
        "event": "round",
        "round": 3,
    }
