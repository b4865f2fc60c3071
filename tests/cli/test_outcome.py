"""What is said when a run is over."""

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from dpps.cli import say_outcome
from dpps.privacy import SUM_OF_ROUNDS, Privacy

PRIVACY = Privacy("record", "gaussian", None, None, 2.5, 1e-5, "PLD", "")
SUMMARY = SimpleNamespace(
    test_accuracy=91.234,
    own_accuracy=None,
    accuracy_by_node=[90.0, 92.5],
    metrics_by_node={},
    rounds=8,
    config={},
    privacy=PRIVACY,
    comparisons=None,
    baselines=None,
)


def _said(privacy: Privacy = PRIVACY, config: dict[str, Any] | None = None, **options: Any) -> str:
    text = io.StringIO()
    summary: Any = SimpleNamespace(**vars(SUMMARY) | {"privacy": privacy, "config": config or {}})
    options = {"private_noise": True, **options}
    say_outcome(Console(file=text, width=200, highlight=False), summary, Path("runs/x"), **options)
    return text.getvalue()


def test_accuracy_privacy_and_files() -> None:
    said = _said(prefix="rank 0: ")
    assert "rank 0: accuracy  91.23 % " in said
    assert "2 nodes" in said
    assert "epsilon 2.5, delta 1e-05, unit record, 8 rounds\n" in said
    assert " 3 colluders" in _said(config={"trust": "pairs", "colluders": 3})
    assert "no colluders" in _said(config={"trust": "pairs", "colluders": 0})
    assert "runs/x" in said
    assert "--secure-noise" in _said(private_noise=False)


def test_no_noise_and_no_guarantee_are_said_so() -> None:
    assert "epsilon" not in _said(replace(PRIVACY, unit="none"))
    assert SUM_OF_ROUNDS in _said(replace(PRIVACY, unit="node-swap", epsilon=None, delta=0.0))


def test_other_epsilons_are_told_where_they_differ_from_the_guarantee() -> None:
    said = _said(replace(PRIVACY, epsilon=3.0, epsilon_replacement=7.25, epsilon_spent=1.125))
    assert "7.25" in said
    assert "1.13" in said, "rounded up"
    same = _said(replace(PRIVACY, epsilon=3.0, epsilon_replacement=3.0, epsilon_spent=3.0))
    assert len(same.splitlines()) == len(said.splitlines()) - 2
