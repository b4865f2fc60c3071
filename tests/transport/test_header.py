"""The first bytes of a message say what follows; anything else is refused by the name of its sender."""

import pytest
import torch

from dpps.errors import PeerError
from dpps.transport import HEADER_SIZE, check_header
from dpps.transport.wire import header


def _bytes(head: bytes) -> torch.Tensor:
    return torch.tensor([*head, 7, 7], dtype=torch.uint8)


def test_what_was_announced_is_let_through() -> None:
    head = header("mix", torch.zeros(2, 5))
    assert len(head) == HEADER_SIZE
    check_header(3, _bytes(head), head)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (header("mix", torch.zeros(2, 6)), "rows of 6 float32 for mix"),
        (header("mix", torch.zeros(2, 5, dtype=torch.float64)), "rows of 5 float64 for mix"),
        (header("gather", torch.zeros(2, 5)), "rows of 5 float32 for gather"),
        (bytes([5, 0, 0, 0, 200, 200, 0, 0]), ".*unknown"),
    ],
)
def test_anything_else_is_refused_by_name(sent: bytes, said: str) -> None:
    with pytest.raises(PeerError, match=rf"rank 3 sends {said}.*rows of 5 float32 for mix"):
        check_header(3, _bytes(sent), header("mix", torch.zeros(2, 5)))
