"""A few rows in each of many processes, on one machine or many."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from dpps.errors import PeerError, UsageError
from dpps.fabric.base import Fabric, combine
from dpps.fabric.wire import DOOR, ROWS, SMALL, Message, Wire
from dpps.topology import Weights

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.uint8, torch.int64)
_VERBS = ("mix", "mean", "gather")
_ALIGNED = 64  # columns: chunks of a row start where the vector loop of the whole row would pass, too


class Distributed(Fabric):
    """Contiguous blocks of rows, one block per process; the results have the bits that `Stacked` gives.

    A process sends a row only to processes that need it, straight to them. Sums run in the order of node ids, whoever
    computes them. What a message brings is announced before the first one of its kind, so that a peer with rows of another
    shape is named instead of believed; rows that are not finite are refused with the name of their node.

    Args:
        nodes: N.
        wire: the connections of this process.
    """

    simulation = False

    def __init__(self, nodes: int, wire: Wire) -> None:
        self.nodes, self.wire = nodes, wire
        self.blocks = blocks(nodes, wire.size)
        self.rows: range = self.blocks[wire.rank]
        self._routes = lru_cache(maxsize=64)(self._route)
        self._tables: dict[tuple[int, torch.dtype, int], Tensor] = {}
        self._agreed: set[tuple[int, bytes]] = set()

    @property
    def sent_bytes(self) -> int:
        """Payload that left this process so far."""
        return self.wire.sent_bytes

    # The verbs

    def mix(self, weights: Weights, *xs: Tensor) -> list[Tensor]:
        extra = sum(x.shape[1] * x.element_size() for x in xs[1:])
        door = _door("mix", xs[0], extra)
        route = self._routes(weights)
        tables = [self._table(k, x, len(route.needed)) for k, x in enumerate(xs)]
        sides = {
            p: self._bytes(len(door) + len(route.needed[at]) * extra) for p, at in route.incoming.items()
        }
        early: list[Tensor] = []

        def local_part() -> None:
            for x, table in zip(xs, tables, strict=True):
                table[route.own_places] = x[route.own_rows].to(table.device)
            if len(route.inner_rows):
                early.extend(combine(x.to(self.wire.device), *route.inner) for x in xs)

        self._exchange(
            route, door, self._outgoing(route, door, xs), _incoming(route, tables[0], sides), local_part
        )
        for peer, place in route.incoming.items():
            self._unpack(peer, place, door, sides[peer], tables[1:])
        return [
            self._finish(route, table, early[k : k + 1]).to(xs[k].device) for k, table in enumerate(tables)
        ]

    def max(self, v: Tensor) -> float:
        return float(self.gather(v).max())

    def mean(self, x: Tensor, present: np.ndarray | None = None) -> Tensor:
        """Every process averages some of the columns over all nodes and hands them to everybody: what an all-reduce costs."""
        self._announce("mean", x)
        here = np.ones(self.nodes, dtype=bool) if present is None else present
        counts = [int(here[list(block)].sum()) for block in self.blocks]
        chosen = torch.from_numpy(here[list(self.rows)])
        mine = (x if bool(chosen.all()) else x[chosen.to(x.device)]).to(self.wire.device)
        chunks = _chunks(x.shape[1], self.wire.size)
        own = chunks[self.wire.rank]
        table = torch.empty(sum(counts), own.stop - own.start, dtype=x.dtype, device=self.wire.device)
        places = [slice(a, b) for a, b in pairwise(np.cumsum([0, *counts]).tolist())]
        table[places[self.wire.rank]] = mine[:, own]
        outgoing = [Message(p, ROWS, mine[:, chunks[p]].contiguous()) for p in self.wire.peers]
        incoming = [Message(p, ROWS, table[places[p]]) for p in self.wire.peers]
        self.wire.exchange(_filled(outgoing), _filled(incoming))
        ids = torch.arange(len(table), device=table.device)
        ends = torch.tensor([0, len(table)], device=table.device)
        ones = torch.ones(len(table), dtype=torch.float64, device=table.device)
        part = combine(table, ids, ends, ones)[0] / len(table)
        self._refuse_non_finite(part[None], table, np.flatnonzero(here))
        return self._spread(part, chunks, x.shape[1]).to(x.device)

    def gather(self, v: Tensor) -> Tensor:
        self._announce("gather", v[:, None])
        own = v.to(self.wire.device).contiguous()
        everybody = torch.empty(self.nodes, dtype=v.dtype, device=self.wire.device)
        everybody[self.rows.start : self.rows.stop] = own
        parts = {p: everybody[self.blocks[p].start : self.blocks[p].stop] for p in self.wire.peers}
        self.wire.exchange(
            [Message(p, SMALL, own) for p in parts], [Message(p, SMALL, part) for p, part in parts.items()]
        )
        result = everybody.to(v.device)
        if result.is_floating_point():
            self._refuse_rows(torch.isfinite(result).logical_not().nonzero().flatten().tolist())
        return result

    # What a mixing round is made of

    def _route(self, weights: Weights) -> "_Route":
        return _Route.of(weights, self.blocks, self.wire.rank, self.wire.device)

    def _table(self, k: int, x: Tensor, rows: int) -> Tensor:
        """Where the rows needed for the k-th tensor of a round come together; the memory is used again."""
        key = k, x.dtype, x.shape[1]
        if key not in self._tables or len(self._tables[key]) < rows:
            self._tables[key] = torch.empty(rows, x.shape[1], dtype=x.dtype, device=self.wire.device)
        return self._tables[key][:rows]

    def _bytes(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self.wire.device)

    def _outgoing(self, route: "_Route", door: bytes, xs: Sequence[Tensor]) -> list[Message]:
        """Per peer: the rows of the first tensor as they are, and all else behind the announcement in one small message."""
        messages = []
        for peer, rows in route.outgoing.items():
            packed = [x[rows].to(self.wire.device).contiguous().view(torch.uint8).flatten() for x in xs[1:]]
            messages.append(Message(peer, DOOR, torch.cat([self._sent(door), *packed])))
            messages.append(Message(peer, ROWS, xs[0][rows].to(self.wire.device).contiguous()))
        return _filled(messages)

    def _exchange(
        self,
        route: "_Route",
        door: bytes,
        outgoing: Sequence[Message],
        incoming: Sequence[Message],
        meanwhile: Callable[[], None],
    ) -> None:
        """All at once; but rows are received from a new peer, or of a new shape, only after their announcement was checked."""
        new = {(peer, door) for peer in route.incoming} - self._agreed
        if new:
            self.wire.exchange(_only(DOOR, outgoing), _only(DOOR, incoming))
            for message in _only(DOOR, incoming):
                self._check_door(message.peer, message.tensor, door)
            self._agreed |= new
            outgoing, incoming = _only(ROWS, outgoing), _only(ROWS, incoming)
        self.wire.exchange(outgoing, incoming, meanwhile)

    def _unpack(self, peer: int, place: slice, door: bytes, side: Tensor, tables: Sequence[Tensor]) -> None:
        self._check_door(peer, side, door)
        at = len(door)
        for table in tables:
            target = table[place]
            part = side[at : at + target.nbytes].clone()  # a copy is aligned
            target.copy_(part.view(target.dtype).view(target.shape))
            at += target.nbytes

    def _finish(self, route: "_Route", table: Tensor, early: Sequence[Tensor]) -> Tensor:
        """Rows computed early and those that had to wait, in their places."""
        if not len(route.outer_rows):
            return early[0]
        late = combine(table, *route.outer)
        self._refuse_non_finite(late, table, route.needed)
        if not early:
            return late
        merged = torch.empty(len(self.rows), late.shape[1], dtype=late.dtype, device=late.device)
        merged[route.inner_rows], merged[route.outer_rows] = early[0], late
        return merged

    # Columns

    def _spread(self, part: Tensor, chunks: Sequence[slice], width: int) -> Tensor:
        """Every process' chunk to everybody."""
        whole = torch.empty(width, dtype=part.dtype, device=part.device)
        whole[chunks[self.wire.rank]] = part
        outgoing = [Message(p, ROWS, part) for p in self.wire.peers]
        incoming = [Message(p, ROWS, whole[chunks[p]]) for p in self.wire.peers]
        self.wire.exchange(_filled(outgoing), _filled(incoming))
        return whole

    # The door

    def _announce(self, verb: str, x: Tensor) -> None:
        """Before the first messages of a kind all processes compare what these will hold."""
        door = _door(verb, x)
        new = [peer for peer in self.wire.peers if (peer, door) not in self._agreed]
        if new:
            theirs = [Message(peer, DOOR, self._bytes(len(door))) for peer in new]
            self.wire.exchange([Message(peer, DOOR, self._sent(door)) for peer in new], theirs)
            for message in theirs:
                self._check_door(message.peer, message.tensor, door)
            self._agreed |= {(peer, door) for peer in new}

    def _sent(self, door: bytes) -> Tensor:
        return torch.frombuffer(bytearray(door), dtype=torch.uint8).to(self.wire.device)

    def _check_door(self, peer: int, message: Tensor, expected: bytes) -> None:
        received = bytes(message[: len(expected)].tolist())
        if received != expected:
            raise PeerError(
                f"rank {peer} sends {_described(received)} where {_described(expected)} was expected: refused, "
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
            ranks = sorted({next(r for r, block in enumerate(self.blocks) if n in block) for n in nodes})
            raise PeerError(
                f"the row of node {', '.join(map(str, nodes[:8]))} (rank {', '.join(map(str, ranks[:8]))}) holds NaN or infinity: "
                "refused, nothing of this round was used"
            )


@dataclass(frozen=True)
class _Route:
    """What one process sends, receives and adds up under one matrix of weights."""

    needed: np.ndarray
    """Ids of the nodes whose rows are needed for rows with a sender elsewhere: the table, ascending."""
    own_places: slice
    own_rows: Tensor | slice
    outgoing: dict[int, Tensor | slice]
    incoming: dict[int, slice]
    inner_rows: Tensor
    """Receivers that need nobody else: they are computed while messages travel."""
    inner: tuple[Tensor, Tensor, Tensor]
    outer_rows: Tensor
    outer: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, weights: Weights, blocks: Sequence[range], rank: int, device: torch.device) -> "_Route":
        own = blocks[rank]
        parts = [weights.senders[weights.indptr[i] : weights.indptr[i + 1]] for i in own]
        alone = np.array([bool(np.isin(p, own).all()) for p in parts], dtype=bool)
        inner, outer = np.flatnonzero(alone), np.flatnonzero(~alone)
        needed = np.unique(np.concatenate([np.empty(0, np.int64), *(parts[k] for k in outer)]))
        ends = np.searchsorted(needed, [0, *(b.stop for b in blocks)]).tolist()
        places = [slice(a, b) for a, b in pairwise(ends)]
        return cls(
            needed=needed,
            own_places=places[rank],
            own_rows=_rows(needed[places[rank]] - own.start, device),
            outgoing=_outgoing(weights, blocks, rank, device),
            incoming={p: at for p, at in enumerate(places) if p != rank and at.start < at.stop},
            inner_rows=_index(inner, device),
            inner=_part(weights, own, inner, np.arange(own.start, own.stop), device),
            outer_rows=_index(outer, device),
            outer=_part(weights, own, outer, needed, device),
        )


def _outgoing(
    weights: Weights, blocks: Sequence[range], rank: int, device: torch.device
) -> dict[int, Tensor | slice]:
    """Which of the rows here each peer needs."""
    own, wanted = blocks[rank], {}
    for peer, block in enumerate(blocks):
        entries = slice(weights.indptr[block.start], weights.indptr[block.stop])
        senders = np.unique(weights.senders[entries])
        rows = senders[np.isin(senders, own)] - own.start
        if peer != rank and rows.size:
            wanted[peer] = _rows(rows, device)
    return wanted


def _part(
    weights: Weights, own: range, receivers: np.ndarray, table: np.ndarray, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of `combine` for some of the receivers, over a table that holds the rows of the nodes `table`."""
    spans = [slice(weights.indptr[own.start + k], weights.indptr[own.start + k + 1]) for k in receivers]
    senders = np.concatenate([np.empty(0, np.int64), *(weights.senders[s] for s in spans)])
    values = np.concatenate([np.empty(0), *(weights.values[s] for s in spans)])
    offsets = np.cumsum([0, *(s.stop - s.start for s in spans)])
    return (
        _index(np.searchsorted(table, senders), device),
        _index(offsets, device),
        torch.from_numpy(values).to(device),
    )


def _incoming(route: _Route, table: Tensor, sides: dict[int, Tensor]) -> list[Message]:
    small = [Message(peer, DOOR, side) for peer, side in sides.items()]
    return _filled(small + [Message(peer, ROWS, table[place]) for peer, place in route.incoming.items()])


def blocks(nodes: int, processes: int) -> list[range]:
    """Which nodes each process holds: contiguous, as equal as can be."""
    if not 1 <= processes <= nodes:
        raise UsageError(
            f"{processes} processes for {nodes} nodes: every process needs a node, start {nodes} or fewer"
        )
    ends = [k * nodes // processes for k in range(processes + 1)]
    return [range(a, b) for a, b in pairwise(ends)]


def _chunks(width: int, processes: int) -> list[slice]:
    """Columns of each process; some have none when rows are short."""
    units = -(-width // _ALIGNED)
    ends = [min(width, k * units // processes * _ALIGNED) for k in range(processes + 1)]
    return [slice(a, b) for a, b in pairwise(ends)]


def _only(tag: int, messages: Sequence[Message]) -> list[Message]:
    return [m for m in messages if m.tag == tag]


def _filled(messages: Sequence[Message]) -> list[Message]:
    return [m for m in messages if m.tensor.numel()]


def _rows(rows: np.ndarray, device: torch.device) -> Tensor | slice:
    """A slice where rows lie side by side, so that nothing is copied."""
    if rows.size and rows[-1] - rows[0] + 1 == rows.size:
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return _index(rows, device)


def _index(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)


def _door(verb: str, x: Tensor, extra: int = 0) -> bytes:
    """What messages of this kind hold: columns and their type, for which verb, and bytes per row beside them."""
    return struct.pack("<IBBH", x.shape[1], _DTYPES.index(x.dtype), _VERBS.index(verb), extra)


def _described(door: bytes) -> str:
    width, dtype, verb, extra = struct.unpack("<IBBH", door)
    name = str(_DTYPES[dtype]).removeprefix("torch.") if dtype < len(_DTYPES) else "unknown numbers"
    what = _VERBS[verb] if verb < len(_VERBS) else "an unknown verb"
    return f"rows of {width} {name} and {extra} bytes more for {what}"
