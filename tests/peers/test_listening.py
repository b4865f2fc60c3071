"""The side that is dialled: connections that get no further than TLS, and callers that say nothing."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from dpps.errors import PeerError
from dpps.peers.connections import HANDSHAKE, Handshakes, _first, _host


class Lines(list[str]):
    """What is told, by a clock that the test moves on."""

    now = 0.0

    def told(self, handshakes: Handshakes, after: float = HANDSHAKE) -> int:
        """How many lines there are after so many seconds more."""
        self.now += after
        handshakes.look()
        return len(self)


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def handshakes(lines: Lines) -> Iterator[Handshakes]:
    made = Handshakes(lines.append, lambda: lines.now)
    yield made
    made.close()


def test_one_line_for_all_connections_that_got_no_further(lines: Lines, handshakes: Handshakes) -> None:
    assert lines.told(handshakes) == 0
    for _ in range(5):
        handshakes.begun()
    handshakes.passed("ipv4:10.0.0.1:1000")
    assert lines.told(handshakes) == 1
    assert "certificate" in lines[0]
    assert lines.told(handshakes) == 1  # they are counted once


def test_nothing_is_said_when_all_got_through_however_many_streams_they_open(
    lines: Lines, handshakes: Handshakes
) -> None:
    for port in (1000, 1001):
        handshakes.begun()
        for _ in range(3):
            handshakes.passed(f"ipv4:10.0.0.1:{port}")
    assert lines.told(handshakes) == 0


def test_a_connection_that_has_just_begun_is_not_yet_refused(lines: Lines, handshakes: Handshakes) -> None:
    handshakes.begun()
    handshakes.passed("ipv4:10.0.0.1:1000")
    lines.now = 0.9 * HANDSHAKE
    handshakes.begun()
    assert lines.told(handshakes, after=0.2 * HANDSHAKE) == 0
    assert lines.told(handshakes) == 1  # now it has had its time


def test_who_ends_the_connection_before_its_hello_is_refused() -> None:
    def broken():
        raise Exception("the connection broke")  # noqa: TRY002 - as gRPC does
        yield b""

    assert _first(iter([b"hello", b"row"])) == b"hello"
    for requests in (iter(()), broken()):
        with pytest.raises(PeerError, match="hello"):
            _first(requests)


def test_a_caller_is_named_without_its_port() -> None:
    assert _host(SimpleNamespace(peer=lambda: "ipv4:10.0.0.1:34567")) == "10.0.0.1"
    assert _host(SimpleNamespace(peer=lambda: "ipv6:[fd00::1]:34567")) == "[fd00::1]"
