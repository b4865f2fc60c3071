"""A peer that cannot be connected to is told from one that says nothing."""

import socket

from dpps.transport import Listener, unreachable


def test_reachable_or_not() -> None:
    listener = Listener("127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as hangs:  # takes connections by its system alone
        peers = {3: ("127.0.0.1", listener.port), 4: hangs.getsockname()}
        assert unreachable(peers, 5.0) == {}
    listener.close()
    assert unreachable({3: ("127.0.0.1", listener.port)}, 5.0) == {3: "Connection refused"}
