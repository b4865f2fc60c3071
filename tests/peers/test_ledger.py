"""The ledger whose newest lines are in the outbox."""

from pathlib import Path

import pytest

from dpps.errors import RunError
from dpps.noise import gaussian
from dpps.peers import Outbox, OutboxLedger, read_whole
from dpps.privacy import LedgerFile, Release

HEADER = {"rows": [0], "run": "x"}


def _charge(ledger: OutboxLedger, round_: int) -> None:
    ledger.charge(Release(round_, gaussian(2.0), "gaussian", 1.0, 2.0, "all"))


def _rounds(path: Path) -> list[int]:
    return [round_ for round_, _ in LedgerFile.read(path).history]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def test_what_is_not_in_the_outbox_never_left(path: Path) -> None:
    ledger = OutboxLedger.create(path, HEADER, durable=True)
    _charge(ledger, 0)
    ledger.kept()
    _charge(ledger, 1)
    ledger.close()
    assert _rounds(path) == [0]


def test_lines_that_only_the_outbox_has_are_put_back(path: Path) -> None:
    ledger = OutboxLedger.create(path, HEADER, durable=True)
    begun = path.read_bytes()
    for round_ in range(3):
        _charge(ledger, round_)
        tail = ledger.tail()
        ledger.kept()
    ledger.close()
    for lost in (begun, path.read_bytes(), path.read_bytes()[:-5]):
        path.write_bytes(lost)
        path.with_name("ledger.jsonl.witness").unlink()
        LedgerFile.create(path.with_name("other.jsonl"), HEADER, True).close()
        path.with_name("other.jsonl.witness").rename(path.with_name("ledger.jsonl.witness"))
        path.with_name("other.jsonl").unlink()
        again = OutboxLedger.open(path, HEADER, durable=True)
        again.recover(*tail)
        assert again.messages == 3
        again.close()
        assert _rounds(path) == [0, 1, 2]


def test_a_ledger_and_an_outbox_of_different_times_are_refused(path: Path) -> None:
    ledger = OutboxLedger.create(path, HEADER, durable=True)
    _charge(ledger, 0)
    early = ledger.tail()
    ledger.kept()
    for round_ in range(1, 20):
        _charge(ledger, round_)
        late = ledger.tail()
        ledger.kept()
    ledger.close()
    whole = path.read_bytes()
    again = OutboxLedger.open(path, HEADER, durable=True)
    with pytest.raises(RunError, match=r"ledger\.jsonl.* 21 lines.*outbox"):
        again.recover(*early)
    again.recover(*late)
    again.close()
    path.write_bytes(b"".join(line + b"\n" for line in whole.split(b"\n")[:3]))
    with pytest.raises(RunError, match=r"ledger\.jsonl.* 3 lines.*witness.*line 21"):
        OutboxLedger.open(path, HEADER, durable=True)


def test_a_look_at_a_members_ledger_has_the_lines_that_only_its_outbox_has(path: Path) -> None:
    header = {**HEADER, "federation": "f"}
    ledger, outbox = OutboxLedger.create(path, header, durable=True), Outbox(path.parent / "outbox")
    for round_ in range(20):  # the first 16 are waited for on disk
        _charge(ledger, round_)
        outbox.write({}, {"ledger": ledger.tail()})
        ledger.kept()
    ledger.close()
    lines = path.read_bytes().splitlines(keepends=True)
    for kept in (21, 19, 17):
        path.write_bytes(b"".join(lines[:kept]) + lines[-1][:-5])
        found = read_whole(path)
        assert found is not None
        assert [round_ for round_, _ in found.history] == list(range(20))
    path.write_bytes(b"".join(lines[:16]))
    assert read_whole(path) is None, "a line that neither has"
    path.write_bytes(b"".join(lines))
    for file in (path.parent / "outbox").iterdir():
        file.unlink()
    assert read_whole(path) is None, "nobody knows whether there were more"


def test_a_look_at_the_ledger_of_a_run_without_an_outbox(path: Path) -> None:
    with LedgerFile.create(path, HEADER, durable=True) as ledger:
        ledger.charge(Release(0, gaussian(2.0), "gaussian", 1.0, 2.0, "all"))
    found = read_whole(path)
    assert found is not None
    assert found.messages == 1
