"""What is said when a run is over."""

import io
from pathlib import Path

from rich.console import Console

from dpps.cli import say_outcome

TOLD = {
    "test_accuracy": 91.234,
    "own_accuracy": None,
    "accuracy_by_node": [90.0, 92.5],
    "accuracy_by_epoch": [91.0],
    "own_accuracy_by_node": [],
    "metrics_by_node": {},
    "rounds": 8,
    "config": {},
    "privacy": {"unit": "record", "epsilon": 2.5, "delta": 1e-5},
}


def _said(told, **options) -> str:
    text = io.StringIO()
    options = {"private_noise": True, **options}
    say_outcome(Console(file=text, width=200, highlight=False), told, Path("runs/x"), **options)
    return text.getvalue()


def test_accuracy_privacy_and_files() -> None:
    said = _said(TOLD, voice="rank 0: ")
    assert "rank 0: accuracy  91.23 % " in said
    assert "2 nodes" in said
    assert "epsilon 2.5, delta 1e-05, unit record, 8 rounds\n" in said
    paired = _said({**TOLD, "config": {"trust": "pairs", "colluders": 3}})
    assert " 3 colluders" in paired
    assert "no colluders" in _said({**TOLD, "config": {"trust": "pairs", "colluders": 0}})
    assert "runs/x" in said
    assert "--secure-noise" in _said(TOLD, private_noise=False)


def test_no_noise_and_no_guarantee_are_said_so() -> None:
    assert "epsilon" not in _said(TOLD | {"privacy": {"unit": "none"}})
    swapped = TOLD | {"privacy": {"unit": "node-swap", "epsilon": None, "delta": 0.0}}
    from dpps.privacy import SUM_OF_ROUNDS

    assert SUM_OF_ROUNDS in _said(swapped)


def test_other_epsilons_are_told_where_they_differ_from_the_guarantee() -> None:
    told = {
        **TOLD,
        "privacy": {**TOLD["privacy"], "epsilon": 3.0, "epsilon_replacement": 7.25, "epsilon_spent": 1.125},
    }
    said = _said(told, private_noise=True)
    assert "7.25" in said
    assert "1.13" in said, "rounded up"
    same = {
        **TOLD,
        "privacy": {**TOLD["privacy"], "epsilon": 3.0, "epsilon_replacement": 3.0, "epsilon_spent": 3.0},
    }
    assert len(_said(same, private_noise=True).splitlines()) == len(said.splitlines()) - 2
