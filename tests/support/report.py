"""Runs on a page that differ from measured ones."""

from dataclasses import replace
from typing import Any

from dpps.report import Reported


def changed(run: Reported, name: str | None = None, **facts: Any) -> Reported:
    """The same run with other facts in its summary."""
    return replace(run, name=name or run.name, summary=replace(run.summary, **facts))


def with_privacy(run: Reported, name: str | None = None, **facts: Any) -> Reported:
    """The same run with other facts about its privacy."""
    return changed(run, name, privacy=replace(run.summary.privacy, **facts))
