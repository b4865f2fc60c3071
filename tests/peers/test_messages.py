"""What members tell each other: what is encoded comes back, and nothing else is believed."""

import json
import math
import random
import struct
from dataclasses import replace

import pytest

from dpps.errors import PeerError
from dpps.peers import Frame, FrameError, Share, decode, renew
from dpps.peers.messages import (
    LARGEST_HELLO,
    PROTOCOL,
    Claim,
    Hello,
    Presence,
    largest,
    newer_file,
    refuse_other,
    refuse_replayed,
)
from tests.support.peers import Organisations

FACTS = {"version": "0.2.0", "protocol": PROTOCOL, "model": "abc"}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Organisations:
    return Organisations(tmp_path_factory.mktemp("three"), (7441, 7442))


@pytest.fixture
def hello(three: Organisations) -> Hello:
    return Hello.of(three.federation, FACTS)


def test_what_is_encoded_is_decoded_and_every_hello_has_its_own_number(
    hello: Hello, three: Organisations
) -> None:
    assert Hello.decoded(hello.encoded()) == hello
    assert Hello.of(three.federation, FACTS).nonce != hello.nonce
    refuse_other(hello, hello)
    refuse_replayed(hello.nonce, hello)


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": "1"},
        {"epoch": True},
        {"facts": {"version": 3}},
        {"facts": {"version": "\x1b[2J"}},
        {"facts": {str(k): "" for k in range(60)}},
        {"nonce": "x" * 201},
        {"more": ""},
    ],
    ids=["text", "a truth value", "a number", "terminal codes", "too many", "too long", "unknown"],
)
def test_what_is_no_hello_is_refused(hello: Hello, change: dict[str, object]) -> None:
    with pytest.raises(PeerError, match="no hello"):
        Hello.decoded(json.dumps({**json.loads(hello.encoded()), **change}).encode())


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"[" * 100_000])
def test_other_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(PeerError, match="no hello"):
        Hello.decoded(content)


def test_a_hello_is_not_read_beyond_its_length() -> None:
    with pytest.raises(PeerError, match=rf"{LARGEST_HELLO + 1}.*{LARGEST_HELLO}"):
        Hello.decoded(b" " * (LARGEST_HELLO + 1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"federation": "other"}, "wrong run"),
        ({"facts": {**FACTS, "version": "9"}}, r"other version.* 9,.*0\.2\.0"),
        ({"facts": {"version": "0.2.0", "protocol": PROTOCOL}}, "other model"),
        ({"facts": {"version": "0.2.0", "model": "abc"}}, f"protocol.*{PROTOCOL}"),
        ({"digest": "other"}, "wrong revision"),
    ],
)
def test_another_run_version_model_or_file_is_named(
    hello: Hello, change: dict[str, object], words: str
) -> None:
    with pytest.raises(PeerError, match=words):
        refuse_other(hello, replace(hello, **change))  # type: ignore[arg-type]


def test_an_answer_to_another_question_is_a_replay(hello: Hello) -> None:
    with pytest.raises(PeerError, match="replayed"):
        refuse_replayed("another number", hello)


def test_a_later_revision_is_believed_only_with_the_conveners_file(
    three: Organisations, hello: Hello
) -> None:
    known = three.federation
    assert newer_file(known, hello) is None
    later = renew(known, three.convener)
    theirs = replace(Hello.of(later, FACTS), file=later.to_toml())
    found = newer_file(known, theirs)
    assert found.digest == later.digest
    files = (
        replace(theirs, file=file) for file in ("", known.to_toml(), "\ud800", f"# \ud800\n{known.to_toml()}")
    )
    for wrong in (*files, replace(theirs, revision=7)):
        with pytest.raises(PeerError, match="wrong revision"):
            newer_file(known, wrong)


ROW = bytes(range(24))
VIEW = (Presence(5, 2, 0, b"mine"), Presence(1 << 40, -1, 3, b"its own"))
SHARE = Share(Claim(0, 3, "x", 7, 0.5, 1.25, b"signed"), ROW)
SEEN = Claim(1, 9, "digest", 2, 0.25, 1.0, b"other")
FRAME = Frame("run", 1, True, 2, 4, 3, VIEW, SHARE, SEEN, b"receipt", "a row of NaN")


def test_frames_come_back() -> None:
    back = decode(FRAME.encode(), "run", 2, len(ROW))
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
