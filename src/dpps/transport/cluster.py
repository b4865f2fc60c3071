"""Processes that find each other, make sure they belong together, and tell each other when something goes wrong.

Rank 0 holds the rendezvous: a key-value store that listens on one address only. Through it every process says who it is; all
compare, and with a secret in $DPPS_SECRET all prove that they know it. Only then rows may travel.
"""

import hashlib
import hmac
import json
import math
import os
import secrets
import socket
import string
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from ipaddress import ip_address
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from dpps.errors import DppsError, PeerError, RunError, UsageError
from dpps.transport.distributed import CLOSED, SMALL, Message, Wire, as_tensor, wake_politely

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def started_distributed() -> bool:
    """Whether torchrun or a user by hand started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def restarted() -> bool:
    """Whether torchrun has restarted the processes after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


@dataclass(frozen=True)
class Rendezvous:
    """Which of the processes this is, and where they meet; what torchrun puts into the environment."""

    rank: int
    size: int
    host: str
    port: int
    by_agent: bool = False
    """torchrun itself already listens there and tells everybody where the real rendezvous is."""
    attempt: str = "0"

    @classmethod
    def from_environment(cls) -> "Rendezvous":
        """Of torchrun, or set by hand: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT."""
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
        run, count = (
            os.environ.get("TORCHELASTIC_RUN_ID", ""),
            os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )
        return cls(rank, size, os.environ["MASTER_ADDR"], port, agent, f"{run}/{count}")


def wait_for(host: str, port: int, seconds: float) -> None:
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


def address_towards(host: str, port: int) -> str:
    """The address of this machine on the way to `host`: there peers can reach it, and only there it listens."""
    family, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        address: str = probe.getsockname()[0]
    return address


# The shared secret: who knows it belongs to the run. A process that joins shows by an HMAC over everything that was said that it
# knows the secret. The addresses at which the processes then connect to each other go through the same rendezvous, where a
# stranger could exchange them; so they are signed, too, with a key that holds for this start only.

SECRET = "DPPS_SECRET"
BITS = 128
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
        UsageError: somebody who recorded one handshake could find it by trying.
    """
    text = os.environ.get(SECRET, "")
    bits = _most_bits(text)
    if text and bits < BITS:
        raise UsageError(
            f"${SECRET} has at most {bits:.0f} bits: it must have {BITS} or more, because a recorded handshake lets anybody try "
            "secrets at leisure; make one with: openssl rand -hex 32"
        )
    return text.encode()


def _most_bits(text: str) -> float:
    """What a random text of this length and alphabet would have; words that people choose have less."""
    alphabet = next((len(a) for a in _ALPHABETS if set(text) <= set(a)), len(string.printable))
    return len(text) * math.log2(alphabet) if len(set(text)) >= _DISTINCT else 0.0


class Identity:
    """What one process proves to the others at this start: that it knows the secret and has heard what they have heard.

    Args:
        secret: what all know; without one the proofs show only that all have heard the same.
        said: what every process said at the rendezvous, a random number of its own included.
    """

    def __init__(self, secret: bytes, said: list[str]) -> None:
        self._secret = secret
        self.transcript = hashlib.sha256(json.dumps(said).encode()).digest()

    def proof(self, *what: object) -> bytes:
        """An HMAC over the transcript and `what`."""
        return hmac.digest(self._secret, self.transcript + repr(what).encode(), "sha256")

    def proves(self, claimed: bytes, *what: object) -> bool:
        """Whether `claimed` is the proof of `what`, compared in constant time."""
        return hmac.compare_digest(claimed, self.proof(*what))


class SignedStore(Store):
    """A key-value store that accepts only entries written by members.

    torch.distributed reads the addresses of the peers from it. Whoever reaches the rendezvous can write there; what does not
    bear a signature over its key and this start's transcript is refused before torch.distributed sees it.
    """

    def __init__(self, store: Any, identity: Identity) -> None:
        super().__init__()
        self._store, self._identity = store, identity
        self._read: dict[str, str] = {}
        self.refused: PeerError | None = None
        """The error of the last refused entry."""

    def set(self, key: str, value: str | bytes) -> None:
        """Put down a value with its signature."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(key, self._identity.proof("store", key, data) + data)

    def get(self, key: str) -> bytes:
        """The value of a key.

        Raises:
            PeerError: somebody without the secret has written it.
        """
        signed = self._store.get(key)
        proof, data = signed[:32], signed[32:]
        if not self._identity.proves(proof, "store", key, data):
            self.refused = PeerError(
                f"the address of rank {key.rpartition('/')[2]} at the rendezvous is not from a process of this run: somebody "
                "without the secret has changed it; nothing was sent"
            )
            raise self.refused
        self._read[key] = data.hex()
        return bytes(data)

    @property
    def digest(self) -> str:
        """Of everything that was read: two processes that connected by the same addresses have the same."""
        return hashlib.sha256(json.dumps(self._read, sort_keys=True).encode()).hexdigest()

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all keys are there."""
        _ = self._store.wait(keys, timeout) if timeout else self._store.wait(keys)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._store.check(keys))

    def set_timeout(self, timeout: timedelta) -> None:
        """How long `get` and `wait` take at most."""
        self._store.set_timeout(timeout)


# What every process says of itself at the rendezvous, and the comparison of it


def same_facts(said: Sequence[Mapping[str, Any]], own: int) -> None:
    """Raise for the first fact that differs, naming the minority."""
    for name in said[own]:
        values = [json.dumps(facts.get(name), sort_keys=True) for facts in said]
        common = Counter(values).most_common(1)[0][0]
        others = [r for r, value in enumerate(values) if value != common]
        if others:
            theirs, ours = (json.loads(v) for v in (values[others[0]], common))
            raise UsageError(
                f"rank {', '.join(map(str, others))} differs in {name}: {printable(_difference(theirs, ours))}; "
                "start all processes alike; nothing was sent"
            )


def _difference(theirs: Any, ours: Any) -> str:
    """The first differing entry of two dictionaries, or the two values."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        name = next(k for k in [*ours, *theirs] if json.dumps(theirs.get(k)) != json.dumps(ours.get(k)))
        return f"{name} is {theirs.get(name)!r}, the others have {ours.get(name)!r}"
    return f"{theirs!r}, the others have {ours!r}"


def understood(rank: int, hello: str) -> dict[str, Any]:
    """What a process said of itself."""
    with _understanding(rank):
        said = json.loads(hello)
        port = int(said["port"])
        if not 0 < port < 1 << 16:
            raise ValueError(port)
        key, facts = bytes.fromhex(said["key"]), dict(said["facts"])
        return {"address": str(ip_address(said["address"])), "port": port, "key": key, "facts": facts}


def unreached(rank: int, text: str, processes: int) -> dict[int, str]:
    """Which of so many processes a process says it cannot reach, and why."""
    with _understanding(rank):
        said = {int(peer): printable(why) for peer, why in json.loads(text).items()}
        if not all(0 <= peer < processes for peer in said):
            raise ValueError(said)
        return said


_MISREAD = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)
"""What is raised by reading something else than was agreed on."""


@contextmanager
def _understanding(rank: int) -> Iterator[None]:
    """Reading what a process has put down as JSON."""
    try:
        yield
    except _MISREAD:
        raise PeerError(
            f"what rank {rank} says at the rendezvous is not understood: is it a process of this run?"
        ) from None


# Whether this process reaches another one: tried with everybody before the run, and again with a peer that does not answer.
# A process that hangs still takes connections (its system does it), so a peer that cannot be connected to is cut off, and one that
# can be connected to and says nothing is slow, hangs, or waits for somebody else.

_AT_ONCE = 32


class Listener:
    """A port on one address of this machine, as its peers see it, that takes connections and closes them at once."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        self._thread = Thread(target=self._take, daemon=True)
        self._thread.start()

    def _take(self) -> None:
        while True:
            try:
                self._socket.accept()[0].close()
            except OSError:  # closed
                return

    def close(self) -> None:
        """Take no more connections."""
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread up
        self._thread.join()
        self._socket.close()


def unreachable(peers: Mapping[int, tuple[str, int]], seconds: float) -> dict[int, str]:
    """Which of the peers (address and port by rank) cannot be connected to within the time, and why."""

    def attempt(rank: int) -> tuple[int, str]:
        try:
            socket.create_connection(peers[rank], timeout=seconds).close()
        except TimeoutError:
            return rank, f"no answer for {seconds:.3g} s"
        except OSError as error:
            return rank, error.strerror or "no connection"
        return rank, ""

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return {rank: why for rank, why in pool.map(attempt, peers) if why}


# Who failed, as far as it is known: what the processes report about each other, and what follows from it

_LONGEST = 400


def printable(text: object) -> str:
    """Words of another process on one line, without control characters, which a terminal would obey, and not too many."""
    clean = "".join(c if c.isprintable() else "?" for c in str(text))
    return clean if len(clean) <= _LONGEST else f"{clean[:_LONGEST]}..."


@dataclass(frozen=True)
class Report:
    """What one process said when it stopped.

    Attributes:
        why: the reason, if it stopped by itself.
        lost: the ranks it could not go on without.
        what: what it saw of them.
        reached: whether it can still connect to them.
    """

    why: str = ""
    lost: tuple[int, ...] = ()
    what: str = ""
    reached: bool = True

    @property
    def cut(self) -> bool:
        """Whether nothing came, and nothing can come: the way between the two is cut, or the other machine is gone."""
        return not self.reached and self.what != CLOSED

    @property
    def gone(self) -> bool:
        """Whether somebody hung up who is not there any more. Who still takes connections may be about to say why it did."""
        return not self.reached and self.what == CLOSED

    def encoded(self) -> str:
        """As text for the rendezvous."""
        return json.dumps(asdict(self))

    @classmethod
    def decoded(cls, text: str | bytes, processes: int) -> "Report":
        """What another of so many processes has put down; anything that is not a report counts as a stop without a reason."""
        try:
            found = json.loads(text)
            lost = tuple(rank for rank in map(int, found["lost"]) if 0 <= rank < processes)
            return cls(printable(found["why"]), lost, printable(found["what"]), found["reached"] is not False)
        except _MISREAD:
            return cls(why="its report cannot be read")


def verdict(
    reports: Mapping[int, Report], own: int, lost: Sequence[int], what: str, named: Callable[[int], str] = str
) -> RunError:
    """The error that names who failed, and not who stopped because of it.

    Whoever reports is alive. Whoever is missed by somebody who can connect to it, or whose connection it closed, and reports
    nothing has failed. Otherwise the pairs are named that cannot connect to each other: what is between them is not known. Waiting
    for somebody who waits in turn, or finding a connection closed, is a consequence: whoever stops closes its own.
    """
    for rank, report in reports.items():
        if report.why and rank != own:
            return RunError(f"rank {rank} stopped the run: {report.why}")
    seen = [report for report in reports.values() if not report.cut]
    missed = {r: report.what for report in seen for r in report.lost if r not in reports}
    silent = {
        (rank, peer): report.what for rank, report in reports.items() if report.cut for peer in report.lost
    }
    if missed:
        words = "; ".join(f"rank {named(r)} has failed: {missed[r]}" for r in sorted(missed))
    elif silent:
        words = cannot_reach(silent, named)
    else:
        words = "; ".join(f"rank {named(r)} has stopped: {what}" for r in sorted(lost))
    return RunError(f"{words}; the last checkpoint is intact, continue with dpps resume (in Python Run.open)")


def all_said(reports: Mapping[int, Report], processes: int) -> bool:
    """Whether nobody can be expected to say more: all have reported but those who are gone, or somebody has said why it stopped."""
    gone = {r for report in reports.values() if report.gone for r in report.lost}
    return any(report.why for report in reports.values()) or len(gone | set(reports)) == processes


def cannot_reach(links: Mapping[tuple[int, int], str], named: Callable[[int], str] = str) -> str:
    """Pairs that do not hear each other; nothing is said about whose fault it is."""
    said = [
        f"rank {rank} cannot reach rank {named(peer)} ({links[rank, peer]})" for rank, peer in sorted(links)
    ]
    more = f"; and {len(said) - 8} more pairs" if len(said) > 8 else ""
    return "; ".join(said[:8]) + more


# The processes together

# Shares of --timeout, so that all is over within it: waiting for a peer; one attempt to connect to it;
# one question to the rendezvous (one to report, one to find out who failed); and how long rank 0,
# which need not wait for answers, stays for others who ask.
_PATIENCE, _PROBING, _ASKING, _STAYING = 0.55, 0.07, 0.15, 0.2
_POLL = 0.02
_LINGER = 5.0

T = TypeVar("T")


@dataclass
class Cluster:
    """The processes of one run, from the rendezvous on.

    Args:
        rendezvous: which process this is, and where they meet.
        timeout: seconds within which a dead or hung process is noticed.
        secret: what all processes must know; empty for none.
        join_timeout: seconds to wait until all processes are there; by default as long as `timeout`.
    """

    rendezvous: Rendezvous
    timeout: float = 60.0
    secret: bytes = b""
    join_timeout: float | None = None
    addresses: list[str] = field(default_factory=list)
    """Of all ranks, known after the handshake."""
    public_key: bytes = b""
    """What this process says is its own, for secrets with single partners; empty for none."""
    public_keys: list[bytes] = field(default_factory=list)
    """Of all ranks, known after the handshake and as genuine as the secret makes them."""
    attempt: bytes = b""
    """After the handshake: a number of this start, the same at all ranks. Every process has put fresh random bits into it."""
    store: Any = None
    wire: Wire | None = None
    stuck: bool = False
    """Whether a question to the rendezvous was never answered: then only `os._exit` ends this process cleanly."""
    _address: str = field(default="", init=False)
    _ports: list[int] = field(default_factory=list, init=False)
    _listener: Listener | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.rank, self._delta = self.rendezvous.rank, timedelta(seconds=self.timeout)
        self.patience = _PATIENCE * self.timeout
        """Seconds to wait for a peer."""
        self._asking = _ASKING * self.timeout
        """Seconds for one question to the rendezvous."""
        self._probing = min(3.0, _PROBING * self.timeout)
        """Seconds for one attempt to connect to somebody."""

    # Meeting

    def join(self) -> "Cluster":
        """Connect to the rendezvous; rank 0 opens it.

        Raises:
            RunError: it cannot be reached, or does not answer.
        """
        self.store = self._answer(self._open, self._joining)
        return self

    @property
    def _joining(self) -> float:
        """Seconds to wait until everybody is there."""
        return self.timeout if self.join_timeout is None else self.join_timeout

    def _open(self) -> Any:
        host, port = self.rendezvous.host, self.rendezvous.port
        if not self.rendezvous.by_agent:
            return self._host(host, port)[0] if self.rank == 0 else self._client(host, port)
        agent = self._client(host, port)
        key = f"dpps/{self.rendezvous.attempt}"
        if self.rank == 0:
            store, address = self._host(host, 0)
            agent.set(key, json.dumps(address))
            return store
        return self._client(*json.loads(agent.get(key)))

    def _host(self, host: str, port: int) -> tuple[Any, tuple[str, int]]:
        """A store that listens on this address only: left to itself it would listen on every interface."""
        try:
            family, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(target, family=family, backlog=1024)
        except OSError as error:
            raise UsageError(
                f"rank 0 cannot listen on {host}:{port} ({error.strerror}): MASTER_ADDR must be an address of the machine of "
                "rank 0 and MASTER_PORT a free port"
            ) from error
        ip, port = listener.getsockname()[:2]
        store = TCPStore(
            ip, port, None, True, self._delta, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._address = ip
        return store, (ip, port)

    def _client(self, host: str, port: int) -> Any:
        wait_for(host, port, self._joining)
        store = TCPStore(host, port, None, False, self._delta, wait_for_workers=False)
        self._address = address_towards(host, port)
        return store

    def _answer(self, question: Callable[[], T], seconds: float) -> T:
        """What the store says. A store whose machine is cut off would keep us waiting, so a thread asks,
        and only until it was silent once."""
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
        cause = failure[0] if failure else None
        if isinstance(cause, DppsError):
            raise cause
        raise self._unreachable("connection lost" if cause else "no answer") from cause

    def _unreachable(self, why: str) -> RunError:
        where = f"rank 0, which holds the rendezvous {self.rendezvous.host}:{self.rendezvous.port},"
        return RunError(
            f"{where} cannot be reached from rank {self.rank} ({why}): check that it runs, and what lies between"
        )

    # The handshake

    def meet(self, facts: Mapping[str, Any]) -> Wire:
        """Compare `facts` with everybody, prove the secret, connect to everybody, and prove it again on every connection.

        Args:
            facts: what must be equal everywhere, by name; the order is that in which differences are reported.

        Raises:
            UsageError: somebody differs; names who and in what.
            RunError: somebody did not come.
        """
        self._listener = self._listener or Listener(self._address)
        identity = self._answer(lambda: self._compare(facts), self._joining + _LINGER)
        self._answer(self._reach_everybody, 2 * self.timeout)
        group, addresses = self._answer(lambda: self._connect(identity), self.timeout + _LINGER)
        self.wire = Wire(group, self.rank, self.rendezvous.size, self.patience, self.trouble)
        self._prove_connections(self.wire, identity, addresses)
        return self.wire

    def _compare(self, facts: Mapping[str, Any]) -> Identity:
        assert self._listener is not None
        mine = {
            "rank": self.rank,
            "nonce": secrets.token_hex(16),
            "address": self._address,
            "port": self._listener.port,
            "key": self.public_key.hex(),
            "facts": {"secret": "set" if self.secret else "not set", **facts},
        }
        text = json.dumps(mine, sort_keys=True)
        if self.store.compare_set(f"hello/{self.rank}", "", text).decode(errors="replace") != text:
            raise UsageError(f"rank {self.rank} is already here: every process needs its own RANK")
        hellos = self._collect("hello", self._joining, "start all processes within this time")
        if hellos[self.rank] != text:  # an earlier one would bring earlier keys back
            raise PeerError(f"the rendezvous changed the hello of rank {self.rank}; nothing was sent")
        said = [understood(rank, hello) for rank, hello in enumerate(hellos)]
        self.addresses, self._ports = [hello["address"] for hello in said], [hello["port"] for hello in said]
        same_facts([hello["facts"] for hello in said], self.rank)
        identity = Identity(self.secret, hellos)
        self.public_keys, self.attempt = [hello["key"] for hello in said], identity.transcript
        if self.secret:
            self.store.set(f"proof/{self.rank}", identity.proof(self.rank).hex())
            proofs = self._collect("proof", self.timeout, "it had said who it is")
            shown = [proof.encode() for proof in proofs]
            self._judge(
                [hmac.compare_digest(p, identity.proof(r).hex().encode()) for r, p in enumerate(shown)]
            )
        return identity

    def _reach_everybody(self) -> None:
        """Connect to everybody once; whom somebody cannot reach is known to all before torch.distributed waits for it."""
        everybody = [r for r in range(self.rendezvous.size) if r != self.rank]
        self.store.set(f"reach/{self.rank}", json.dumps(self._unreachable_of(everybody, self.patience)))
        found = self._collect("reach", self.timeout, "it had said who it is")
        links = {
            (rank, peer): why
            for rank, text in enumerate(found)
            for peer, why in unreached(rank, text, self.rendezvous.size).items()
        }
        if links:
            raise RunError(
                f"{cannot_reach(links, self._named)}; nothing was sent; let every process reach every other "
                "one (firewall, routes)"
            )

    def _unreachable_of(self, ranks: Sequence[int], seconds: float) -> dict[int, str]:
        return unreachable({r: (self.addresses[r], self._ports[r]) for r in ranks}, seconds)

    def _collect(self, what: str, seconds: float, remedy: str) -> list[str]:
        """What every rank has put down under this name; raises when somebody does not come or has given up."""
        deadline = time.monotonic() + seconds
        keys = [f"{what}/{rank}" for rank in range(self.rendezvous.size)]
        while not self.store.check(keys):
            reports = self._reports()
            # who gives up because of what it read has seen all of them
            if reports and not self.store.check(keys):
                raise verdict(reports, self.rank, [], "gave up", self._named)
            if time.monotonic() > deadline:
                absent = [r for r, key in enumerate(keys) if not self.store.check([key])]
                raise RunError(
                    f"rank {', '.join(map(str, absent))} did not come within {seconds:g} s: {remedy}"
                )
            time.sleep(_POLL)
        return [self.store.get(key).decode(errors="replace") for key in keys]

    def _judge(self, proven: Sequence[bool]) -> None:
        strangers = [rank for rank, good in enumerate(proven) if not good]
        if not strangers:
            return
        if 2 * len(strangers) > self.rendezvous.size - 1 and self.rendezvous.size > 2:
            raise UsageError(f"rank {self.rank} was refused: its ${SECRET} is not that of the others")
        named = ", ".join(f"{r} ({self.addresses[r]})" for r in strangers)
        raise UsageError(f"rank {named} was refused: its ${SECRET} is not that of rank {self.rank}")

    def _connect(self, identity: Identity) -> tuple[Any, str]:
        """The process group, and a digest of the addresses by which it was connected."""
        wake_politely()
        store = SignedStore(PrefixStore("mesh", self.store), identity)
        try:
            group = self._group(store)
        except Exception as error:
            if store.refused is not None:  # torch.distributed has made words of its own of it
                raise store.refused from error
            if reports := self._reports():
                raise verdict(reports, self.rank, [], "gave up", self._named) from error
            raise RunError(
                f"rank {self.rank} could not connect to all others within {self.timeout:g} s: nothing was sent"
            ) from error
        return group, store.digest

    def _group(self, store: SignedStore) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._delta
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address, lazy_init=False)]
        return dist.ProcessGroupGloo(store, self.rank, self.rendezvous.size, options)

    def _prove_connections(self, wire: Wire, identity: Identity, addresses: str) -> None:
        """The first message on every connection shows that a process which knows the secret, and which connected by the same
        addresses, is at its other end."""
        proofs = {p: torch.zeros(32, dtype=torch.uint8) for p in wire.peers}
        wire.exchange(
            [Message(p, SMALL, as_tensor(identity.proof(addresses, self.rank, p))) for p in proofs],
            [Message(p, SMALL, received) for p, received in proofs.items()],
        )
        for peer, received in proofs.items():
            if not identity.proves(bytes(received.tolist()), addresses, peer, self.rank):
                raise PeerError(f"rank {peer} was refused: somebody else answers on its connection")

    # Trouble

    def give_up(self, error: Exception) -> None:
        """Tell the others that this process stops; why, only if a peer is to blame: other words may quote this node's data."""
        kind = "its request is wrong" if isinstance(error, UsageError) else "it failed"
        why = (
            str(error) if isinstance(error, PeerError) else f"{kind}; rank {self.rank}'s own output says why"
        )
        with suppress(RunError):
            self._answer(lambda: self._report(Report(why)), self._asking)
        self._hang_up()

    def trouble(self, lost: Sequence[int], what: str) -> RunError:
        """The error to raise when `lost` ranks are gone or silent: names who failed, not who stopped because of it."""
        reached = not self._unreachable_of(lost, self._probing)
        try:
            self._answer(lambda: self._report(Report("", tuple(lost), what, reached)), self._asking)
            self._hang_up()  # after the report: who is cut off by this finds it
            return self._answer(lambda: self._find_out(lost, what), self._asking)
        except RunError as unreachable:
            return unreachable

    def _hang_up(self) -> None:
        if self.wire is not None:
            self.wire.hang_up()

    def _find_out(self, lost: Sequence[int], what: str) -> RunError:
        # the others notice, too, and have tried to connect by then: less than the question may take
        until = time.monotonic() + min(self._probing + 2.5, 0.85 * self._asking)
        while time.monotonic() < until and not all_said(self._reports(), self.rendezvous.size):
            time.sleep(_POLL)
        return verdict(self._reports(), self.rank, lost, what, self._named)

    def _report(self, report: Report) -> None:
        self.store.compare_set(f"report/{self.rank}", "", report.encoded())

    def _reports(self) -> dict[int, Report]:
        size = self.rendezvous.size
        ranks = [r for r in range(size) if self.store.check([f"report/{r}"])]
        return {r: Report.decoded(self.store.get(f"report/{r}"), size) for r in ranks}

    def _named(self, rank: int) -> str:
        return f"{rank} ({self.addresses[rank]})" if self.addresses else str(rank)

    def leave(self) -> None:
        """After a failure. Rank 0 stays a moment, so that everybody can still ask who failed."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
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
        failed = {r for report in reports.values() for r in report.lost} - set(reports)
        left = {r for r in range(self.rendezvous.size) if self.store.check([f"bye/{r}"])}
        return len(left | failed) < self.rendezvous.size
