"""The ledger, in memory and on disk: nothing that was sent is ever missing, nothing damaged or foreign is ever accepted."""

import json
import logging
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpps.errors import RunError, UsageError
from dpps.noise import events
from dpps.privacy import Budget, Charge, Ledger, LedgerFile, Release, total, witness_of

HEADER: dict[str, Any] = {
    "run": "r1",
    "unit": "contribution",
    "mechanism": "laplace",
    "rows": [0, 1, 2],
    "config": "abc",
}


def laplace(number: int, epsilon: float = 0.1, rows: Any = "all") -> Release:
    return Release(number, events.laplace(1 / epsilon), "laplace", epsilon, 1.0, rows)


def gaussian(number: int, q: float, rows: Any) -> Release:
    return Release(number, events.sampled(q, events.gaussian(1.01)), "gaussian", 1.0, 1.01, rows)


@pytest.mark.parametrize(
    "release",
    [
        Release(3, events.laplace(0.5), "laplace", 2.0, 1.0),
        Release(0, events.sampled(0.1, events.gaussian(1.5)), "gaussian", 1.0, 1.5, rows=(1, 3)),
        Release(7, events.laplace(1.0), "laplace", math.inf, 1.0),
    ],
)
def test_a_line_says_all_that_was_charged_and_the_pure_epsilon_for_readers(release: Release) -> None:
    line = release.to_json()
    assert Release.from_json(line, range(4)) == release
    assert line["epsilon"] == release.event.pure_epsilon


def test_equal_charges_are_kept_once_however_many_rounds_there_are() -> None:
    ledger = Ledger([0])
    for round_ in range(5):
        ledger.charge(laplace(round_))
    assert len({id(charge) for _, charge in ledger.history}) == 1
    assert [round_ for round_, _ in ledger.history] == list(range(5))


# On disk


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def written(path: Path, rounds: int = 5) -> None:
    with LedgerFile.create(path, HEADER, durable=True) as ledger:
        for number in range(rounds):
            ledger.charge(laplace(number))


def test_lines_are_readable_json(path: Path) -> None:
    written(path, 2)
    header, first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert header["format"] == "dpps-ledger"
    assert header["config"] == "abc"
    assert (first["round"], second["round"], first["rows"], first["epsilon"]) == (0, 1, "all", 0.1)
    assert len({header["crc"], first["crc"], second["crc"]}) == 3


def test_durable_charge_is_on_disk_at_once_and_the_other_after_flush(path: Path) -> None:
    durable = LedgerFile.create(path, HEADER, durable=True)
    durable.charge(laplace(0))
    assert path.read_text().count("\n") == 2
    other = path.with_name("other")
    buffered = LedgerFile.create(other, HEADER, durable=False)
    buffered.charge(laplace(0))
    assert other.read_text().count("\n") == 1
    assert buffered.charges_by_row() == durable.charges_by_row()
    buffered.flush()
    assert other.read_bytes() == path.read_bytes()
    durable.close()
    buffered.close()


def test_durable_charge_waits_for_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    with LedgerFile.create(path, HEADER, durable=True) as ledger:
        real_write, real_sync, real_pwrite = os.write, os.fsync, os.pwrite
        monkeypatch.setattr("os.write", lambda f, d: (calls.append("write"), real_write(f, d))[1])
        monkeypatch.setattr("os.fsync", lambda f: (calls.append("fsync"), real_sync(f))[1])
        monkeypatch.setattr("os.pwrite", lambda f, d, at: (calls.append("witness"), real_pwrite(f, d, at))[1])
        ledger.charge(laplace(0))
        assert calls == ["write", "fsync", "witness", "fsync"]


def test_failed_disk_stops_everything(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = LedgerFile.create(path, HEADER, durable=True)
    ledger.charge(laplace(0))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.write", full)
        with pytest.raises(RunError, match=r"ledger\.jsonl.*No space"):
            ledger.charge(laplace(1))
    with pytest.raises(RunError, match=r"ledger\.jsonl"):
        ledger.charge(laplace(1))
    ledger.close()
    with LedgerFile.open(path, HEADER, durable=True) as again:
        assert again.messages == 1


def test_reopening_continues_and_replays_are_charged_again(path: Path) -> None:
    written(path, 5)
    with LedgerFile.open(path, HEADER, durable=True) as ledger:
        before = ledger.total(1e-5).epsilon
        for number in (3, 4, 5):
            ledger.charge(laplace(number))
        assert ledger.charges_by_row()[0] == [Charge.laplace(0.1, count=8)]
        assert ledger.total(1e-5).epsilon > before
    with LedgerFile.open(path, HEADER, durable=True) as ledger:
        assert ledger.charges_by_row()[0] == [Charge.laplace(0.1, count=8)]


def test_total_is_the_maximum_over_nodes(path: Path) -> None:
    with LedgerFile.create(path, HEADER, durable=False) as ledger:
        for number in range(100):
            ledger.charge(gaussian(number, 1 / 30, (0, 1)))
            ledger.charge(gaussian(number, 1 / 20, (2,)))
        by_row = ledger.charges_by_row()
        assert by_row[0] == by_row[1] == [Charge.gaussian(1.01, 1 / 30, 100)]
        assert ledger.total(1e-5) == total(by_row[2], 1e-5)
        assert ledger.total(1e-5).epsilon > total(by_row[0], 1e-5).epsilon
        ledger.charge(Release(100, events.non_private(), "none", 1.0, 0.0, (0,)))
        assert ledger.total(1e-5).epsilon == math.inf


def test_infinite_epsilon_survives_the_file(path: Path) -> None:
    with LedgerFile.create(path, HEADER, durable=True) as ledger:
        ledger.charge(laplace(0, math.inf))
    with LedgerFile.open(path, HEADER, durable=True) as ledger:
        assert ledger.total(1e-5).epsilon == math.inf


def test_never_started_afresh(path: Path) -> None:
    written(path)
    content = path.read_bytes()
    with pytest.raises(UsageError, match=r"ledger\.jsonl"):
        LedgerFile.create(path, HEADER, durable=True)
    assert path.read_bytes() == content
    with pytest.raises(RunError, match="missing"):
        LedgerFile.open(path.with_name("missing"), HEADER, durable=True)
    with pytest.raises(RunError, match="no/where"):
        LedgerFile.create(path.with_name("no") / "where", HEADER, durable=True)


@pytest.mark.parametrize(("field", "value"), [("config", "abd"), ("run", "r2"), ("rows", [0]), ("more", 1)])
def test_foreign_ledger_is_refused_by_field(path: Path, field: str, value: object) -> None:
    written(path)
    with pytest.raises(UsageError, match=rf"ledger\.jsonl.*{field}"):
        LedgerFile.open(path, HEADER | {field: value}, durable=True)


def test_cut_tail_is_dropped_with_a_note(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(path, 4)
    before = witness_of(path).read_bytes()  # the witness is told after the line is whole on disk
    with LedgerFile.open(path, HEADER, durable=True) as ledger:
        ledger.charge(laplace(4))
    content = path.read_bytes()
    last = content.rstrip(b"\n").rfind(b"\n") + 1
    for end in range(last + 1, len(content)):
        path.write_bytes(content[:end])
        witness_of(path).write_bytes(before)
        caplog.clear()
        with caplog.at_level(logging.WARNING), LedgerFile.open(path, HEADER, durable=True) as ledger:
            assert ledger.charges_by_row()[0] == [Charge.laplace(0.1, count=4)]
            assert "half-written" in caplog.text
        assert path.read_bytes() == content[:last]
    with LedgerFile.open(path, HEADER, durable=True) as ledger:
        ledger.charge(laplace(4))
    assert path.read_bytes() == content


def test_cut_header_says_that_nothing_was_sent(path: Path) -> None:
    written(path, 0)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(RunError, match=r"ledger\.jsonl.*first line"):
        LedgerFile.open(path, HEADER, durable=True)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_changed_byte_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    written(path, 4)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 2))  # without the last newline: that is a cut tail
    content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    line = content[:at].count(b"\n") + 1
    with pytest.raises(RunError, match=rf"ledger\.jsonl.*\bline {line}\b"):
        LedgerFile.open(path, HEADER, durable=True)
    assert path.read_bytes() == content


@pytest.mark.parametrize("change", ["drop", "swap", "repeat"])
def test_lost_exchanged_or_repeated_lines_are_noticed(path: Path, change: str) -> None:
    written(path, 5)
    lines = path.read_bytes().splitlines(keepends=True)
    changed = {
        "drop": lines[:2] + lines[3:],
        "swap": [*lines[:2], lines[3], lines[2], *lines[4:]],
        "repeat": lines[:3] + lines[2:],
    }
    path.write_bytes(b"".join(changed[change]))
    with pytest.raises(RunError, match=r"ledger\.jsonl.*\bline \d"):
        LedgerFile.open(path, HEADER, durable=True)


def test_more_than_budgeted_is_refused_before_writing(path: Path) -> None:
    with LedgerFile.create(path, HEADER, durable=True, budget=Budget(0.6)) as ledger:
        for number in range(6):
            ledger.charge(laplace(number))
        content = path.read_bytes()
        with pytest.raises(RunError, match=r"round 6 .*\b6 rounds.*ledger\.jsonl"):
            ledger.charge(laplace(6))
        assert path.read_bytes() == content
        assert ledger.charges_by_row()[0] == [Charge.laplace(0.1, count=6)]


def test_the_budget_is_per_node(path: Path) -> None:
    with LedgerFile.create(path, HEADER, durable=False, budget=Budget(0.2)) as ledger:
        for row in (0, 1, 2, 0):
            ledger.charge(laplace(0, rows=(row,)))
        with pytest.raises(RunError, match=r"round 1 .*\b2 rounds"):
            ledger.charge(laplace(1, rows=(0, 1)))
        ledger.charge(laplace(1, rows=(1,)))


def test_epsilon_budget(path: Path) -> None:
    allowed = 0
    while total([Charge.laplace(0.05, count=allowed + 1)], 1e-6).epsilon <= 1.0:
        allowed += 1
    with LedgerFile.create(path, HEADER, durable=False, budget=Budget(epsilon=1.0, delta=1e-6)) as ledger:
        for number in range(allowed):
            ledger.charge(laplace(number, epsilon=0.05))
        with pytest.raises(RunError, match=rf"epsilon 1\.0 at delta 1e-06 .*\b{allowed} rounds"):
            ledger.charge(laplace(allowed, epsilon=0.05))
        assert ledger.total(1e-6).epsilon <= 1.0
        ledger.charge(laplace(allowed, epsilon=1e-6))  # what still fits is allowed


def test_epsilon_budget_counts_exactly_whatever_it_looks_ahead(path: Path) -> None:
    with LedgerFile.create(path, HEADER, durable=False, budget=Budget(epsilon=1.05)) as ledger:
        for number in range(10):
            ledger.charge(laplace(number, epsilon=0.1))
        with pytest.raises(RunError, match=r"epsilon 1\.05 .*\b10 rounds"):
            ledger.charge(laplace(10, epsilon=0.1))


@pytest.mark.parametrize(
    "entry",
    [
        laplace(-1),
        laplace(0, rows=(7,)),
        laplace(0, rows=()),
        laplace(0, epsilon=math.nan),
        Release(0, events.laplace(1.0), "laplace", 1.0, math.nan),
    ],
)
def test_senseless_entries_are_refused(path: Path, entry: Release) -> None:
    with LedgerFile.create(path, HEADER, durable=True) as ledger:
        with pytest.raises(UsageError):
            ledger.charge(entry)
        assert ledger.messages == 0


def test_senseless_settings_are_refused(path: Path) -> None:
    with pytest.raises(UsageError, match="rows"):
        Ledger([])
    for epsilon in (0.0, -1.0):
        with pytest.raises(UsageError):
            Budget(epsilon)
    with pytest.raises(UsageError, match="rows"):
        LedgerFile.create(path, {"run": "r1"}, durable=True)
    assert not path.exists()


KILLER = """
import json, os, random, shutil, sys, time
from pathlib import Path
from dpps.noise.events import laplace
from dpps.privacy import LedgerFile, Release, witness_of

folder, header, kills = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
path, marks = folder / "ledger.jsonl", folder / "sent"
LedgerFile.create(path, header, durable=True).close()
marks.touch()

def work(start):
    out = os.open(marks, os.O_WRONLY | os.O_APPEND)
    ledger = LedgerFile.open(path, header, durable=True)
    for number in range(start, 1 << 30):
        ledger.charge(Release(number, laplace(10.0), "laplace", 0.1, 1.0))
        os.write(out, b"%d\\n" % number)

for kill in range(kills):
    sent = marks.read_text().split()
    # restored from an older checkpoint: some rounds are replayed
    start = max(0, int(sent[-1]) - 2) if sent else 0
    child = os.fork()
    if child == 0:
        work(start)
    while len(marks.read_bytes().split()) < len(sent) + 2:  # however slow the machine is
        time.sleep(0.001)
    time.sleep(random.uniform(0, 0.1))
    os.kill(child, 9)
    os.waitpid(child, 0)
    copy = folder / f"ledger.{kill}"
    shutil.copy(path, copy)
    shutil.copy(witness_of(path), witness_of(copy))
"""


def test_kill_at_any_moment_never_loses_a_message(tmp_path: Path) -> None:
    kills = 6
    command = [sys.executable, "-c", KILLER, str(tmp_path), json.dumps(HEADER), str(kills)]
    subprocess.run(command, check=True, timeout=600)
    sent = Counter(int(number) for number in (tmp_path / "sent").read_text().split())
    assert sum(sent.values()) > kills  # the children did get to send
    counts = []
    for kill in range(kills):
        with LedgerFile.open(tmp_path / f"ledger.{kill}", HEADER, durable=False) as ledger:
            counts.append(ledger.messages)
            charged = Counter(number for number, _ in ledger.history)
    assert counts == sorted(counts)
    assert all(charged[number] >= times for number, times in sent.items())
