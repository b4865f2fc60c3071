"""A few rows in each of many processes, on one machine or many: torch.distributed."""

import math
import os
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from dpps.errors import PeerError, RunError, UsageError
from dpps.topology import Weights
from dpps.transport.base import (
    Arrived,
    Bound,
    Exchange,
    Fabric,
    Link,
    average,
    combine,
    entries,
    synchronised,
)

# Messages: tensors point to point, counted, with a limit on waiting and a name for whoever fails

HEADER, ROWS, SMALL, SPREAD, FLAG = 1, 2, 3, 5, 6
"""Tags: what messages are about to bring, rows of parameters, a few numbers, parts of a mean, a request to stop."""
_NEVER = 4  # nobody sends this
MIXING = 16
"""The first of the tags of mixing rounds, of which each has two of its own."""

CLOSED = "its connection was closed"

Works = list[tuple[int, Any]]
"""Messages on their way, each with the rank of its peer."""


def as_tensor(data: bytes) -> Tensor:
    """Bytes to be sent."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Message(NamedTuple):
    """A contiguous tensor to or from a peer (the rank of its process)."""

    peer: int
    tag: int
    tensor: Tensor


Trouble = Callable[[int, str], RunError]
"""Given the rank that this process lost and what it saw, the error that names who really failed."""


def _plain(rank: int, what: str) -> RunError:
    return RunError(f"rank {rank}: {what}")


class Wire:
    """The connections of one process to all others.

    Args:
        group: a process group of torch.distributed (gloo: messages lie on the CPU).
        rank: of this process.
        size: how many processes there are.
        patience: seconds to wait for a peer.
        trouble: makes the error when a peer is lost.
    """

    def __init__(
        self, group: Any, rank: int, size: int, patience: float = 48.0, trouble: Trouble = _plain
    ) -> None:
        self._group, self.rank, self.size, self.patience = group, rank, size, patience
        self._trouble = trouble
        self.sent_bytes = 0
        """Payload handed to the network by this process so far."""

    @property
    def peers(self) -> list[int]:
        """All other ranks, the next one first, so that not everybody starts with the same."""
        return [(self.rank + k) % self.size for k in range(1, self.size)]

    def exchange(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> None:
        """Send and receive; returns when all of it is done.

        Raises:
            RunError: a peer is gone or silent; the message names who failed.
        """
        self.finish(self.post(outgoing, incoming))

    def swap(self, tag: int, own: Tensor, theirs: Mapping[int, Tensor]) -> None:
        """Send the same to all peers, and receive from each of them into its place."""
        self.exchange([Message(p, tag, own) for p in theirs], [Message(p, tag, t) for p, t in theirs.items()])

    def post(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> Works:
        """Begin to send and to receive, except what is empty; the tensors must stay where they are until `finish` has returned."""
        outgoing, incoming = ([m for m in messages if m.tensor.numel()] for messages in (outgoing, incoming))
        self.sent_bytes += sum(m.tensor.nbytes for m in outgoing)
        receive, send = self._group.recv, self._group.send
        posted = [(m.peer, self._guarded(m.peer, receive, [m.tensor], m.peer, m.tag)) for m in incoming]
        return posted + [(m.peer, self._guarded(m.peer, send, [m.tensor], m.peer, m.tag)) for m in outgoing]

    def prepare(self, incoming: Sequence[Message]) -> tuple[Works, list[Message]]:
        """Begin to receive what is to come later; second, what could not be begun.

        A peer that has gone need not be missed: the run may be over. Whoever needs its message posts it then
        and learns who failed.
        """
        works, left = [], []
        for message in incoming:
            if not message.tensor.numel():
                continue
            try:
                works.append((message.peer, self._group.recv([message.tensor], message.peer, message.tag)))
            except RuntimeError:
                left.append(message)
        return works, left

    def finish(self, works: Works, seconds: float | None = None) -> None:
        """Wait for what was begun, for `patience` unless told otherwise."""
        deadline = time.monotonic() + (self.patience if seconds is None else seconds)
        for peer, work in works:
            left = max(0.001, deadline - time.monotonic())
            self._guarded(peer, work.wait, timedelta(seconds=left))

    def hang_up(self) -> None:
        """Close all connections, so that nobody waits for a process that has stopped.

        A gloo group has no such call, but closes its connections when an operation runs out of time.
        """
        for peer in self.peers:
            with suppress(RuntimeError):
                nothing = torch.empty(1, dtype=torch.uint8)
                self._group.recv([nothing], peer, _NEVER).wait(timedelta(milliseconds=1))

    def _guarded(self, peer: int, action: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except RuntimeError as error:
            silent = "imed out" in str(error)
            what = f"no answer for {self.patience:.3g} s" if silent else CLOSED
            raise self._trouble(peer, what) from error


def wake_politely() -> None:
    """Threads that this thread starts do not tear others out of the processor when they wake up (Linux: SCHED_BATCH).

    gloo's thread turns in circles while another thread of the process is in the middle of a send on the same
    connection. With more processes than processors the wake-up of one is what interrupts the other:
    a small exchange between 4 processes on 2 cores took 3.5 ms instead of 0.8.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(PermissionError):  # a sandbox may forbid it: everything works, only slower
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


# The first bytes of what a process sends: what follows, and for what

_DTYPES = ("float32", "float64", "float16", "uint8", "int64")
_VERBS = ("mix", "mean", "gather", "skip")
_FORMAT = struct.Struct("<IBB2x")
HEADER_SIZE = _FORMAT.size


def header(verb: str, x: Tensor) -> bytes:
    """What messages of this kind hold: columns and their type, and for which verb."""
    dtype = str(x.dtype).removeprefix("torch.")
    return _FORMAT.pack(x.shape[1], _DTYPES.index(dtype), _VERBS.index(verb))


def check_header(peer: int, message: Tensor, expected: bytes) -> None:
    """Refuse a message that brings something else, by the name of its sender."""
    received = bytes(message[: len(expected)].tolist())
    if received != expected:
        raise PeerError(
            f"rank {peer} sends {_described(received)} where {_described(expected)} was expected: refused, "
            "nothing of this round was used"
        )


def _described(header: bytes) -> str:
    width, dtype, verb = _FORMAT.unpack(header)
    known = dtype < len(_DTYPES) and verb < len(_VERBS)
    return f"rows of {width} {_DTYPES[dtype]} for {_VERBS[verb]}" if known else "something unknown"


# Which rows go from which process to which

Entries = tuple[Tensor, Tensor, Tensor]
"""Arguments of `combine`."""


@dataclass(frozen=True)
class Route:
    """What one process sends, receives and adds up under one matrix of weights."""

    needed: np.ndarray
    """Ids of the nodes whose rows are needed for rows with a sender elsewhere: the table, ascending."""
    own_places: slice
    own_rows: Tensor | slice
    outgoing: dict[int, Tensor | slice]
    incoming: dict[int, slice]
    inner_rows: Tensor
    """Receivers that need nobody else: they are computed while messages travel."""
    inner: Entries
    outer_rows: Tensor
    outer: Entries

    @classmethod
    def of(cls, weights: Weights, blocks: Sequence[range], rank: int) -> "Route":
        parts = [weights.matrix[block.start : block.stop] for block in blocks]
        here, own = parts[rank], blocks[rank]
        elsewhere = (here.indices < own.start) | (here.indices >= own.stop)
        receivers = np.repeat(np.arange(len(own)), np.diff(here.indptr))
        outer = np.unique(receivers[elsewhere])
        inner = np.setdiff1d(np.arange(len(own)), outer)
        needed = np.unique(here[outer].indices)
        places = _slices(np.searchsorted(needed, [0, *(b.stop for b in blocks)]).tolist())
        wanted = {p: np.unique(part[:, own.start : own.stop].indices) for p, part in enumerate(parts)}
        return cls(
            needed=needed,
            own_places=places[rank],
            own_rows=_rows(needed[places[rank]] - own.start),
            outgoing={p: _rows(rows) for p, rows in wanted.items() if p != rank and rows.size},
            incoming={p: at for p, at in enumerate(places) if p != rank and at.start < at.stop},
            inner_rows=_index(inner),
            inner=_entries(here[inner], np.arange(own.start, own.stop)),
            outer_rows=_index(outer),
            outer=_entries(here[outer], needed),
        )


def _entries(part: csr_array, table: np.ndarray) -> Entries:
    """Of some receivers, over a table that holds the rows of the nodes `table`."""
    return (
        _index(np.searchsorted(table, part.indices)),
        _index(part.indptr),
        torch.from_numpy(np.array(part.data)),
    )


def blocks(nodes: int, processes: int) -> list[range]:
    """Which nodes each process holds: contiguous, as equal as can be."""
    if not 1 <= processes <= nodes:
        raise UsageError(
            f"{processes} processes for {nodes} nodes: every process needs a node, start {nodes} or fewer"
        )
    ends = [k * nodes // processes for k in range(processes + 1)]
    return [range(a, b) for a, b in pairwise(ends)]


def _rows(rows: np.ndarray) -> Tensor | slice:
    """A slice where rows lie side by side, so that nothing is copied."""
    if rows.size and rows[-1] - rows[0] + 1 == rows.size:
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return _index(rows)


def _index(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))


_MOST_ROUNDS = 10_000


def rounds_until_heard(rounds: Iterable[Weights | None], blocks: Sequence[range], rank: int) -> int | None:
    """`Fabric.rounds_until_heard` where process p holds the nodes `blocks[p]` and a process passes on all that it has heard."""
    holder = np.repeat(np.arange(len(blocks)), [len(block) for block in blocks])
    heard = np.arange(len(blocks)) == rank
    for count, weights in enumerate(rounds):
        if heard.all():
            return count
        if count == _MOST_ROUNDS:
            return None
        if weights is None:
            return count + 1
        told = holder[weights.receivers[heard[holder[weights.senders]]]]
        heard = heard.copy()
        heard[told] = True
    return None


# The fabric


@dataclass
class _Receiving:
    """The messages of one round of mixing on their way to this process."""

    number: int
    weights: Weights
    kind: bytes
    route: Route
    table: Tensor
    """The rows of `route.needed`."""
    sides: dict[int, Tensor]
    late: list[Message]
    """What is still to be posted."""
    works: Works


_SIDE = struct.Struct("<q")
_NOBODY = -1  # nobody has asked to stop
_ALIGNED = 64  # columns: chunks of a row start where the vector loop of the whole row would pass, too


class Distributed(Fabric):
    """Contiguous blocks of rows, one block per process; the results have the bits that `Stacked` gives.

    A process sends a row only to processes that need it, straight to them, and is ready to receive those of the next round of
    mixing while it still waits for this one: gloo sends nothing before the receiver has said that it is
    ready. Sums run in the order of node ids, whoever computes them. The scalars `a` follow from the weights
    alone; they are computed here and not believed.

    What messages hold is announced once and repeated on each of them, so that a peer with rows of another
    shape is named instead of believed; rows that are not finite, or longer than the contract makes possible, are
    refused with the name of their node.
    """

    simulation = False

    def __init__(self, nodes: int, wire: Wire) -> None:
        self.nodes, self.wire = nodes, wire
        self.blocks = blocks(nodes, wire.size)
        self.rows: range = self.blocks[wire.rank]
        self._routes = lru_cache(maxsize=64)(lambda weights: Route.of(weights, self.blocks, wire.rank))
        self._entries = lru_cache(maxsize=64)(entries)
        self._tables: dict[tuple[int, torch.dtype, int], Tensor] = {}
        self._agreed: set[bytes] = set()
        self._count = 0
        self._ahead: _Receiving | None = None
        self._flight: tuple[Exchange, Tensor, Link, _Receiving | None, Works] | None = None
        """A round between `push` and `collect`."""
        self._midway = False
        """From the first message of a round until all of it has arrived; for good when the round has failed."""
        self.heard: set[int] = set()
        """Ranks whose rows have arrived; whoever keeps count empties it."""

    @property
    def sent_bytes(self) -> int:
        """Payload that left this process so far."""
        return self.wire.sent_bytes

    # A round

    def start(self, s: Tensor, common: bool) -> Link:
        self._announce(header("mix", s))
        own = torch.linalg.vector_norm(s[0], dtype=torch.float64) if common else math.inf
        bound = torch.tensor(Bound(float(own)), dtype=torch.float64)
        return {"a": torch.ones(self.nodes, dtype=torch.float64), "bound": bound}

    def push(self, exchange: Exchange, s: Tensor, a: Tensor, link: Link) -> None:
        if self._midway:  # its messages would be taken for those of a later round
            raise RunError(
                "a round has failed, and the others are no longer where this process is: end it, and open the run again"
            )
        receiving, works, self._midway = None, [], True
        if exchange.weights is not None:
            kind = header("mix", s)
            receiving = self._expected(exchange.weights, kind, s)
            works = self.wire.post(self._outgoing(receiving, kind, s), receiving.late)
            if exchange.ahead is not None:
                self._ahead = self._receive(exchange.ahead, kind, s)
                self._ahead.works, self._ahead.late = self.wire.prepare(self._ahead.late)
        self._flight = exchange, s, link, receiving, works

    def collect(self, seconds: float | None = None) -> Arrived:
        assert self._flight is not None, "push first"
        (exchange, s, link, receiving, works), self._flight = self._flight, None
        everybody = link["a"]
        bound = Bound(*link["bound"].tolist()).after(exchange, everybody)
        limits = bound.limits(everybody, s.shape[1])
        if exchange.weights is None:
            present = np.ones(self.nodes, bool) if exchange.present is None else exchange.present
            here = torch.from_numpy(present)
            s_mean = self._mean(s, present, limits, seconds)
            a_mean = average(everybody[:, None], here.nonzero().flatten())
            a = torch.where(here, a_mean, everybody)
            own = slice(self.rows.start, self.rows.stop)
            s, _ = synchronised(s, everybody[own], s_mean, a_mean, here[own])
        else:
            assert receiving is not None
            s = self._mix(s, receiving, works, limits, seconds)
            table = self._entries(exchange.weights, everybody.device, everybody.dtype)
            a = combine(everybody[:, None], *table)[:, 0]
        self._midway = False
        own_a = a[self.rows.start : self.rows.stop].clone()
        return Arrived(s, own_a, {"a": a, "bound": torch.tensor(bound, dtype=torch.float64)})

    # Mixing

    def _expected(self, weights: Weights, kind: bytes, s: Tensor) -> _Receiving:
        """The messages of this round: being received already if this is the round that was expected."""
        ready, self._ahead = self._ahead, None
        if ready is not None and ready.weights is weights and ready.kind == kind:
            return ready
        # the clock was restarted, and so everybody knows that these messages do not come
        if ready is not None:
            self._withdraw(ready, header("skip", s))
        self._announce(kind)
        return self._receive(weights, kind, s)

    def _receive(self, weights: Weights, kind: bytes, s: Tensor) -> _Receiving:
        """Where the messages of the next round of mixing go; two rounds take turns in memory."""
        route, number = self._routes(weights), self._count
        self._count += 1
        table = self._table(number % 2, s, len(route.needed))
        sides = {p: as_tensor(bytes(HEADER_SIZE + _SIDE.size)) for p in route.incoming}
        late = [Message(p, _tag(number), side) for p, side in sides.items()]
        late += [Message(p, _tag(number) + 1, table[at]) for p, at in route.incoming.items()]
        return _Receiving(number, weights, kind, route, table, sides, late, [])

    def _withdraw(self, ready: _Receiving, skip: bytes) -> None:
        """Tell whom we had led to expect a row that it does not come, and hear the same of others."""
        side, nothing = self._side(skip), as_tensor(bytes(1))
        outgoing = [Message(p, _tag(ready.number), side) for p in ready.route.outgoing]
        outgoing += [Message(p, _tag(ready.number) + 1, nothing) for p in ready.route.outgoing]
        self.wire.finish(ready.works + self.wire.post(outgoing, ready.late))
        self._read_sides(ready, skip)

    def _outgoing(self, receiving: _Receiving, kind: bytes, s: Tensor) -> list[Message]:
        """Per peer: what the message is, and the rows as they are."""
        side, tag = self._side(kind), _tag(receiving.number)
        messages = []
        for peer, rows in receiving.route.outgoing.items():
            messages.append(Message(peer, tag, side))
            messages.append(Message(peer, tag + 1, s[rows].cpu().contiguous()))
        return messages

    def _mix(
        self, s: Tensor, receiving: _Receiving, works: Works, limits: Tensor | None, seconds: float | None
    ) -> Tensor:
        """Rows that need nobody else are computed while messages travel."""
        route, table = receiving.route, receiving.table
        early = combine(s.cpu(), *route.inner) if len(route.inner_rows) else None
        table[route.own_places] = s[route.own_rows].cpu()
        self.wire.finish(receiving.works + works, seconds)
        self._read_sides(receiving, receiving.kind)
        for place in route.incoming.values():
            self._check_rows(table[place], route.needed[place], limits)
        self.heard.update(route.incoming)
        if not len(route.outer_rows):
            assert early is not None
            return early.to(s.device)
        late = combine(table, *route.outer)
        if limits is None:
            self._refuse_non_finite(late, table, route.needed)
        if early is None:
            return late.to(s.device)
        merged = torch.empty(len(self.rows), late.shape[1], dtype=late.dtype)
        merged[route.inner_rows], merged[route.outer_rows] = early, late
        return merged.to(s.device)

    # Meetings

    def mean(self, x: Tensor, present: np.ndarray | None = None) -> Tensor:
        return self._mean(x, present, None, None, in_round=False)

    def _mean(
        self,
        x: Tensor,
        present: np.ndarray | None,
        limits: Tensor | None,
        seconds: float | None,
        in_round: bool = True,
    ) -> Tensor:
        """Every process averages some of the columns over all nodes and hands them to everybody: what an all-reduce costs."""
        self._announce(header("mean", x))
        here = np.ones(self.nodes, dtype=bool) if present is None else present
        counts = [int(here[list(block)].sum()) for block in self.blocks]
        chosen = torch.from_numpy(here[list(self.rows)])
        mine = (x if bool(chosen.all()) else x[chosen.to(x.device)]).cpu()
        chunks = _chunks(x.shape[1], self.wire.size)
        own, peers = chunks[self.wire.rank], self.wire.peers
        table = torch.empty(sum(counts), own.stop - own.start, dtype=x.dtype)
        whole = torch.empty(x.shape[1], dtype=x.dtype)
        places = _slices(np.cumsum([0, *counts]).tolist())
        table[places[self.wire.rank]] = mine[:, own]
        flags = {p: as_tensor(bytes(_SIDE.size)) for p in peers if in_round}
        later = self.wire.post([], [Message(p, SPREAD, whole[chunks[p]]) for p in peers])
        self.wire.exchange(
            [Message(p, ROWS, mine[:, chunks[p]].contiguous()) for p in peers]
            + [Message(p, FLAG, as_tensor(self._flag())) for p in flags],
            [Message(p, ROWS, table[places[p]]) for p in peers]
            + [Message(p, FLAG, flag) for p, flag in flags.items()],
        )
        self._hear(flags.values())
        nodes = np.flatnonzero(here)
        self._check_rows(table, nodes, limits)
        self.heard.update(p for p in peers if counts[p])
        part = average(table, torch.arange(len(table)))
        self._refuse_non_finite(part[None], table, nodes)
        whole[own] = part
        self.wire.finish(later + self.wire.post([Message(p, SPREAD, part) for p in peers], []), seconds)
        self._check_mean(whole, chunks, limits)
        return whole.to(x.device)

    def gather(self, v: Tensor) -> Tensor:
        self._announce(header("gather", v[:, None]))
        own = v.cpu().contiguous()
        everybody = torch.empty(self.nodes, dtype=v.dtype)
        parts = [everybody[block.start : block.stop] for block in self.blocks]
        parts[self.wire.rank].copy_(own)
        self.wire.swap(SMALL, own, {p: parts[p] for p in self.wire.peers})
        result = everybody.to(v.device)
        if result.is_floating_point():
            self._refuse_rows(torch.isfinite(result).logical_not().nonzero().flatten().tolist())
        return result

    # What processes tell each other beside the rows

    def everybody(self, value: float) -> list[float]:
        found, own = torch.empty(self.wire.size, dtype=torch.float64), self.wire.rank
        found[own] = value
        self.wire.swap(SMALL, found[own : own + 1], {p: found[p : p + 1] for p in self.wire.peers})
        numbers: list[float] = found.tolist()
        for rank, number in enumerate(numbers):
            if not math.isfinite(number):
                raise PeerError(f"rank {rank} says {number} where a finite number was expected: refused")
        return numbers

    def rounds_until_heard(self, rounds: Iterable[Weights | None]) -> int | None:
        return rounds_until_heard(rounds, self.blocks, self.wire.rank)

    def _announce(self, kind: bytes) -> None:
        """Before the first messages of a kind all processes compare what these will hold."""
        if kind in self._agreed:
            return
        theirs = {peer: as_tensor(bytes(len(kind))) for peer in self.wire.peers}
        self.wire.swap(HEADER, as_tensor(kind), theirs)
        for peer, message in theirs.items():
            check_header(peer, message, kind)
        self._agreed.add(kind)

    def _side(self, kind: bytes) -> Tensor:
        return as_tensor(kind + self._flag())

    def _flag(self) -> bytes:
        return _SIDE.pack(_NOBODY if self.stop_after is None else self.stop_after)

    def _read_sides(self, receiving: _Receiving, expected: bytes) -> None:
        for peer, side in receiving.sides.items():
            check_header(peer, side, expected)
        self._hear(side[HEADER_SIZE:] for side in receiving.sides.values())

    def _hear(self, flags: Iterable[Tensor]) -> None:
        for flag in flags:
            (after,) = _SIDE.unpack(bytes(flag.tolist()))
            if after != _NOBODY:
                self.ask_to_stop(after)

    # Rows that are not believed

    def _check_rows(self, rows: Tensor, nodes: np.ndarray, limits: Tensor | None) -> None:
        """Refuse rows (or parts of them) that no honest node can have."""
        if limits is None or not rows.numel():
            return
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=wide).to("cpu", torch.float64)
        bad = (~(norms <= limits[nodes])).nonzero().flatten().tolist()
        if bad:
            self._refuse_rows([int(nodes[k]) for k in bad if not bool(torch.isfinite(rows[k]).all())])
            node, norm, most = int(nodes[bad[0]]), float(norms[bad[0]]), float(limits[nodes[bad[0]]])
            raise PeerError(
                f"the row of node {node} (rank {self._rank_of(node)}) has norm {norm:.4g} and clip, rates and noise of this run "
                f"make at most {most:.4g} possible: refused, nothing of this round was used"
            )

    def _check_mean(self, whole: Tensor, chunks: Sequence[slice], limits: Tensor | None) -> None:
        most = math.inf if limits is None else float(limits.max())
        for rank, columns in enumerate(chunks):
            norm = float(torch.linalg.vector_norm(whole[columns].double()))
            if not norm <= most or not math.isfinite(norm):
                raise PeerError(
                    f"the part of the mean from rank {rank} has norm {norm:.4g} and at most {most:.4g} is possible: refused, "
                    "nothing of this round was used"
                )

    def _refuse_non_finite(self, result: Tensor, table: Tensor, nodes: np.ndarray) -> None:
        """A NaN or infinity in a sum comes from a row that has one; looking at the sum is looking once."""
        if not result.numel():
            return
        low, high = torch.aminmax(result)
        if not bool(torch.isfinite(low + high)):
            bad = torch.isfinite(table).all(1).logical_not().nonzero().flatten().tolist()
            self._refuse_rows([int(nodes[k]) for k in bad])

    def _refuse_rows(self, nodes: Sequence[int]) -> None:
        if nodes:
            ranks = sorted({self._rank_of(n) for n in nodes})
            raise PeerError(
                f"the row of node {', '.join(map(str, nodes[:8]))} (rank {', '.join(map(str, ranks[:8]))}) holds NaN or infinity: "
                "refused, nothing of this round was used"
            )

    def _rank_of(self, node: int) -> int:
        return next(r for r, block in enumerate(self.blocks) if node in block)

    def _table(self, turn: int, x: Tensor, rows: int) -> Tensor:
        """Where the rows of a round come together; the memory is used again every other round."""
        key = turn, x.dtype, x.shape[1]
        if key not in self._tables or len(self._tables[key]) < rows:
            self._tables[key] = torch.empty(rows, x.shape[1], dtype=x.dtype)
        return self._tables[key][:rows]


def _tag(number: int) -> int:
    return MIXING + 2 * (number % (1 << 20))


def _chunks(width: int, processes: int) -> list[slice]:
    """Columns of each process; some have none when rows are short."""
    units = -(-width // _ALIGNED)
    return _slices([min(width, k * units // processes * _ALIGNED) for k in range(processes + 1)])


def _slices(ends: Sequence[int]) -> list[slice]:
    return [slice(a, b) for a, b in pairwise(ends)]
