"""Noise that cancels between members that come and go: real runs on a simulated network."""

from itertools import chain
from pathlib import Path

import pytest

import dpps
from dpps.privacy import LedgerFile
from tests.support.pairs import Sharing

pytestmark = pytest.mark.usefixtures("no_fsync")


def once(week: Sharing) -> None:
    """Every round's noise of a member is in at most one of its messages, and every message that left is known."""
    for name in week.names:
        own = [part.round for part in chain(*week.given[name].values()) if part.own]
        assert len(own) == len(set(own)), name
        charged = [r for r, _ in LedgerFile.read(week.folder / name / "ledger.jsonl").history]
        assert set(charged) >= set(week.given[name]) & set(range(20)), name


def test_undisturbed_all_of_it_cancels(tmp_path: Path) -> None:
    week = Sharing(tmp_path)
    week.network.run()
    once(week)
    assert week.standing() == {}
    for name in week.names:
        assert sorted(week.given[name]) == list(range(20))
        assert week.off(name) < 1e-4
        assert "lost for good" in week.runs[name].privacy.statement
