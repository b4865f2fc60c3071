"""A ledger whose newest lines travel in the outbox: one wait for the disk per round puts both the charge and
the message there."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from dpps.errors import RunError
from dpps.peers.outbox import Outbox
from dpps.privacy.ledger import Budget, Release
from dpps.privacy.ledger_file import LedgerFile, Mark, Witness, believed, unsealed, witness_of

log = logging.getLogger(__name__)

OUTBOX = "outbox"
"""The folder of the outbox, beside the ledger."""

_LINES = 16
"""So many lines are in the outbox only, as far as the disk has promised; then the ledger's own file is waited for."""


class OutboxLedger(LedgerFile):
    """Charges are made in memory, go to disk with the outbox, and then into the ledger's file.

    A charge whose outbox was never written is of a message that never left: it is forgotten. One whose outbox was written is put
    into the file at the next start if it is not there yet (`recover`).
    """

    def __init__(
        self, path: Path, header: Mapping[str, Any], durable: bool, budget: Budget | None = None
    ) -> None:
        super().__init__(path, header, durable, budget)
        self._tail: list[bytes] = []
        self._appended = 0
        """So many lines of the tail are in the file, though perhaps not on the disk."""

    def _write(self, release: Release) -> None:
        with self._whole():
            self._tail.append(self._sealed(release.to_json()))

    def tail(self) -> tuple[int, list[str]]:
        """The number of the first line that only the outbox is sure to have, and the lines from there: for the outbox."""
        return self.mark.lines - len(self._tail) + 1, [line.decode() for line in self._tail]

    def kept(self) -> None:
        """The outbox with all lines is on disk: append them to the file."""
        with self._whole():
            data = b"".join(self._tail[self._appended :])
            try:
                while data:
                    data = data[os.write(self._file, data) :]
                self._appended = len(self._tail)
                if len(self._tail) >= _LINES:
                    self._settle()
            except OSError as error:
                raise RunError(
                    f"ledger {self.path} cannot be written: {error.strerror}; the message was not sent"
                ) from error

    def _settle(self) -> None:
        """Wait until the file itself has all lines that are kept."""
        self._put([])
        self._tail, self._appended = [], 0

    def flush(self) -> None:
        """What is not in the outbox never left and is not written down."""
        if self._tail and self._appended == len(self._tail):
            with self._whole():
                self._settle()

    def _close_witness(self, witness: Witness) -> None:
        """It was told of all that the file is sure to have, and must not hear of more."""
        witness.close()

    def _whole_lines(self, data: bytes, mark: Mark | None) -> bytes:
        """Up to where a power cut has left holes in lines that were not waited for: if their messages left, the outbox has them."""
        seal, end = "", 0
        for number, line in enumerate(data.split(b"\n")[:-1], start=1):
            try:
                _, seal = unsealed(self.path, line, number, seal)
            except RunError:
                if mark is None or number <= mark.lines:
                    raise
                break
            end += len(line) + 1
        return data[:end]

    def _cut(self, whole: int, size: int) -> None:
        if whole < size:
            log.info(
                "ledger %s: last lines that are not whole cut off; the outbox decides whether they count",
                self.path,
            )
            os.truncate(self.path, whole)

    def recover(self, first: int, lines: list[str]) -> None:
        """Put lines into the file that the outbox has and the file lacks, and wait until it is sure to have them all: the
        outbox that is written next has only later ones.

        Raises:
            RunError: file and outbox are not of the same run or time.
        """
        have, last = self.mark.lines, first + len(lines) - 1
        if not first - 1 <= have <= last:
            raise RunError(
                f"ledger {self.path} has {have} lines and the outbox knows lines {first} to {last}: one of "
                "them was replaced by an older "
                "copy or damaged, so what was spent is not known; restore both, or leave this run"
            )
        with self._whole():
            missing = self._add_missing(first, lines)
            if lines and f'"crc":"{self.mark.seal}"' not in lines[-1]:
                raise RunError(
                    f"ledger {self.path} and the outbox beside it are of different runs: restore both"
                )
            self._put(missing)

    def _add_missing(self, first: int, lines: list[str]) -> list[bytes]:
        """Count the lines that the outbox has and the file lacks, and name them."""
        have = self.mark.lines
        missing = [line.encode() for line in lines[have - first + 1 :]]
        for number, line in enumerate(missing, start=have + 1):
            record = self._unsealed(line.rstrip(b"\n"), number)
            self._count(believed(self.path, number, record, self.rows))
        return missing

    @classmethod
    def read_with_outbox(cls, path: Path) -> Self | None:
        """A look at a member's ledger with the lines that only its outbox has: after a power cut, or while it runs.

        None where the outbox is gone and they may be gone with it.
        """
        found = Outbox(path.parent / OUTBOX).read()  # first: what it does not know yet, the file has
        if found is None:
            return None
        ledger = cls.read(path, whole=False)
        first, lines = found[1]["ledger"]
        if ledger.mark.lines < first - 1:
            return None
        ledger._add_missing(first, lines)
        return ledger


def read_whole(path: Path) -> LedgerFile | None:
    """A look at the ledger of any run, with all its lines; None where some of them may be gone."""
    if "federation" in LedgerFile.read_header(path):
        return OutboxLedger.read_with_outbox(path)
    try:
        return LedgerFile.read(path) if witness_of(path).exists() else None
    except RunError:  # damaged, or an older copy
        return None
