"""The first bytes of what a process sends: what follows, and for what."""

import struct

import torch
from torch import Tensor

from dpps.errors import PeerError

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
