"""Processes that find each other, make sure they belong together, and tell each other when something goes wrong.

Rank 0 holds the meeting point: a key-value store that listens on one address only. Through it every process says who it is; all
compare, and with a secret in $DPPS_SECRET all prove that they know it. Only then rows may travel.
"""

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from dpps.errors import DppsError, PeerError, RunError, UsageError
from dpps.transport.blame import Report, all_said, cannot_reach, verdict
from dpps.transport.hello import same_facts, understood, unreached
from dpps.transport.reach import Listener, unreachable
from dpps.transport.rendezvous import Rendezvous, address_towards, wait_for
from dpps.transport.secret import SECRET, Identity, SignedStore, check_secret, digest
from dpps.transport.wire import SMALL, Message, Wire, wake_politely

# Shares of --timeout, so that all is over within it: waiting for a peer; one attempt to connect to it;
# one question to the meeting point (one to report, one to find out who failed); and how long rank 0,
# which need not wait for answers, stays for others who ask.
_PATIENCE, _PROBING, _ASKING, _STAYING = 0.55, 0.07, 0.15, 0.2
_POLL = 0.02
_LINGER = 5.0

T = TypeVar("T")


@dataclass
class Cluster:
    """The processes of one run, from the meeting point on.

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
    """Whether a question to the meeting point was never answered: then only `os._exit` ends this process cleanly."""

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.rendezvous.rank

    @property
    def patience(self) -> float:
        """Seconds to wait for a peer."""
        return _PATIENCE * self.timeout

    # Meeting

    def join(self) -> "Cluster":
        """Connect to the meeting point; rank 0 opens it.

        Raises:
            UsageError: the secret is too short.
            RunError: it cannot be reached, or does not answer.
        """
        check_secret(self.secret.decode(errors="replace"))
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
        listener = None
        try:
            family, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(target)
            listener.listen(1024)
        except OSError as error:
            if listener is not None:
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
        wait_for(host, port, self._joining)
        store = TCPStore(host, port, None, False, self._delta(), wait_for_workers=False)
        self._address = address_towards(host, port)
        return store

    _address: str = field(default="", init=False)
    _ports: list[int] = field(default_factory=list, init=False)
    _listener: Listener | None = field(default=None, init=False)

    def _delta(self) -> timedelta:
        return timedelta(seconds=self.timeout)

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
        where = f"rank 0, which holds the meeting point {self.rendezvous.host}:{self.rendezvous.port},"
        return RunError(
            f"{where} cannot be reached from rank {self.rank} ({why}): check that it runs, and what lies between"
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
        self._listener = self._listener or Listener(self._address)
        identity = self._answer(lambda: self._compare(facts), self._joining + _LINGER)
        self._answer(self._reach_everybody, 2 * self.timeout)
        group, addresses = self._answer(lambda: self._connect(device, identity), self.timeout + _LINGER)
        self.wire = Wire(group, self.rank, self.rendezvous.size, self.patience, self.trouble, device)
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
        hellos = self._collect("hello", self._joining, "start all processes within --join-timeout")
        if hellos[self.rank] != text:  # an earlier one would bring earlier keys back
            raise PeerError(f"the meeting point changed the hello of rank {self.rank}; nothing was sent")
        said = [understood(rank, hello) for rank, hello in enumerate(hellos)]
        self.addresses, self._ports = [hello["address"] for hello in said], [hello["port"] for hello in said]
        same_facts([hello["facts"] for hello in said], self.rank)
        identity = Identity(self.secret, hellos)
        self.public_keys, self.attempt = [hello["key"] for hello in said], identity.transcript
        if self.secret:
            self.store.set(f"proof/{self.rank}", identity.proof(self.rank).hex())
            proofs = self._collect("proof", self.timeout, "it had said who it is")
            self._judge([_is_proof(identity, proof, rank) for rank, proof in enumerate(proofs)])
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
            if reports and not self.store.check(
                keys
            ):  # who gives up because of what it read has seen all of them
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

    def _connect(self, device: torch.device | str, identity: Identity) -> tuple[Any, str]:
        """The process group, and a digest of the addresses by which it was connected."""
        wake_politely()
        store = SignedStore(PrefixStore("mesh", self.store), identity)
        try:
            group = self._group(device, store)
        except Exception as error:
            if store.refused is not None:  # torch.distributed has made words of its own of it
                raise store.refused from error
            if reports := self._reports():
                raise verdict(reports, self.rank, [], "gave up", self._named) from error
            raise RunError(
                f"rank {self.rank} could not connect to all others within {self.timeout:g} s: nothing was sent"
            ) from error
        return group, digest(store.read)

    def _group(self, device: torch.device | str, store: SignedStore) -> Any:
        if torch.device(device).type == "cuda":
            dist.init_process_group(
                "nccl", store=store, rank=self.rank, world_size=self.rendezvous.size, timeout=self._delta()
            )
            return dist.group.WORLD
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._delta()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address, lazy_init=False)]
        return dist.ProcessGroupGloo(store, self.rank, self.rendezvous.size, options)

    def _prove_connections(self, wire: Wire, identity: Identity, addresses: str) -> None:
        """The first message on every connection shows that a process which knows the secret, and which connected by the same
        addresses, is at its other end."""
        proofs = {p: torch.zeros(32, dtype=torch.uint8, device=wire.device) for p in wire.peers}
        wire.exchange(
            [
                Message(p, SMALL, _tensor(identity.proof(addresses, self.rank, p)).to(wire.device))
                for p in proofs
            ],
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

    @property
    def _asking(self) -> float:
        """Seconds for one question to the meeting point."""
        return _ASKING * self.timeout

    @property
    def _probing(self) -> float:
        """Seconds for one attempt to connect to somebody."""
        return min(3.0, _PROBING * self.timeout)

    @property
    def _grace(self) -> float:
        """Seconds in which the others notice, too, and have tried to connect: less than the question may take."""
        return min(self._probing + 2.5, 0.85 * self._asking)

    def _find_out(self, lost: Sequence[int], what: str) -> RunError:
        until = time.monotonic() + self._grace
        while time.monotonic() < until:
            if all_said(self._reports(), self.rendezvous.size):
                break
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


def _is_proof(identity: Identity, claimed: str, rank: int) -> bool:
    try:
        return identity.proves(bytes.fromhex(claimed), rank)
    except ValueError:
        return False


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
