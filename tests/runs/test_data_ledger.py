"""What a data set has ever spent."""

import json
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dpps.errors import RunError, UsageError
from dpps.privacy import Charge, LedgerFile, total
from dpps.runs import Note, Spent, alone, checksum, data_ledger, notes_of, spent, together
from tests.support.notes import ledger_of, note_of

# Which runs a data set had: found wherever the data is moved, and never taken for another run in the same folder


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
    with pytest.raises(UsageError, match=r"data-ledgers\.jsonl.*nothing"):
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


# What a data set has spent: runs add up, lost ledgers count in full, and what no run promised is not known


FIVE = [Charge.gaussian(2.0, count=5)]


def _run(charges: list[Charge] | None, unit: str = "record", **more: float | None) -> Spent:
    fields = {"delta": 1e-6, "records_per_user": 1, "promised": 3.0, "distance": 0.0} | more
    return Spent(Note("data", "", "run/ledger.jsonl", "", 0, unit, started="", **fields), charges)  # type: ignore[arg-type]


def test_runs_add_up(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    paths = [ledger_of(tmp_path / f"run-{k}" / "ledger.jsonl", 5) for k in range(2)]
    runs = spent([note_of(tmp_path / "data", path) for path in paths], LedgerFile.read)
    both, one = (together(each, "record", 1e-5).epsilon for each in (runs, runs[:1]))
    assert both is not None
    assert one is not None
    assert one == alone(runs[0], 1e-5) == pytest.approx(total(FIVE, 1e-5).epsilon)
    assert one < both < 2 * one, "composed by the accountant, not by adding epsilons"
    assert both == pytest.approx(total([*FIVE, *FIVE], 1e-5).epsilon)


def test_a_lost_ledger_counts_with_what_was_promised() -> None:
    without, with_lost = (together(runs, "record", 1e-5) for runs in ([_run(FIVE)], [_run(FIVE), _run(None)]))
    assert without.epsilon is not None
    assert with_lost.epsilon is not None
    assert with_lost.epsilon > without.epsilon + 3.0
    unlimited = together([_run(None, promised=None)], "record", 1e-5)
    assert unlimited.epsilon is None
    assert "ledger.jsonl" in unlimited.remark


def test_a_lost_ledger_that_takes_the_whole_delta_leaves_none_for_the_others() -> None:
    for lost in (1e-5, 1e-3):
        found = together([_run(FIVE), _run(None, delta=lost)], "record", 1e-5)
        assert found.epsilon is None
        assert "larger --delta" in found.remark
    assert together([_run(None, delta=1e-5)], "record", 1e-5).epsilon == 3.0, (
        "there is nothing else to pay for"
    )


def test_a_person_with_most_records_sets_the_group() -> None:
    group = together([_run(FIVE), _run(FIVE, records_per_user=3)], "record", 1e-5)
    assert group.records_per_user == 3
    assert group.epsilon == pytest.approx(total([*FIVE, *FIVE], 1e-5, 3).epsilon)
    assert alone(_run(FIVE, records_per_user=3), 1e-5) == pytest.approx(total(FIVE, 1e-5, 3).epsilon)
    whole_nodes = [_run(FIVE, records_per_user=3), _run(FIVE, "contribution")]
    apart = total(FIVE, 5e-6, 3).epsilon + total(FIVE, 5e-6).epsilon
    assert together(whole_nodes, "record", 1e-5).epsilon == pytest.approx(apart)


def test_a_lost_promise_holds_for_a_larger_group_at_its_price() -> None:
    runs = [_run(None, promised=0.5), _run(None, promised=1.0, records_per_user=2)]
    price = 1e-6 * (1 + math.exp(0.5)) + 1e-6
    assert together(runs, "record", price * 1.001).epsilon == pytest.approx(2 * 0.5 + 1.0)
    assert together(runs, "record", price * 0.999).epsilon is None


def test_what_a_run_did_not_promise_is_not_known() -> None:
    def sums(*units: str) -> dict[str, float | None]:
        runs = [_run(None, unit) for unit in units]
        return {unit: together(runs, unit, 0.5).epsilon for unit in units}

    assert sums("record") == {"record": 3.0}
    assert sums("record", "contribution") == {"record": 6.0, "contribution": None}
    assert sums("record", "node-swap") == {"record": None, "node-swap": None}
    swap = [_run(FIVE), _run([], "node-swap")]
    assert together(swap, "record", 1e-5).epsilon is not None, "it has sent nothing"
    assert "unit node-swap" in together([_run(FIVE), _run(None, "node-swap")], "record", 1e-5).remark


def test_rounds_of_node_swap_are_a_plain_sum_and_no_guarantee() -> None:
    run = _run([Charge.laplace(0.1, count=200)], "node-swap")
    found = together([run, run], "node-swap", 1e-5)
    assert found.epsilon == pytest.approx(40.0), (
        "not the smaller total of an accountant: its noise depends on the data"
    )
    assert alone(run, 1e-5) == pytest.approx(20.0)
    assert found.remark
