"""A member's ledger and outbox after kills, power cuts and Ctrl-C at any moment: the run opens again, and everything sent is charged."""

import os
import random
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from dpps.noise import gaussian
from dpps.peers import Outbox, OutboxLedger, read_whole
from dpps.peers.store import OUTBOX
from dpps.privacy import LedgerFile, Release

HEADER = {"rows": [0], "run": "x", "federation": "f"}


class Disk:
    """Remembers what was waited for. A power cut leaves that, and of what was written since nothing, a part, or zeros."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._safe: dict[int, bytes] = {}
        monkeypatch.setattr(os, "fsync", self._sync)

    def _sync(self, handle: int) -> None:
        status = os.fstat(handle)
        if stat.S_ISREG(status.st_mode):
            path = next(p for p in self.folder.rglob("*") if p.is_file() and p.stat().st_ino == status.st_ino)
            self._safe[status.st_ino] = path.read_bytes()

    def cut_power(self, draw: random.Random) -> None:
        for path in (p for p in self.folder.rglob("*") if p.is_file()):
            written, safe = path.read_bytes(), self._safe.get(path.stat().st_ino, b"")
            lost = written[len(safe) :] if written.startswith(safe) else b""
            middle = len(lost) // 2
            left = draw.choice([b"", lost[:middle], bytes(len(lost)), bytes(middle) + lost[middle:]])
            path.write_bytes(safe + left)
            self._safe[path.stat().st_ino] = safe + left


class Member:
    """What a member does with its disk, round for round; `sent` is what left it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sent = folder, 0
        self.start()

    def start(self) -> None:
        path, self.outbox = self.folder / "ledger.jsonl", Outbox(self.folder / OUTBOX)
        found = self.outbox.read()
        opening = OutboxLedger.create if found is None else OutboxLedger.open
        self.ledger = opening(path, HEADER, durable=True)
        if found is not None:
            self.ledger.recover(*found[1]["ledger"])
        self._write()

    def round(self) -> None:
        self.ledger.charge(Release(self.sent, gaussian(2.0), "gaussian", 1.0, 2.0, "all"))
        self._write()
        self.sent += 1

    def _write(self) -> None:
        self.outbox.write({}, {"ledger": self.ledger.tail()})
        self.ledger.kept()

    def kill(self) -> None:
        self.ledger._abandon()


@pytest.mark.parametrize("seed", range(15))
def test_kills_and_power_cuts_in_any_order(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run opens again, its ledger has every round once, and so has whoever looks at it meanwhile."""
    disk, draw = Disk(tmp_path, monkeypatch), random.Random(seed)
    member = Member(tmp_path)
    for _ in range(12):
        for _ in range(draw.choice([0, 1, 2, 5, 20])):
            member.round()
        if draw.random() < 0.3:
            member.ledger.close()
        else:
            member.kill()
        if draw.random() < 0.5:
            disk.cut_power(draw)
        looked = read_whole(tmp_path / "ledger.jsonl")
        assert [round_ for round_, _ in looked.history] == list(range(member.sent))
        member.start()
        assert [round_ for round_, _ in member.ledger.history] == list(range(member.sent))
    member.ledger.close()
    assert [r for r, _ in LedgerFile.read(tmp_path / "ledger.jsonl").history] == list(range(member.sent))


class _Interrupting:
    """Ctrl-C before the `at`-th line that is executed in the modules of ledger, witness and outbox."""

    FILES = ("ledger.py", "store.py")

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(self.FILES):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self

    def during(self, work: Callable[[], None]) -> bool:
        """Whether it came to that."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            work()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file that was just opened
@pytest.mark.parametrize("earlier", [0, 1, 15])
def test_ctrl_c_between_any_two_lines_of_a_round(
    earlier: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the run closed as a run closes: nothing that was sent is missing, and at most the round that was under way is charged."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    at, interrupted = 0, True
    while interrupted:
        at += 1
        folder = tmp_path / str(at)
        folder.mkdir()
        member = Member(folder)
        for _ in range(earlier):
            member.round()
        interrupted = _Interrupting(at).during(member.round)
        member.ledger.close()
        member.start()
        assert member.ledger.messages in ({member.sent, member.sent + 1} if interrupted else {earlier + 1})
        member.ledger.close()
    assert at > 30


@pytest.mark.parametrize("durable", [True, False])
def test_ctrl_c_between_any_two_lines_of_a_charge(
    durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same of a run without an outbox."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    at, interrupted = 0, True
    while interrupted:
        at += 1
        path = tmp_path / f"{at}.jsonl"
        ledger = LedgerFile.create(path, HEADER, durable)

        def charge(ledger: LedgerFile = ledger) -> None:
            for round_ in range(2):
                ledger.charge(Release(round_, gaussian(2.0), "gaussian", 1.0, 2.0, "all"))
            ledger.flush()

        interrupted = _Interrupting(at).during(charge)
        charged = ledger.messages
        ledger.close()
        with LedgerFile.open(path, HEADER, durable) as again:
            assert again.messages >= charged or not durable
            assert again.messages <= 2
    assert at > 20
