"""The side that dials: whose turn it is, and what it understands of an answer."""

from types import SimpleNamespace
from typing import Any

import pytest

from dpps.errors import PeerError
from dpps.peers import TURN, Dialler
from dpps.peers.dialling import _another_certificate, _next, _printable, _read_verdict
from tests.support.peers import NAMES, Organisations


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Organisations:
    return Organisations(tmp_path_factory.mktemp("three"), (7441, 7442))


@pytest.mark.parametrize(
    ("own", "other", "waits"),
    [(0, 1, False), (1, 0, True), (2, 0, False)],
    ids=["the earlier row dials", "the later one waits", "who does not listen dials"],
)
def test_of_two_that_listen_the_later_row_leaves_dialling_to_the_other(
    three: Organisations, own: int, other: int, waits: bool
) -> None:
    channel: Any = SimpleNamespace(federation=three.federation, own=three.federation.members[own])
    assert Dialler(channel, NAMES[other])._turn() == (TURN if waits else 0.0)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"file": 3}', b"[" * 100_000])
def test_an_answer_that_is_not_understood(content: bytes) -> None:
    with pytest.raises(PeerError, match="not understood"):
        _read_verdict(content)


def test_an_answer_holds_a_file_or_nothing() -> None:
    assert _read_verdict(b'{"file": ""}') == ""
    assert _read_verdict(b'{"file": "text"}') == "text"
    with pytest.raises(PeerError, match="before its hello"):
        _next(iter(()))


def test_a_file_that_is_no_text_does_not_end_the_dialling(three: Organisations) -> None:
    channel: Any = SimpleNamespace(federation=three.federation, own=three.federation.members[0], adopt=None)
    with pytest.raises(PeerError, match="wrong epoch"):
        Dialler(channel, NAMES[1])._take_over("\ud800")


@pytest.mark.parametrize(
    ("details", "tls"),
    [
        ("CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate", True),
        ("Hostname Verification Check failed.", True),
        ("Connection refused", False),
        (None, False),
    ],
)
def test_tls_that_fails_is_told_from_a_connection_that_fails(details: str | None, tls: bool) -> None:
    assert _another_certificate(SimpleNamespace(details=lambda: details)) == tls


def test_words_of_another_are_short_and_do_not_reach_the_terminal() -> None:
    assert _printable("\x1b[2Jhello\n") == "?[2Jhello?"
    assert len(_printable("x" * 10_000)) == 300
