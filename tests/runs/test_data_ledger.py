"""Which runs a data set had: found wherever the data is moved, and never taken for another run in the same folder."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dpps.errors import RunError, UsageError
from dpps.privacy import LedgerFile
from dpps.runs import checksum, data_ledger, notes_of, spent
from tests.support.notes import ledger_of, note_of


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(data_ledger.STATE, str(tmp_path / "state"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").write_text("1,2\n")
    return tmp_path / "data"


def test_a_run_is_not_taken_for_another_in_its_place(data: Path, tmp_path: Path) -> None:
    path = ledger_of(tmp_path / "run" / "ledger.jsonl", 5)
    note = note_of(data, path)
    messages = [charge.count for run in spent([note], LedgerFile.read) for charge in run.charges or ()]
    assert messages == [5]
    aside = path.rename(path.with_name("ledger-until-20260101-000000-000000.jsonl"))
    path.with_name("ledger.jsonl.witness").unlink()
    ledger_of(path, 2, row=7)
    both = spent([note, replace(note_of(data, path), node=7)], LedgerFile.read)
    assert [[charge.count for charge in run.charges or ()] for run in both] == [[5], [2]]
    aside.unlink()
    assert spent([note], LedgerFile.read)[0].charges is None, "gone, and not the other's"


def test_data_is_found_where_it_was_moved(data: Path, tmp_path: Path) -> None:
    state = tmp_path / "state" / "data-ledgers.jsonl"
    state.parent.mkdir()
    note = note_of(data, ledger_of(tmp_path / "ledger.jsonl", 1))
    line = json.dumps(asdict(note)) + "\n"
    state.write_text(line + line.replace("2026-01-01", "2026-01-02") + line[:-5])
    assert notes_of(data) == [note], "a run that was noted twice is one; a line that was cut off is none"
    (data / "train.csv").write_text("1,2\n3,4\n")
    assert notes_of(data) == [note], "by its path, though it has grown"
    (data / "train.csv").write_text("1,2\n")
    moved = shutil.move(data, tmp_path / "elsewhere")
    assert notes_of(Path(moved)) == [note], "by its content"
    with pytest.raises(UsageError, match=r"nothing.*data-ledgers\.jsonl"):
        notes_of(tmp_path / "nothing")
    state.write_text("nonsense\n")
    with pytest.raises(RunError, match=r"data-ledgers\.jsonl.*line 1\b"):
        notes_of(Path(moved))


def test_what_is_computed_of_the_data_and_kept_beside_it_is_no_other_data(data: Path) -> None:
    before = checksum(data)
    (data / f"features-{'0a' * 16}.safetensors").write_bytes(b"features")
    (data / ".lock").touch()
    assert checksum(data) == before
    (data / "features-own.safetensors").write_bytes(b"examples")
    assert checksum(data) != before
