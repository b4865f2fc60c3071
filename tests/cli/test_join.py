"""What `dpps join` shows: a line now and then without a terminal, JSON for operators, and the end in words."""

import json
import logging
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from dpps.cli import Shown
from dpps.cli.federation import _JsonLines, _print_done
from dpps.peers.status import LEFT
from dpps.privacy import label
from tests.support.peers import status


def participation(**facts: Any) -> Any:
    told = status()
    for name, value in facts.items():
        setattr(told, name, value)
    run = SimpleNamespace(
        plan=SimpleNamespace(count=20),
        unit=object(),
        summary=SimpleNamespace(test_accuracy=91.234, own_accuracy=None),
    )
    return SimpleNamespace(
        status=told,
        run=run,
        out="run",
        tell_epsilon=lambda: None,
        channel=SimpleNamespace(traffic={"hospital-b": 1, "hospital-c": 2}),
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
    for shown in ("2 of 100", "4 of 8", "epsilon 1.24", "of 3", "123.5 MB"):
        assert shown in lines[0]


def test_quiet_is_quiet() -> None:
    console = plain()
    with Shown(console, quiet=True) as shown:
        shown.begin(participation())
        shown.after_round(participation().run, SimpleNamespace(round=1))  # type: ignore[arg-type]
    assert console.file.getvalue() == ""


@pytest.mark.parametrize(
    ("state", "words"),
    [("finished", "91.23 %"), (LEFT, "17 of 100")],
)
def test_the_end_says_what_came_of_it_and_what_it_cost(state: str, words: str) -> None:
    console = plain()
    _print_done(console, participation(state=state))
    said = console.file.getvalue()
    assert words in said
    for shown in ("epsilon 1.24", "of 3, delta 1e-05", "record"):
        assert shown in said
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


def test_a_line_says_what_is_spent_by_then() -> None:
    """However long the accountant takes, and so however seldom it is asked otherwise."""
    console, taking_part = plain(), participation(epsilon=0.1, epsilon_round=0)

    def now() -> None:
        taking_part.status.epsilon, taking_part.status.epsilon_round = asked * 0.125, taking_part.status.round

    taking_part.tell_epsilon = now
    with Shown(console, quiet=False) as shown:
        shown.begin(taking_part)
        for asked in range(20):
            taking_part.status.round = asked + 1
            shown.after_round(taking_part.run, SimpleNamespace(round=asked))  # type: ignore[arg-type]
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 10
    for k, line in zip(range(1, 20, 2), lines, strict=True):
        assert f"{label(0.125 * k)} spent" in line
