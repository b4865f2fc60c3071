"""How a member's run stands: a small file in its folder, for other terminals, the live page and operators."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dpps.disk import private, writing
from dpps.errors import UsageError

FILE, LEAVE = "status.json", "leave.request"
WAITING, RUNNING, ENDING = "waiting for others", "running", "averaging"
STAYING = "finished, and there for members that come back late"
FINISHED, STOPPED, LEFT, FAILED = "finished", "stopped", "left", "failed"
OVER = (FINISHED, STOPPED, LEFT, FAILED)
LATE = 30.0
"""Seconds after which a status that nobody renews is not believed any more."""


@dataclass
class Peer:
    """One member, as this one sees it."""

    name: str
    state: str
    round: int
    heard: float | None
    connected: bool
    sent: int = 0
    received: int = 0
    why: str = ""


@dataclass
class Status:
    """What there is to know; every value may be told to whoever may read the run's folder."""

    member: str
    federation: str
    epoch: int
    state: str = WAITING
    round: int = 0
    rounds: int = 0
    unit: str = ""
    epsilon: float | None = None
    """Spent by the ledger after `epsilon_round` rounds; accountants take a while, so this may be a few rounds ago."""
    epsilon_round: int = 0
    promised: float | None = None
    """The most that the contract allows."""
    delta: float | None = None
    bytes_sent: int = 0
    loss: float | None = None
    """Of this member's last round, not noised: for its own eyes."""
    accuracy: float | None = None
    """On the test set at the last end of an epoch, not noised: for its own eyes."""
    members: list[Peer] = field(default_factory=list)
    links: list[tuple[int, int]] = field(default_factory=list)
    """Which rows exchange messages."""
    refusals: list[str] = field(default_factory=list)
    message: str = ""
    process: int = 0
    since: str = ""
    updated: str = ""

    def to_json(self) -> dict[str, Any]:
        """For the file and the page."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Status":
        """What `to_json` wrote."""
        members = [Peer(**each) for each in found["members"]]
        return cls(**{**found, "members": members, "links": [(i, j) for i, j in found["links"]]})

    @property
    def here(self) -> list[str]:
        """Names of the members that take part, this one included."""
        return [peer.name for peer in self.members if peer.state in ("here", "finished")]

    @property
    def spent(self) -> str:
        """The epsilon in words, with what was promised, and the round it is of where that is not the last."""
        if self.epsilon is None:
            return "epsilon not computed yet"
        from dpps.privacy.accountant import label

        promised = "" if self.promised is None else f" of {self.promised:g}"
        late = "" if self.epsilon_round >= self.round else f" after round {self.epsilon_round}"
        return f"{label(self.epsilon)} spent{promised}{late}"

    @property
    def alive(self) -> bool:
        """Whether the process still writes: then its state is what it says."""
        age = (datetime.now(UTC) - datetime.fromisoformat(self.updated)).total_seconds()
        return self.state not in OVER and age < LATE and _exists(self.process)


def write_status(folder: Path, status: Status) -> None:
    """Whole or not at all; it is renewed so often that it need not outlive a power cut.

    Raises:
        RunError: it could not be written.
    """
    status.updated, status.process = now(), os.getpid()
    aside = folder / f"{FILE}.part"
    with writing(folder / FILE):
        with open(aside, "w", opener=private) as file:
            json.dump(status.to_json(), file)
        aside.replace(folder / FILE)


def read_status(folder: Path) -> Status:
    """The status in a run's folder.

    Raises:
        UsageError: there is none.
    """
    try:
        return Status.from_json(json.loads((folder / FILE).read_text()))
    except FileNotFoundError:
        raise UsageError(
            f"{folder} holds no run of dpps join: name the folder given with its --out"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{folder / FILE} cannot be read ({error}): is the run of another version?"
        ) from error


def now() -> str:
    """The time, as the file has it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def bytes_in_words(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
