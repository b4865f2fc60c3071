"""A member's status: a small file in its folder, and a live page for browsers on this machine."""

import ipaddress
import json
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

from dpps.disk import private, replacing, writing
from dpps.errors import RunError, UsageError
from dpps.peers.identity import check_address

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
    revision: int
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
    against: str = ""
    """Where members share noise: how many may collude, and how many may be lost."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Status":
        members = [Peer(**each) for each in found["members"]]
        return cls(**{**found, "members": members, "links": [(i, j) for i, j in found["links"]]})

    @property
    def here(self) -> list[str]:
        """Names of the members that take part, this one included."""
        return [peer.name for peer in self.members if peer.state in ("here", "finished")]

    @property
    def protected(self) -> str:
        """The unit, and against whom, where that is not everybody."""
        return f"unit {self.unit}, {self.against}" if self.against else f"unit {self.unit}"

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
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # it is there, and another user's
        return self.state not in OVER and age < LATE


def write_status(folder: Path, status: Status) -> None:
    """Whole or not at all; it is renewed so often that it need not outlive a power cut. RunError: it could not be written."""
    status.updated, status.process = now(), os.getpid()
    target = folder / FILE
    with writing(target), replacing(target) as aside, open(aside, "w", opener=private) as file:
        json.dump(status.to_json(), file)


def read_status(folder: Path) -> Status:
    """The status in a run's folder. UsageError: there is none."""
    try:
        return Status.from_json(json.loads((folder / FILE).read_text()))
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"{folder} holds no run of dpps federation join: name the folder given with its --out"
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


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'"


def check_page(address: str) -> tuple[str, int]:
    """Host and port of a page. UsageError: others than this machine could see it."""
    host, _, port = check_address("--page", address).rpartition(":")
    try:
        local = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        local = host == "localhost"
    if not local:
        raise UsageError(
            f"--page is {address}: it shows private numbers, so it stays on this machine; give 127.0.0.1:{port}, and see it from "
            "elsewhere through ssh -L"
        )
    return host.strip("[]"), int(port)


class LivePage:
    """Serves the page until it is closed.

    Args:
        address: HOST:PORT of this machine.
        status: gives what is shown.

    Attributes:
        url: where it is; a random part of it keeps out other users of this machine.
    """

    def __init__(self, address: str, status: Callable[[], Status]) -> None:
        host, port = check_page(address)
        page = files("dpps.peers").joinpath("live.html").read_bytes()
        token = secrets.token_urlsafe(16)
        self.url = f"http://{address}/{token}/"

        class Answers(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                name = self.headers.get("Host", "").rpartition(":")[0]
                if name not in ("127.0.0.1", "localhost", "[::1]", address.rpartition(":")[0]):
                    # a page elsewhere whose name was turned to this machine
                    self.send_error(HTTPStatus.FORBIDDEN)
                elif secrets.compare_digest(self.path.encode(), f"/{token}/".encode()):
                    self._send(page, "text/html; charset=utf-8")
                elif secrets.compare_digest(self.path.encode(), f"/{token}/status.json".encode()):
                    self._send(json.dumps(status().to_json()).encode(), "application/json")
                else:
                    self.send_error(HTTPStatus.NOT_FOUND)

            def _send(self, content: bytes, kind: str) -> None:
                self.send_response(HTTPStatus.OK)
                facts = {
                    "Content-Type": kind,
                    "Content-Length": str(len(content)),
                    "Cache-Control": "no-store",
                    "Content-Security-Policy": _POLICY,
                    "X-Content-Type-Options": "nosniff",
                    "Referrer-Policy": "no-referrer",
                }
                for name, value in facts.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
                """Nobody needs to know who looks."""

        try:
            self._server = ThreadingHTTPServer((host, port), Answers)
        except OSError as error:
            raise RunError(
                f"--page {address} cannot be served: {error.strerror}; choose another port"
            ) from error
        self._server.daemon_threads = True
        self.address = address
        threading.Thread(target=self._server.serve_forever, name="dpps page", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> "LivePage":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
