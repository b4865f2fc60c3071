"""A ledger that was lost, replaced by an older copy, or is written by two: refused, whatever it looks like by itself."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dpps.errors import RunError, UsageError
from dpps.noise import events
from dpps.privacy import LedgerFile, Mark, Release, Witness, unused, witness_of

HEADER = {"run": "r1", "rows": [0, 1]}


def laplace(number: int) -> Release:
    return Release(number, events.laplace(10.0), "laplace", 0.1, 1.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger of five messages; `ledger.old` and its witness are as they were after two."""
    path = tmp_path / "ledger.jsonl"
    with LedgerFile.create(path, HEADER, durable=True, processes=3) as ledger:
        for number in range(5):
            ledger.charge(laplace(number))
            if number == 1:
                shutil.copy(path, tmp_path / "ledger.old")
                shutil.copy(witness_of(path), witness_of(tmp_path / "ledger.old"))
    return path


def refused(path: Path, match: str) -> None:
    for _ in range(2):  # a refusal changes nothing
        with pytest.raises(RunError, match=match):
            LedgerFile.open(path, HEADER, durable=True)


def test_an_older_copy_is_refused_and_not_even_read(path: Path) -> None:
    assert LedgerFile.read(path).messages == 5
    shutil.copy(path.with_name("ledger.old"), path)
    refused(path, "3 lines .*witness.*line 6")
    with pytest.raises(RunError, match=r"3 lines .*witness.*line 6"):
        LedgerFile.read(path)
    witness_of(path).unlink()
    assert LedgerFile.read(path).messages == 2, "a copy by itself is what it is"


def test_a_missing_ledger_is_refused_and_never_started_afresh(path: Path) -> None:
    path.unlink()
    refused(path, "ledger.jsonl.*No such file")
    with pytest.raises(UsageError, match=r"ledger\.jsonl"):
        LedgerFile.create(path, HEADER, durable=True)
    assert not path.exists()


@pytest.mark.parametrize("content", [b"", b'{"format":"dpps-led'])
def test_an_emptied_ledger_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    refused(path, "0 lines .*witness.*line 6")
    assert path.read_bytes() == content


def test_another_ledger_of_the_same_run_is_refused(path: Path) -> None:
    other = path.with_name("other")
    with LedgerFile.create(other, HEADER, durable=True) as ledger:
        for number in range(7):
            ledger.charge(laplace(number + 1))
    shutil.copy(other, path)
    refused(path, "8 lines .*witness.*line 6")


def test_a_missing_or_damaged_witness_is_refused(path: Path) -> None:
    witness = witness_of(path)
    content = witness.read_bytes()
    for damaged in (b"", b"x" * len(content), content[::-1]):
        witness.write_bytes(damaged)
        refused(path, witness.name)
    witness.unlink()
    refused(path, f"{witness.name}.*No such file")


def test_a_witness_that_lags_is_believed_and_catches_up(path: Path) -> None:
    """A crash between the two files; an older witness alone proves less, and nothing wrong."""
    shutil.copy(witness_of(path.with_name("ledger.old")), witness_of(path))
    with LedgerFile.open(path, HEADER, durable=True) as ledger:
        assert ledger.messages == 5
    shutil.copy(path.with_name("ledger.old"), path)
    refused(path, "line 6")


def test_a_half_written_record_leaves_the_one_before(path: Path) -> None:
    """Whichever byte the crash came at."""
    with LedgerFile.open(path, HEADER, durable=True) as ledger:
        ledger.charge(laplace(5))
        before = witness_of(path).read_bytes()
        ledger.charge(laplace(6))
        after = witness_of(path).read_bytes()
    first = next(k for k in range(len(before)) if before[k] != after[k])
    for end in range(first, len(before), 7):
        witness_of(path).write_bytes(after[:end] + before[end:])
        opened = Witness.open(witness_of(path))
        opened.close()
        assert opened.mark.lines in (7, 8)


def test_what_was_received_is_written_with_the_next_charge_and_at_the_end(path: Path) -> None:
    with LedgerFile.open(path, HEADER, durable=True) as ledger:
        assert ledger.received == [0, 0, 0]
        ledger.received[2] = 5
        ledger.charge(laplace(5))
        assert Witness.open(witness_of(path)).received == [0, 0, 5]
        ledger.received[1] = 6
    with LedgerFile.open(path, HEADER, durable=True) as ledger:
        assert ledger.received == [0, 6, 5]


@pytest.mark.parametrize("processes", [1, 31, 32, 33, 1000])
def test_records_fit_for_any_number_of_processes(tmp_path: Path, processes: int) -> None:
    path, mark = tmp_path / "witness", Mark(10**11, "f" * 32)
    witness = Witness.create(path, Mark(1, "0" * 32), processes)
    size = path.stat().st_size
    witness.received[:] = [10**11] * processes
    for _ in range(3):
        witness.record(mark)
    witness.close()
    assert path.stat().st_size == size
    again = Witness.open(path)
    again.close()
    assert (again.mark, again.received) == (mark, [10**11] * processes)


def test_a_checkpoint_is_a_witness(path: Path) -> None:
    with LedgerFile.open(path, HEADER, durable=True) as ledger:
        mark = ledger.mark
    for name in (path, witness_of(path)):  # both put back together
        shutil.copy(name.with_name(name.name.replace("ledger.jsonl", "ledger.old")), name)
    with LedgerFile.open(path, HEADER, durable=True) as ledger:
        ledger.check_holds(ledger.mark, "itself")
        with pytest.raises(RunError, match=r"3 lines .*round 5 .*line 6"):
            ledger.check_holds(mark, "the checkpoint of round 5")


def test_a_failed_witness_stops_everything(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    ledger = LedgerFile.open(path, HEADER, durable=True)
    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", full)
        with pytest.raises(RunError, match=r"ledger\.jsonl\.witness.*No space"):
            ledger.charge(laplace(5))
    with pytest.raises(RunError, match=r"ledger\.jsonl"):
        ledger.charge(laplace(5))
    ledger.close()
    with LedgerFile.open(path, HEADER, durable=True) as again:
        assert again.messages == 6  # charged, never sent: on the safe side


def test_unused(path: Path, tmp_path: Path) -> None:
    assert not unused(path)
    fresh = tmp_path / "fresh"
    assert unused(fresh)
    for _ in range(2):  # a start that died after its first line is begun again
        LedgerFile.create(fresh, HEADER, durable=True).close()
        assert unused(fresh)
    fresh.write_text("something of yours\n")
    with pytest.raises(UsageError, match="fresh"):
        LedgerFile.create(fresh, HEADER, durable=True)
    assert fresh.read_text() == "something of yours\n"


# One writer

ONE_WRITER = "(ledger.jsonl|fresh),.*one writer"

HOLDER = """
import sys
from dpps.privacy import LedgerFile
ledger = LedgerFile.open(sys.argv[1], {"run": "r1", "rows": [0, 1]}, durable=True)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_writer_is_refused_until_the_first_closes(path: Path) -> None:
    content, refusals = path.read_bytes(), []

    def elsewhere() -> None:
        with pytest.raises(RunError, match=ONE_WRITER) as refusal:
            LedgerFile.open(path, HEADER, durable=True)
        refusals.append(str(refusal.value))

    with LedgerFile.open(path, HEADER, durable=True):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        elsewhere()
        fresh = path.with_name("fresh")
        with LedgerFile.create(fresh, HEADER, durable=True), pytest.raises(RunError, match=ONE_WRITER):
            LedgerFile.create(fresh, HEADER, durable=True)
    assert len(refusals) == 2
    assert "\n" not in refusals[0]
    assert path.read_bytes() == content
    LedgerFile.open(path, HEADER, durable=True).close()


def test_the_lock_ends_with_its_process(path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        refused(path, ONE_WRITER)
        holder.kill()
        holder.wait()
    LedgerFile.open(path, HEADER, durable=True).close()


def test_a_forked_child_does_not_keep_the_lock(path: Path) -> None:
    ledger = LedgerFile.open(path, HEADER, durable=True)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        ledger.close()
        LedgerFile.open(path, HEADER, durable=True).close()
    finally:
        os.close(writing)
        os.waitpid(child, 0)
        os.close(reading)
