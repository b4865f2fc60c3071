"""The side that dials: whose turn it is, and what it understands of an answer."""

import socket
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dpps.errors import PeerError
from dpps.peers.connections import TURN, _Dialler, _file_in, _next, _printable, _shown
from tests.support.peers import NAMES, Organisations
from tests.support.processes import free_port


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
    assert _Dialler(channel, NAMES[other])._turn() == (TURN if waits else 0.0)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"file": 3}', b"[" * 100_000])
def test_an_answer_that_is_not_understood(content: bytes) -> None:
    with pytest.raises(PeerError, match=r"answer.*hello"):
        _file_in(content)


def test_an_answer_holds_a_file_or_nothing() -> None:
    assert _file_in(b'{"file": ""}') == ""
    assert _file_in(b'{"file": "text"}') == "text"
    with pytest.raises(PeerError, match="hello"):
        _next(iter(()))


def test_a_file_that_is_no_text_does_not_end_the_dialling(three: Organisations) -> None:
    channel: Any = SimpleNamespace(federation=three.federation, own=three.federation.members[0], adopt=None)
    with pytest.raises(PeerError, match="wrong revision"):
        _Dialler(channel, NAMES[1])._adopt("\ud800")


def test_where_nobody_speaks_tls_no_certificate_is_shown(three: Organisations) -> None:
    contact = three.federation.members[0]
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def hang_up() -> None:
            server.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        assert _shown(replace(contact, address=address)) is None
    assert _shown(replace(contact, address=f"127.0.0.1:{free_port()}")) is None


def test_words_of_another_are_short_and_do_not_reach_the_terminal() -> None:
    assert _printable("\x1b[2Jhello\n") == "?[2Jhello?"
    assert len(_printable("x" * 10_000)) == 300
