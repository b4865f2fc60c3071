"""Whether this process reaches another one: tried with everybody before the run, and again with a peer that does not answer.

A process that hangs still takes connections (its system does it), so a peer that cannot be connected to is cut off, and one that
can be connected to and says nothing is slow, hangs, or waits for somebody else.
"""

import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

_AT_ONCE = 32


class Listener:
    """A port on one address that takes connections and closes them at once.

    Args:
        address: of this machine, as its peers see it.
    """

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        self._thread = Thread(target=self._take, daemon=True)
        self._thread.start()

    def _take(self) -> None:
        while True:
            try:
                self._socket.accept()[0].close()
            except OSError:  # closed
                return

    def close(self) -> None:
        """Take no more connections."""
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread up
        self._thread.join()
        self._socket.close()


def unreachable(peers: Mapping[int, tuple[str, int]], seconds: float) -> dict[int, str]:
    """Which of the peers (address and port by rank) cannot be connected to within the time, and why."""

    def attempt(rank: int) -> tuple[int, str]:
        try:
            socket.create_connection(peers[rank], timeout=seconds).close()
        except TimeoutError:
            return rank, f"no answer for {seconds:.3g} s"
        except OSError as error:
            return rank, error.strerror or "no connection"
        return rank, ""

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return {rank: why for rank, why in pool.map(attempt, peers) if why}
