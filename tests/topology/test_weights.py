"""One round's weights."""

import pytest

from dpps.errors import UsageError
from dpps.topology import (
    Weights,
)


def test_entries_outside_the_matrix_are_refused() -> None:
    for receiver, sender in ((3, 0), (0, 3), (-1, 0), (0, -1)):
        with pytest.raises(UsageError, match=r"3 x 3 .*0 to 2"):
            Weights.from_entries(3, [0, receiver], [0, sender], [1.0, 1.0])
