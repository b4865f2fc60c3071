"""Frames: what is encoded comes back, and nothing else is believed."""

import json
import math
import random
import struct
from dataclasses import replace

import pytest

from dpps.peers import Frame, FrameError, Share, decode
from dpps.peers.messages import Claim, Presence, largest

ROW = bytes(range(24))
VIEW = (Presence(5, 2, 0, b"mine"), Presence(1 << 40, -1, 3, b"its own"))
SHARE = Share(Claim(0, 3, "x", 7, 0.5, 1.25, b"signed"), ROW)
SEEN = Claim(1, 9, "digest", 2, 0.25, 1.0, b"other")
FRAME = Frame("run", 1, True, 2, 4, 3, VIEW, SHARE, SEEN, b"receipt", "a row of NaN")


def test_frames_come_back() -> None:
    back = decode(FRAME.encode(), "run", 2, len(ROW))
    assert back.share is not None
    digest = back.share.claim.digest
    assert len(digest) == 64, "computed from the row, not believed"
    claim = replace(SHARE.claim, digest=digest)
    assert back == replace(FRAME, share=replace(SHARE, claim=claim))
    plain = replace(FRAME, share=None, seen=None, receipt=b"", refusal="")
    assert decode(plain.encode(), "run", 2, len(ROW)) == plain
    assert len(FRAME.encode()) <= largest(len(ROW))


def _with(**changes: object) -> bytes:
    """The frame with parts of its header replaced."""
    data = FRAME.encode()
    length = struct.unpack_from("<4sI", data)[1]
    header = json.loads(data[8 : 8 + length]) | changes
    text = json.dumps(header).encode()
    return struct.pack("<4sI", b"DPP2", len(text)) + text + data[8 + length :]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"DPP2",
        FRAME.encode()[:-1],
        FRAME.encode() + b"x",
        b"HTTP" + FRAME.encode()[4:],
        struct.pack("<4sI", b"DPP2", 1 << 31) + b"{}",
        struct.pack("<4sI", b"DPP2", 2) + b"{}",
        struct.pack("<4sI", b"DPP2", 5000) + b"[" * 5000,
        _with(run="another"),
        _with(start=0),
        _with(start=True),
        _with(got=-1),
        _with(kept=1 << 70),
        _with(view=[[1, 1, 0, ""]]),
        _with(view=[[1, 1, 0, ""], [1, 1, 9, ""]]),
        _with(view=[[1, 1, 0, ""], [1, 1, 0, "not hex"]]),
        _with(view=[[1, 1, 0], [1, 1, 0]]),
        _with(share=[0, 3, 0, 0.5, 1.0, ""]),
        _with(share=[0, -1, 1, 0.5, 1.0, ""]),
        _with(share=[0, 3, 1, -0.5, 1.0, ""]),
        _with(share=[0, 3, 1, math.nan, 1.0, ""]),
        _with(share=[0, 3, 1, 0.5, math.inf, ""]),
        _with(share=[3, 3, 1, 0.5, 1.0, ""]),
        _with(share=[0, 3, 1, 0.5, 1.0, "not hex"]),
        _with(share=[0, 3, 1, 0.5, 1.0]),
        _with(share=None),
        _with(seen=[0, 1]),
        _with(seen=[0, 1, "\ud800", 1, 0.5, 1.0, ""]),
        _with(seen=[0, 1, "é" * 64, 1, 0.5, 1.0, ""]),
        _with(receipt=7),
        _with(refusal=7),
        _with(refusal="x" * 1001),
    ],
)
def test_what_no_honest_member_sends_is_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        decode(data, "run", 2, len(ROW))


def test_garbage_is_refused_whatever_it_is() -> None:
    draw, good = random.Random(0), FRAME.encode()
    refused = 0
    for _ in range(2000):
        data = bytearray(good)
        for _ in range(draw.randint(1, 6)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            decode(bytes(data), "run", 2, len(ROW))  # a changed row, or a number that is another one
        except FrameError:
            refused += 1
    assert refused > 1000
