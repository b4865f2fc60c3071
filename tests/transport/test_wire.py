"""Messages between processes: whoever is silent is named, and what was sent is counted."""

import pytest
import torch

from dpps.errors import RunError
from dpps.transport import ROWS, Message, Wire


class Group:
    """As a process group of torch.distributed; every operation ends with what it was told to."""

    def __init__(self, error: str | None = None) -> None:
        self.error, self.log = error, []

    def _work(self, what: str, peer: int, tag: int):
        self.log.append((what, peer, tag))
        error = self.error

        class Work:
            def wait(self, limit) -> None:
                if error:
                    raise RuntimeError(error)

        return Work()

    def send(self, tensors, peer: int, tag: int):
        return self._work("send", peer, tag)

    def recv(self, tensors, peer: int, tag: int):
        return self._work("recv", peer, tag)


def test_receives_are_posted_before_sends_and_payload_is_counted() -> None:
    group = Group()
    wire = Wire(group, 1, 3)
    assert wire.peers == [2, 0]
    wire.exchange([Message(2, ROWS, torch.zeros(5))], [Message(0, ROWS, torch.zeros(7))])
    assert group.log == [("recv", 0, ROWS), ("send", 2, ROWS)]
    assert wire.sent_bytes == 20


@pytest.mark.parametrize(
    ("error", "said"),
    [("Timed out waiting 1000ms", "rank 2: .*48 s"), ("Connection closed by peer", "rank 2: ")],
)
def test_a_peer_that_is_silent_or_gone_is_named(error: str, said: str) -> None:
    wire = Wire(Group(error), 0, 3)
    with pytest.raises(RunError, match=said):
        wire.exchange([], [Message(2, ROWS, torch.zeros(1))])
