"""Made-up runs of a data set."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from dpps.noise import gaussian
from dpps.privacy import LedgerFile, Release
from dpps.runs import Note, checksum


def ledger_of(path: Path, rounds: int, row: int = 0) -> Path:
    """A ledger of so many messages of one node."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with LedgerFile.create(path, {"rows": [row], "nonce": str(path)}, durable=False) as ledger:
        for round_ in range(rounds):
            ledger.charge(Release(round_, gaussian(2.0), "gaussian", 1.0, 2.0, "all"))
    return path


def note_of(data: Path, ledger: Path, **more: Any) -> Note:
    """Of a run of node 0 in the unit record; its ledger need not exist."""
    seal = LedgerFile.read_first_seal(ledger) if ledger.exists() else "gone"
    where = (str(data), checksum(data), str(ledger), seal)
    return replace(Note(*where, 0, "record", 1e-5, 1, 3.0, 0.0, "2026-01-01T00:00:00+00:00"), **more)
