"""The outbox: whole or not at all, and the newest that is whole; and the ledger whose newest lines are in it."""

import errno
from pathlib import Path

import pytest
import torch

from dpps.errors import RunError
from dpps.noise import gaussian
from dpps.peers import Outbox, OutboxLedger, read_whole
from dpps.privacy import LedgerFile, Release


def _write(outbox: Outbox, value: int) -> None:
    outbox.write({"x": torch.full((3,), float(value))}, {"value": value})


def test_the_newest_state_is_read(tmp_path: Path) -> None:
    assert Outbox(tmp_path / "o").read() is None
    outbox = Outbox(tmp_path / "o")
    for value in range(5):
        _write(outbox, value)
        found = Outbox(tmp_path / "o").read()
        assert found[1]["value"] == value
        assert found[0]["x"].tolist() == [value] * 3
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (tmp_path / "o").iterdir())


@pytest.mark.parametrize("keep", [0, 20, 60, -1])
def test_a_write_that_was_cut_off_leaves_the_one_before(keep: int, tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "o")
    _write(outbox, 1)
    _write(outbox, 2)
    newest = max((tmp_path / "o").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    newest.write_bytes(newest.read_bytes()[:keep])
    again = Outbox(tmp_path / "o")
    found = again.read()
    assert found[1]["value"] == 1
    _write(again, 3)
    found = Outbox(tmp_path / "o").read()
    assert found[1]["value"] == 3


def test_damage_is_not_taken_for_a_new_start(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "o")
    _write(outbox, 1)
    for path in (tmp_path / "o").iterdir():
        path.write_bytes(b"x" + path.read_bytes()[1:])
    with pytest.raises(RunError, match="damaged"):
        Outbox(tmp_path / "o").read()


def test_a_first_write_that_was_cut_off_is_a_new_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(RunError, match=r"outbox .*No space"):
            _write(Outbox(tmp_path / "o"), 1)
    assert Outbox(tmp_path / "o").read() is None
    _write(Outbox(tmp_path / "o"), 2)
    found = Outbox(tmp_path / "o").read()
    assert found[1]["value"] == 2


def test_a_disk_that_refuses(tmp_path: Path) -> None:
    (tmp_path / "o").write_text("a file")
    with pytest.raises(RunError, match=r"outbox .*Not a directory"):
        _write(Outbox(tmp_path / "o"), 1)


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
    assert found.messages == 1
