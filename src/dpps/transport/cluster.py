"""Processes that find each other, compare their settings, and tell each other who failed.

They meet at the *rendezvous*, a key-value store: torchrun's own, or one that rank 0 opens on a single address. No rows go
through it. With a secret in $DPPS_SECRET, all processes first prove that they know it.
"""

import hashlib
import hmac
import json
import math
import os
import secrets
import socket
import string
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from ipaddress import ip_address
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from dpps.errors import DppsError, PeerError, RunError, UsageError
from dpps.transport.distributed import CLOSED, SMALL, Message, Wire, as_tensor, wake_politely

T = TypeVar("T")
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def started_distributed() -> bool:
    """Whether torchrun or a user by hand started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def restarted() -> bool:
    """Whether torchrun has restarted the processes after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


@dataclass(frozen=True)
class Rendezvous:
    """Which process this is, and where all processes meet."""

    rank: int
    size: int
    host: str
    port: int
    by_agent: bool = False
    """Whether torchrun's agent already listens there."""
    attempt: str = "0"
    """Which start this is, where several can use the same store."""

    @classmethod
    def from_environment(cls) -> "Rendezvous":
        """Read RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torchrun or the user has set."""
        missing = [name for name in _NEEDED if name not in os.environ]
        if missing:
            raise UsageError(
                f"a distributed run needs {', '.join(_NEEDED)} in the environment and {', '.join(missing)} is missing: "
                "start it with torchrun --nproc-per-node 4 -m dpps train"
            )
        try:
            rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        except ValueError as error:
            raise UsageError(f"RANK, WORLD_SIZE and MASTER_PORT must be whole numbers: {error}") from None
        if not 0 <= rank < size:
            raise UsageError(f"RANK is {rank}: with WORLD_SIZE {size} it must be 0 to {size - 1}")
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        run = os.environ.get("TORCHELASTIC_RUN_ID", "")
        count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(rank, size, os.environ["MASTER_ADDR"], port, agent, f"{run}/{count}")


def wait_for(host: str, port: int, seconds: float) -> None:
    """Wait until somebody listens there. (torch would fill the screen with warnings while it tries.)"""
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


def address_towards(host: str, port: int) -> str:
    """The address of this machine on the way to `host`: peers can reach it there."""
    family, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        address: str = probe.getsockname()[0]
    return address


# The shared secret

SECRET = "DPPS_SECRET"
_ALPHABETS = (
    string.digits,
    string.hexdigits.lower(),
    string.ascii_lowercase,
    string.ascii_letters + string.digits,
)
_DISTINCT = 8  # of 32 random hexadecimal digits, fewer are different once in 25 million times


def read_secret() -> bytes:
    """$DPPS_SECRET; empty when it is not set.

    Raises:
        UsageError: somebody who recorded a handshake could find it by trying.
    """
    text = os.environ.get(SECRET, "")
    alphabet = next((len(letters) for letters in _ALPHABETS if set(text) <= set(letters)), 100)
    bits = len(text) * math.log2(alphabet) if len(set(text)) >= _DISTINCT else 0  # if it is random
    if text and bits < 128:
        raise UsageError(
            f"${SECRET} has at most {bits:.0f} bits: it must have 128 or more, because whoever records a handshake can try "
            "secrets at leisure; make one with: openssl rand -hex 32"
        )
    return text.encode()


class SignedStore(Store):
    """The store in which gloo looks up the addresses of peers; accepts only entries that `sign` has signed.

    Whoever reaches the rendezvous can write there, and could redirect connections to itself.
    """

    def __init__(self, store: Any, sign: Callable[..., bytes]) -> None:
        super().__init__()
        self._store, self._sign = store, sign
        self.refused: PeerError | None = None
        """The error of a refused entry; gloo passes on its text at best."""

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(key, self._sign(key, data) + data)

    def get(self, key: str) -> bytes:
        signed = bytes(self._store.get(key))
        if not hmac.compare_digest(signed[:32], self._sign(key, signed[32:])):
            self.refused = PeerError(
                f"the address of rank {key.rpartition('/')[2]} at the rendezvous is not from a process of this run: "
                "somebody without the secret has changed it; nothing was sent"
            )
            raise self.refused
        return signed[32:]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        _ = self._store.wait(keys, timeout) if timeout else self._store.wait(keys)

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)


# What other processes say is only compared and printed, never believed

_LONGEST = 400
_MISREAD = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)
"""What reading something else than was agreed on can raise."""


def printable(text: object) -> str:
    """Words of another process on one line, shortened, and without control characters, which a terminal would obey."""
    clean = "".join(c if c.isprintable() else "?" for c in str(text))
    return clean if len(clean) <= _LONGEST else f"{clean[:_LONGEST]}..."


def understood(rank: int, hello: str) -> dict[str, Any]:
    """Address, public key and facts of a process, as it said them."""
    try:
        said = json.loads(hello)
        key, facts = bytes.fromhex(said["key"]), dict(said["facts"])
        return {"address": str(ip_address(said["address"])), "key": key, "facts": facts}
    except _MISREAD:
        raise PeerError(
            f"what rank {rank} says at the rendezvous is not understood: is it a process of this run?"
        ) from None


def same_facts(said: Sequence[Mapping[str, Any]], own: int) -> None:
    """Raise for the first fact that differs, naming the minority."""
    for name in said[own]:
        values = [json.dumps(facts.get(name), sort_keys=True) for facts in said]
        common = Counter(values).most_common(1)[0][0]
        others = [r for r, value in enumerate(values) if value != common]
        if others:
            theirs, ours = (json.loads(v) for v in (values[others[0]], common))
            where = ""
            if isinstance(theirs, dict) and isinstance(ours, dict):
                key = next(
                    k for k in [*ours, *theirs] if json.dumps(theirs.get(k)) != json.dumps(ours.get(k))
                )
                where, theirs, ours = f"{key} is ", theirs.get(key), ours.get(key)
            raise UsageError(
                f"rank {', '.join(map(str, others))} differs in {name}: "
                f"{printable(f'{where}{theirs!r}, the others have {ours!r}')}; start all processes alike; nothing was sent"
            )


@dataclass(frozen=True)
class Report:
    """What a process says when it stops: why, if it stopped by itself; otherwise the rank it could not go on without, and what
    it saw of it."""

    why: str = ""
    lost: int | None = None
    what: str = ""

    def encoded(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decoded(cls, text: str | bytes, processes: int) -> "Report":
        """Read what another of so many processes has put down; anything else counts as a stop without a reason."""
        try:
            said = json.loads(text)
            lost = int(said["lost"]) if said["lost"] in range(processes) else None
            return cls(printable(said["why"]), lost, printable(said["what"]))
        except _MISREAD:
            return cls(why="its report cannot be read")


def verdict(
    reports: Mapping[int, Report], own: int, lost: int | None, what: str, addresses: Sequence[str] = ()
) -> RunError:
    """The error that names who failed, and not who stopped because of it.

    Whoever reports is alive. Whoever is missed and does not report is lost. If all have reported, those are named who got no
    answer: a closed connection is a consequence, because whoever stops closes its own.
    """

    def named(rank: int) -> str:
        return f"rank {rank} ({addresses[rank]})" if addresses else f"rank {rank}"

    for rank, report in reports.items():
        if report.why and rank != own:
            return RunError(f"rank {rank} stopped the run: {report.why}")
    waited = [(rank, r.lost, r.what) for rank, r in sorted(reports.items()) if r.lost is not None]
    missed = {peer: seen for _, peer, seen in waited if peer not in reports}
    silent = [(rank, peer, seen) for rank, peer, seen in waited if seen != CLOSED]
    if missed:
        words = [f"{named(peer)} is lost: {seen}" for peer, seen in sorted(missed.items())]
    elif silent:
        words = [f"rank {rank} does not hear {named(peer)}: {seen}" for rank, peer, seen in silent]
    else:
        words = [f"{'a process' if lost is None else named(lost)} has stopped: {what}"]
    more = f"; and {len(words) - 8} more" if len(words) > 8 else ""
    return RunError(
        f"{'; '.join(words[:8])}{more}; the last checkpoint is intact, continue with dpps resume (in Python Run.open)"
    )


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Begin something that cannot be interrupted."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised where the outcome is waited for
            outcome.set_exception(error)

    Thread(target=run, daemon=True).start()
    return outcome


# The processes together

# Shares of --timeout, so that all is over within it: waiting for a peer; one question to the rendezvous (one to report, one
# to find out who failed); and how long rank 0 stays for others who ask.
_PATIENCE, _ASKING, _STAYING = 0.55, 0.15, 0.2
_GRACE = 2.5
"""Seconds that the others have to report, too: they notice at once that connections are closed."""
_LINGER = 5.0
_POLL = 0.02


class Cluster:
    """The processes of one run.

    Args:
        rendezvous: which process this is, and where they meet.
        timeout: seconds within which a dead or hung process is noticed.
        secret: what all processes must know; empty for none.
        join_timeout: seconds to wait until all processes are there; by default as long as `timeout`.

    Attributes:
        public_key: of this process, for secrets with single partners; empty for none.
        public_keys: of all ranks, known after the handshake and as genuine as the secret makes them.
        addresses: of all ranks, known after the handshake.
        attempt: after the handshake, a number of this start, the same at all ranks. Every process has put fresh random bits
            into it.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        timeout: float = 60.0,
        secret: bytes = b"",
        join_timeout: float | None = None,
    ) -> None:
        self.rendezvous, self.timeout, self.secret = rendezvous, timeout, secret
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self.join_timeout = timeout if join_timeout is None else join_timeout
        self.public_key, self.attempt = b"", b""
        self.public_keys: list[bytes] = []
        self.addresses: list[str] = []
        self.store: Any = None
        self._wire: Wire | None = None
        self._address = ""
        self._silent = False  # the rendezvous did not answer once: it is not asked again

    # Meeting

    def join(self) -> "Cluster":
        """Connect to the rendezvous; without torchrun, rank 0 opens it.

        Raises:
            RunError: it cannot be reached, or does not answer.
        """
        store = self._answer(self._open, self.join_timeout)
        self.store = PrefixStore(f"dpps/{self.rendezvous.attempt}", store)
        return self

    def _open(self) -> Any:
        host, port, limit = self.rendezvous.host, self.rendezvous.port, timedelta(seconds=self.timeout)
        if self.rank or self.rendezvous.by_agent:
            wait_for(host, port, self.join_timeout)
            self._address = address_towards(host, port)
            return TCPStore(host, port, None, False, limit, wait_for_workers=False)
        try:
            family, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(target, family=family, backlog=1024)
        except OSError as error:
            raise UsageError(
                f"rank 0 cannot listen on {host}:{port} ({error.strerror}): MASTER_ADDR must be an address of the machine of "
                "rank 0 and MASTER_PORT a free port"
            ) from error
        self._address, port = listener.getsockname()[:2]
        # left to itself, TCPStore would listen on every interface
        return TCPStore(
            self._address, port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def _answer(self, question: Callable[[], T], seconds: float) -> T:
        """What the rendezvous says. If its machine is cut off, TCPStore would wait for minutes: so a thread asks."""
        outcome: Future[T] = Future() if self._silent else in_thread(question)
        try:
            return outcome.result(0 if self._silent else seconds)
        except DppsError:
            raise
        except Exception as error:
            self._silent = not outcome.done()
            place, why = self.rendezvous, "no answer" if self._silent else "connection lost"
            raise RunError(
                f"rank 0, which holds the rendezvous {place.host}:{place.port}, cannot be reached from rank {self.rank} "
                f"({why}): check that it runs, and what lies between"
            ) from error

    # The handshake

    def meet(self, facts: Mapping[str, Any]) -> Wire:
        """Compare `facts` with everybody, prove the secret if there is one, connect to everybody, and prove it on every connection.

        Args:
            facts: what must be equal everywhere, by name; the order is that in which differences are reported.

        Raises:
            UsageError: somebody differs; names who and in what.
            RunError: somebody did not come, or cannot be connected to.
        """
        self._answer(lambda: self._compare(facts), self.join_timeout + self.timeout + _LINGER)
        group = self._answer(self._connect, 2 * (self.timeout + _LINGER))
        self._wire = Wire(group, self.rank, self.size, _PATIENCE * self.timeout, self.trouble)
        self._prove_connections(self._wire)
        return self._wire

    def _compare(self, facts: Mapping[str, Any]) -> None:
        mine = {
            "rank": self.rank,
            "nonce": secrets.token_hex(16),
            "address": self._address,
            "key": self.public_key.hex(),
            "facts": {"secret": "set" if self.secret else "not set", **facts},
        }
        text = json.dumps(mine, sort_keys=True)
        if self.store.compare_set(f"hello/{self.rank}", "", text).decode(errors="replace") != text:
            raise UsageError(f"rank {self.rank} is already here: every process needs its own RANK")
        hellos = self._collect("hello", self.join_timeout, "did not come", "start all processes in this time")
        if hellos[self.rank] != text:  # an earlier one would bring earlier keys of pair noise back
            raise PeerError(f"the rendezvous changed the hello of rank {self.rank}; nothing was sent")
        said = [understood(rank, hello) for rank, hello in enumerate(hellos)]
        self.addresses = [hello["address"] for hello in said]
        same_facts([hello["facts"] for hello in said], self.rank)
        self.public_keys = [hello["key"] for hello in said]
        self.attempt = hashlib.sha256(json.dumps(hellos).encode()).digest()
        if self.secret:
            self._prove()

    def _sign(self, *what: object) -> bytes:
        """An HMAC over everything that all processes said at this start, and `what`."""
        return hmac.digest(self.secret, self.attempt + repr(what).encode(), "sha256")

    def _prove(self) -> None:
        self.store.set(f"proof/{self.rank}", self._sign(self.rank).hex())
        shown = self._collect("proof", self.timeout, "did not prove its secret", "it had said who it is")
        strangers = [
            r
            for r, p in enumerate(shown)
            if not hmac.compare_digest(p.encode(), self._sign(r).hex().encode())
        ]
        if self.size > 2 and 2 * len(strangers) > self.size - 1:
            raise UsageError(f"rank {self.rank} was refused: its ${SECRET} is not that of the others")
        if strangers:
            named = ", ".join(f"{r} ({self.addresses[r]})" for r in strangers)
            raise UsageError(f"rank {named} was refused: its ${SECRET} is not that of rank {self.rank}")

    def _connect(self) -> Any:
        """The process group of gloo. Returns when everybody has one."""
        wake_politely()
        store = SignedStore(PrefixStore("mesh", self.store), self._sign)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=self.timeout)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address, lazy_init=False)]
        remedy = "nothing was sent; let every process reach every other one (firewall, routes)"
        made = in_thread(lambda: dist.ProcessGroupGloo(store, self.rank, self.size, options))
        deadline = time.monotonic() + self.timeout + _LINGER
        # whoever is only called waits on, although a caller may have given up
        while not (made.done() or time.monotonic() > deadline or self._reports()):
            time.sleep(_POLL)
        try:
            group = made.result(0)
        except Exception as error:
            if store.refused is not None:
                raise store.refused from error
            if reports := self._final_reports():
                raise verdict(reports, self.rank, None, "it gave up", self.addresses) from error
            # gloo's own words, the peer's address among them
            why = printable(str(error).rpartition("] ")[2]) or "no answer"
            raise PeerError(
                f"rank {self.rank} ({self._address}) could not connect to all others within {self.timeout:g} s ({why}): {remedy}"
            ) from error
        self.store.set(f"connected/{self.rank}", "")
        self._collect("connected", self.timeout + _LINGER, "did not connect to all others", remedy)
        return group

    def _prove_connections(self, wire: Wire) -> None:
        """The first message on every connection: somebody without the secret who has dialled an open port is no peer."""
        shown = {peer: torch.zeros(32, dtype=torch.uint8) for peer in wire.peers}
        wire.exchange(
            [Message(p, SMALL, as_tensor(self._sign("connection", self.rank, p))) for p in shown],
            [Message(p, SMALL, proof) for p, proof in shown.items()],
        )
        for peer, proof in shown.items():
            if not hmac.compare_digest(bytes(proof.tolist()), self._sign("connection", peer, self.rank)):
                raise PeerError(
                    f"rank {peer} was refused: somebody else answers on its connection; nothing was sent"
                )

    def _collect(self, what: str, seconds: float, failure: str, remedy: str) -> list[str]:
        """What every rank has put down under this name; raises when somebody does not or has given up."""
        deadline = time.monotonic() + seconds
        keys = [f"{what}/{rank}" for rank in range(self.size)]
        while not self.store.check(keys):
            reports = self._reports()
            # whoever gives up because of what it read has seen all of them
            if reports and not self.store.check(keys):
                raise verdict(reports, self.rank, None, "it gave up", self.addresses)
            if time.monotonic() > deadline:
                absent = ", ".join(str(r) for r, key in enumerate(keys) if not self.store.check([key]))
                raise RunError(f"rank {absent} {failure} within {seconds:g} s: {remedy}")
            time.sleep(_POLL)
        return [self.store.get(key).decode(errors="replace") for key in keys]

    # Trouble

    def give_up(self, error: Exception) -> None:
        """Tell the others that this process stops; why, only if a peer is to blame: other words may quote this node's data."""
        kind = "its request is wrong" if isinstance(error, UsageError) else "it failed"
        why = (
            str(error) if isinstance(error, PeerError) else f"{kind}; rank {self.rank}'s own output says why"
        )
        with suppress(RunError):
            self._report(Report(why))
        self.leave()

    def trouble(self, lost: int, what: str) -> RunError:
        """The error to raise when a rank is gone or silent: names who failed, not who stopped because of it."""
        try:
            self._report(Report(lost=lost, what=what))
            reports = self._answer(self._final_reports, _ASKING * self.timeout)
            return verdict(reports, self.rank, lost, what, self.addresses)
        except RunError as unreachable:
            return unreachable

    def _report(self, report: Report) -> None:
        """Say it, then close all connections: whoever notices finds the report."""
        try:
            if self.store is not None:
                key, text = f"report/{self.rank}", report.encoded()
                self._answer(lambda: self.store.compare_set(key, "", text), _ASKING * self.timeout)
        finally:
            if self._wire is not None:
                self._wire.hang_up()

    def _final_reports(self) -> dict[int, Report]:
        """The reports of all who stop now, as far as they could be waited for."""
        until = time.monotonic() + min(_GRACE, 0.85 * _ASKING * self.timeout)
        while True:
            reports = self._reports()
            said = len(reports) == self.size or any(report.why for report in reports.values())
            if said or time.monotonic() > until:
                return reports
            time.sleep(_POLL)

    def _reports(self) -> dict[int, Report]:
        ranks = [r for r in range(self.size) if self.store.check([f"report/{r}"])]
        return {r: Report.decoded(self.store.get(f"report/{r}"), self.size) for r in ranks}

    def leave(self) -> None:
        """After a failure. Rank 0 stays a moment, so that everybody can still ask who failed."""
        if self.store is not None:
            with suppress(RunError):
                self._answer(self._say_bye, (_STAYING + _ASKING) * self.timeout)

    def _say_bye(self) -> None:
        self.store.set(f"bye/{self.rank}", "")
        until = time.monotonic() + _STAYING * self.timeout
        while self.rank == 0 and time.monotonic() < until:
            reports = self._reports()
            gone = {report.lost for report in reports.values()} - set(reports)
            if self.store.check([f"bye/{r}" for r in range(self.size) if r not in gone]):
                return
            time.sleep(_POLL)
