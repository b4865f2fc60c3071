"""Messages between processes: tensors point to point, counted, with a limit on waiting and a name for whoever fails."""

import os
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dpps.errors import PeerError, RunError

HEADER, ROWS, SMALL, SPREAD, FLAG = 1, 2, 3, 5, 6
"""Tags: what messages are about to bring, rows of parameters, a few numbers, parts of a mean, a request to stop."""
_NEVER = 4  # nobody sends this
MIXING = 16
"""The first of the tags of mixing rounds, of which each has two of its own."""

CLOSED = "its connection was closed"

Works = list[tuple[int, Any]]
"""Messages on their way, each with the rank of its peer."""


class Message(NamedTuple):
    """A contiguous tensor to or from a peer (the rank of its process)."""

    peer: int
    tag: int
    tensor: Tensor


Trouble = Callable[[Sequence[int], str], RunError]
"""Given the ranks that this process lost and what it saw, the error that names who really failed."""


def _plain(ranks: Sequence[int], what: str) -> RunError:
    return RunError(f"rank {', '.join(map(str, ranks))}: {what}")


class Wire:
    """The connections of one process to all others.

    Args:
        group: a process group of torch.distributed (gloo on the CPU, nccl on a GPU).
        rank: of this process.
        size: how many processes there are.
        patience: seconds to wait for a peer.
        trouble: makes the error when a peer is lost.
        device: where messages lie: the CPU for gloo, the GPU for nccl.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        size: int,
        patience: float = 48.0,
        trouble: Trouble = _plain,
        device: torch.device | str = "cpu",
    ) -> None:
        self._group, self.rank, self.size, self.patience = group, rank, size, patience
        self._trouble = trouble
        self.device = torch.device(device)
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

    def post(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> Works:
        """Begin to send and to receive; the tensors must stay where they are until `finish` has returned."""
        self.sent_bytes += sum(m.tensor.nbytes for m in outgoing)
        return self._post(outgoing, incoming)

    def prepare(self, incoming: Sequence[Message]) -> tuple[Works, list[Message]]:
        """Begin to receive what is to come later; second, what could not be begun.

        A peer that has gone need not be missed: the run may be over. Whoever needs its message posts it then
        and learns who failed.
        """
        works, left = [], []
        for message in incoming:
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
        for peer in self.peers if self.device.type == "cpu" else ():
            with suppress(RuntimeError):
                nothing = torch.empty(1, dtype=torch.uint8)
                self._group.recv([nothing], peer, _NEVER).wait(timedelta(milliseconds=1))

    def _post(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> Works:
        if self.device.type == "cuda":  # nccl wants all operations of an exchange in one group
            ops = [dist.P2POp(dist.irecv, m.tensor, m.peer, self._group) for m in incoming]
            ops += [dist.P2POp(dist.isend, m.tensor, m.peer, self._group) for m in outgoing]
            works = dist.batch_isend_irecv(ops) if ops else []
            peer = ops[0].peer if ops else self.rank
            return [(peer, work) for work in works]
        receive, send = self._group.recv, self._group.send
        posted = [(m.peer, self._guarded(m.peer, receive, [m.tensor], m.peer, m.tag)) for m in incoming]
        return posted + [(m.peer, self._guarded(m.peer, send, [m.tensor], m.peer, m.tag)) for m in outgoing]

    def _guarded(self, peer: int, action: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except RuntimeError as error:
            silent = "imed out" in str(error)
            what = f"no answer for {self.patience:.3g} s" if silent else CLOSED
            raise self._trouble([peer], what) from error


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

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.uint8, torch.int64)
_VERBS = ("mix", "mean", "gather", "skip")
_FORMAT = struct.Struct("<IBB2x")
HEADER_SIZE = _FORMAT.size


def header(verb: str, x: Tensor) -> bytes:
    """What messages of this kind hold: columns and their type, and for which verb."""
    return _FORMAT.pack(x.shape[1], _DTYPES.index(x.dtype), _VERBS.index(verb))


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
    name = str(_DTYPES[dtype]).removeprefix("torch.") if dtype < len(_DTYPES) else "unknown numbers"
    what = _VERBS[verb] if verb < len(_VERBS) else "an unknown verb"
    return f"rows of {width} {name} for {what}"
