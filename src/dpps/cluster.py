"""Processes that find each other, make sure they belong together, and tell each other when something goes wrong.

Rank 0 holds the meeting point: a key-value store that listens on one address only. Through it every process says who it is; all
compare, and with a secret in $DPPS_SECRET all prove that they know it. Only then rows may travel.
"""

import hashlib
import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from dpps.errors import PeerError, RunError, UsageError
from dpps.fabric.wire import SMALL, Message, Wire

SECRET = "DPPS_SECRET"
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Shares of --timeout, so that all is over within it: waiting for a peer; one question to the meeting point (one to report, one to
# find out who failed); and how long rank 0, which needs not wait for answers, stays for others who ask.
_PATIENCE, _ASKING, _STAYING = 0.6, 0.15, 0.2
_POLL = 0.02
_LINGER = 5.0

T = TypeVar("T")


def started_distributed() -> bool:
    """Whether torchrun, `dpps launch` or a user by hand started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def restarted() -> bool:
    """Whether torchrun has restarted the processes after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


@dataclass(frozen=True)
class Place:
    """Which of the processes this is, and where they meet; what torchrun puts into the environment."""

    rank: int
    size: int
    host: str
    port: int
    by_agent: bool = False
    """torchrun itself already listens there and tells everybody where the real meeting point is."""
    attempt: str = "0"

    @classmethod
    def from_environment(cls) -> "Place":
        """Of torchrun, `dpps launch`, or set by hand: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT."""
        missing = [name for name in _NEEDED if name not in os.environ]
        if missing:
            raise UsageError(
                f"a distributed run needs {', '.join(_NEEDED)} in the environment and {', '.join(missing)} is missing: "
                "start it with torchrun or dpps launch"
            )
        try:
            rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        except ValueError as error:
            raise UsageError(f"RANK, WORLD_SIZE and MASTER_PORT must be whole numbers: {error}") from None
        if not 0 <= rank < size:
            raise UsageError(f"RANK is {rank}: with WORLD_SIZE {size} it must be 0 to {size - 1}")
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        run, count = (
            os.environ.get("TORCHELASTIC_RUN_ID", ""),
            os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )
        return cls(rank, size, os.environ["MASTER_ADDR"], port, agent, f"{run}/{count}")


@dataclass
class Cluster:
    """The processes of one run, from the meeting point on.

    Args:
        place: which process this is.
        timeout: seconds within which a dead or hung process is noticed.
        secret: what all processes must know; empty for none.
    """

    place: Place
    timeout: float = 60.0
    secret: bytes = b""
    addresses: list[str] = field(default_factory=list)
    """Of all ranks, known after the handshake."""
    store: Any = None
    wire: Wire | None = None
    stuck: bool = False
    """Whether a question to the meeting point was never answered: then only `os._exit` ends this process cleanly."""

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.place.rank

    @property
    def patience(self) -> float:
        """Seconds to wait for a peer."""
        return _PATIENCE * self.timeout

    # Meeting

    def join(self) -> "Cluster":
        """Connect to the meeting point; rank 0 opens it.

        Raises:
            RunError: it cannot be reached, or does not answer.
        """
        self.store = self._answer(self._open, self.timeout)
        return self

    def _open(self) -> Any:
        host, port = self.place.host, self.place.port
        if not self.place.by_agent:
            return self._host(host, port)[0] if self.rank == 0 else self._client(host, port)
        agent = self._client(host, port)
        key = f"dpps/{self.place.attempt}"
        if self.rank == 0:
            store, address = self._host(host, 0)
            agent.set(key, json.dumps(address))
            return store
        return self._client(*json.loads(agent.get(key)))

    def _host(self, host: str, port: int) -> tuple[Any, tuple[str, int]]:
        """A store that listens on this address only: left to itself it would listen on every interface."""
        family, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(target)
            listener.listen(1024)
        except OSError as error:
            listener.close()
            raise UsageError(
                f"rank 0 cannot listen on {host}:{port} ({error.strerror}): MASTER_ADDR must be an address of the machine of "
                "rank 0 and MASTER_PORT a free port"
            ) from error
        ip, port = listener.getsockname()[:2]
        store = TCPStore(
            ip, port, None, True, self._delta(), wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._address = ip
        return store, (ip, port)

    def _client(self, host: str, port: int) -> Any:
        _wait_for(host, port, self.timeout)
        store = TCPStore(host, port, None, False, self._delta(), wait_for_workers=False)
        self._address = _address_towards(host, port)
        return store

    _address: str = field(default="", init=False)

    def _delta(self) -> timedelta:
        return timedelta(seconds=self.timeout)

    def _answer(self, question: Callable[[], T], seconds: float) -> T:
        """What the store says. A store whose machine is cut off would keep us waiting, so a thread asks, and only until it was silent once."""
        if self.stuck:
            raise self._unreachable("no answer")
        result: list[T] = []
        failure: list[Exception] = []

        def ask() -> None:
            try:
                result.append(question())
            except Exception as error:  # noqa: BLE001 - handed to the thread that waits
                failure.append(error)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(seconds)
        self.stuck = asking.is_alive()
        if result:
            return result[0]
        if failure and isinstance(failure[0], (UsageError, RunError)):
            raise failure[0]
        raise self._unreachable("connection lost" if failure else "no answer") from (
            failure[0] if failure else None
        )

    def _unreachable(self, why: str) -> RunError:
        where = f"{self.place.host}:{self.place.port}"
        return RunError(
            f"rank 0, which holds the meeting point {where}, cannot be reached from rank {self.rank} ({why})"
        )

    # The handshake

    def meet(self, facts: Mapping[str, Any], device: torch.device | str = "cpu") -> Wire:
        """Compare `facts` with everybody, prove the secret, connect to everybody, and prove it again on every connection.

        Args:
            facts: what must be equal everywhere, by name; the order is that in which differences are reported.
            device: where messages will lie; on a GPU nccl carries them.

        Raises:
            UsageError: somebody differs; names who and in what.
            RunError: somebody did not come.
        """
        transcript = self._answer(lambda: self._compare(facts), self.timeout + _LINGER)
        group = self._answer(lambda: self._connect(device), self.timeout + _LINGER)
        self.wire = Wire(group, self.rank, self.place.size, self.patience, self.trouble, device)
        self._prove_connections(self.wire, transcript)
        return self.wire

    def _compare(self, facts: Mapping[str, Any]) -> bytes:
        mine = {
            "rank": self.rank,
            "nonce": secrets.token_hex(16),
            "address": self._address,
            "facts": {"secret": "set" if self.secret else "not set", **facts},
        }
        text = json.dumps(mine, sort_keys=True)
        if self.store.compare_set(f"hello/{self.rank}", "", text).decode() != text:
            raise UsageError(f"rank {self.rank} is already here: every process needs its own RANK")
        hellos = self._collect("hello")
        said = [json.loads(hello) for hello in hellos]
        self.addresses = [str(hello["address"]) for hello in said]
        _same_facts([hello["facts"] for hello in said], self.rank)
        transcript = hashlib.sha256("\n".join(hellos).encode()).digest()
        if self.secret:
            self.store.set(f"proof/{self.rank}", self._proof(transcript, self.rank).hex())
            proofs = self._collect("proof")
            self._judge([self._is_proof(transcript, r, proof) for r, proof in enumerate(proofs)])
        return transcript

    def _collect(self, what: str) -> list[str]:
        """What every rank has put down under this name; raises when somebody does not come or has given up."""
        deadline = time.monotonic() + self.timeout
        keys = [f"{what}/{rank}" for rank in range(self.place.size)]
        while not self.store.check(keys):
            reports = self._reports()
            if reports:
                raise self._verdict(reports, [], "gave up")
            if time.monotonic() > deadline:
                absent = [r for r, key in enumerate(keys) if not self.store.check([key])]
                raise RunError(
                    f"rank {', '.join(map(str, absent))} did not come within {self.timeout:g} s: "
                    "start all processes within --timeout"
                )
            time.sleep(_POLL)
        return [self.store.get(key).decode() for key in keys]

    def _proof(self, transcript: bytes, *who: int) -> bytes:
        """Fresh every time: the transcript holds a random number of every process."""
        return hmac.digest(self.secret, transcript + repr(who).encode(), "sha256")

    def _is_proof(self, transcript: bytes, rank: int, claimed: str) -> bool:
        return hmac.compare_digest(claimed.encode(), self._proof(transcript, rank).hex().encode())

    def _judge(self, proven: Sequence[bool]) -> None:
        strangers = [rank for rank, good in enumerate(proven) if not good]
        if not strangers:
            return
        if 2 * len(strangers) > self.place.size - 1 and self.place.size > 2:
            raise UsageError(f"rank {self.rank} was refused: its ${SECRET} is not that of the others")
        named = ", ".join(f"{r} ({self.addresses[r]})" for r in strangers)
        raise UsageError(f"rank {named} was refused: its ${SECRET} is not that of rank {self.rank}")

    def _connect(self, device: torch.device | str) -> Any:
        _wake_politely()
        store = PrefixStore("mesh", self.store)
        if torch.device(device).type == "cuda":
            dist.init_process_group(
                "nccl", store=store, rank=self.rank, world_size=self.place.size, timeout=self._delta()
            )
            return dist.group.WORLD
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._delta()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address, lazy_init=False)]
        return dist.ProcessGroupGloo(store, self.rank, self.place.size, options)

    def _prove_connections(self, wire: Wire, transcript: bytes) -> None:
        """The first message on every connection shows that the right process is at its other end."""
        proofs = {p: torch.zeros(32, dtype=torch.uint8, device=wire.device) for p in wire.peers}
        wire.exchange(
            [
                Message(p, SMALL, _tensor(self._proof(transcript, self.rank, p)).to(wire.device))
                for p in proofs
            ],
            [Message(p, SMALL, received) for p, received in proofs.items()],
        )
        for peer, received in proofs.items():
            if not hmac.compare_digest(bytes(received.tolist()), self._proof(transcript, peer, self.rank)):
                raise UsageError(f"rank {peer} was refused: somebody else answers on its connection")

    # Trouble

    def give_up(self, error: Exception) -> None:
        """Tell the others that this process stops; why, only if a peer is to blame: other words may quote this node's data."""
        kind = "its request is wrong" if isinstance(error, UsageError) else "it failed"
        why = (
            str(error) if isinstance(error, PeerError) else f"{kind}; rank {self.rank}'s own output says why"
        )
        with suppress(RunError):
            self._answer(lambda: self._report(why, []), self._asking)
        self._hang_up()

    def trouble(self, lost: Sequence[int], what: str) -> RunError:
        """The error to raise when `lost` ranks are gone or silent: names who failed, not who stopped because of it."""
        try:
            self._answer(lambda: self._report("", lost, what), self._asking)
            self._hang_up()  # after the report: who is cut off by this finds it
            return self._answer(lambda: self._find_out(lost, what), self._asking)
        except RunError as unreachable:
            return unreachable

    def _hang_up(self) -> None:
        if self.wire is not None:
            self.wire.hang_up()

    @property
    def _asking(self) -> float:
        """Seconds for one question to the meeting point."""
        return _ASKING * self.timeout

    @property
    def _grace(self) -> float:
        """Seconds in which the others notice, too: less than the question may take."""
        return min(5.0, 0.6 * self._asking)

    def _find_out(self, lost: Sequence[int], what: str) -> RunError:
        until = time.monotonic() + self._grace
        while time.monotonic() < until:
            reports = self._reports()
            suspects = {r for report in reports.values() for r in report["lost"]} - set(reports)
            if (
                any(report["why"] for report in reports.values())
                or len(suspects) + len(reports) == self.place.size
            ):
                break
            time.sleep(_POLL)
        return self._verdict(self._reports(), lost, what)

    def _report(self, why: str, lost: Sequence[int], what: str = "") -> None:
        text = json.dumps({"why": why, "lost": list(lost), "what": what})
        self.store.compare_set(f"report/{self.rank}", "", text)

    def _reports(self) -> dict[int, dict[str, Any]]:
        ranks = [r for r in range(self.place.size) if self.store.check([f"report/{r}"])]
        return {r: json.loads(self.store.get(f"report/{r}")) for r in ranks}

    def _verdict(self, reports: Mapping[int, Mapping[str, Any]], lost: Sequence[int], what: str) -> RunError:
        """Whoever reports is alive; whoever is missed by somebody and reports nothing has failed."""
        for rank, report in reports.items():
            if report["why"] and rank != self.rank:
                return RunError(f"rank {rank} stopped the run: {report['why']}")
        missed = {
            r: report["what"] for report in reports.values() for r in report["lost"] if r not in reports
        }
        if not missed:
            missed = dict.fromkeys(lost, what)
        named = "; ".join(f"rank {self._named(r)} has failed: {missed[r]}" for r in sorted(missed))
        return RunError(f"{named}; the last checkpoint is intact, go on with --resume")

    def _named(self, rank: int) -> str:
        return f"{rank} ({self.addresses[rank]})" if self.addresses else str(rank)

    def leave(self) -> None:
        """After a failure. Rank 0 stays a moment, so that everybody can still ask who failed."""
        if self.store is None or self.stuck:
            return
        staying = _STAYING * self.timeout
        until = time.monotonic() + staying
        with suppress(RunError):
            self._answer(lambda: self.store.set(f"bye/{self.rank}", ""), staying)
            while self.rank == 0 and self._answer(self._still_asking, staying) and time.monotonic() < until:
                time.sleep(_POLL)

    def _still_asking(self) -> bool:
        """Whether somebody who is not missed has not left yet."""
        reports = self._reports()
        failed = {r for report in reports.values() for r in report["lost"]} - set(reports)
        left = {r for r in range(self.place.size) if self.store.check([f"bye/{r}"])}
        return len(left | failed) < self.place.size


def _wake_politely() -> None:
    """Threads that this thread starts do not tear others out of the processor when they wake up (Linux: SCHED_BATCH).

    gloo's thread turns in circles while another thread of the process is in the middle of a send on the same connection. With more
    processes than processors the wake-up of one is what interrupts the other: a small exchange between 4 processes on 2 cores
    took 3.5 ms instead of 0.8.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(PermissionError):  # a sandbox may forbid it: everything works, only slower
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _same_facts(said: Sequence[Mapping[str, Any]], own: int) -> None:
    """Raise for the first fact that differs, naming the minority."""
    for name in said[own]:
        values = [json.dumps(facts.get(name), sort_keys=True) for facts in said]
        common = Counter(values).most_common(1)[0][0]
        others = [r for r, value in enumerate(values) if value != common]
        if others:
            theirs, ours = (json.loads(v) for v in (values[others[0]], common))
            raise UsageError(
                f"rank {', '.join(map(str, others))} differs in {name}: {_difference(theirs, ours)}; "
                "start all processes alike; nothing was sent"
            )


def _difference(theirs: Any, ours: Any) -> str:
    """The first differing entry of two dictionaries, or the two values."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        name = next(k for k in [*ours, *theirs] if theirs.get(k) != ours.get(k))
        return f"{name} is {theirs.get(name)!r}, the others have {ours.get(name)!r}"
    return f"{theirs!r}, the others have {ours!r}"


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _wait_for(host: str, port: int, seconds: float) -> None:
    """Until somebody listens there; torch would fill the screen while trying."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def _address_towards(host: str, port: int) -> str:
    """The address of this machine on the way to `host`: there peers can reach it, and only there it listens."""
    family, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        address: str = probe.getsockname()[0]
    return address
