"""What a round is charged for and what it sends, by row."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dpps.errors import UsageError
from dpps.privacy.ledger import Rows
from dpps.protocol.state import State

if TYPE_CHECKING:
    from dpps.protocol.algorithm import DPPS


def rows_by_rate(sampling: float | Sequence[float], rows: Sequence[int]) -> list[tuple[float, Rows]]:
    """The rows of each sampling rate; ``all`` where they have one rate in common."""
    if isinstance(sampling, (int, float)):
        return [(float(sampling), "all")]
    if len(sampling) != len(rows):
        raise UsageError(
            f"{len(sampling)} sampling rates for {len(rows)} rows: give one per row, or one number"
        )
    if len(set(sampling)) == 1:
        return [(float(sampling[0]), "all")]
    groups: dict[float, list[int]] = {}
    for rate, row in zip(sampling, rows, strict=True):
        groups.setdefault(float(rate), []).append(row)
    return [(rate, tuple(members)) for rate, members in groups.items()]


def bytes_of_round(protocol: "DPPS", state: State) -> int:
    """Sent by the busiest node: row and 8 bytes beside it to each peer, or an all-reduce mean; plus the scalar S_i to everybody
    where one is broadcast."""
    n, row = protocol.fabric.nodes, state.s.shape[1] * state.s.element_size()
    scalar = 8 * (n - 1) if protocol.sensitivity and not protocol.sensitivity.base_is_public else 0
    if protocol.synchronises(state.clock):
        return 2 * (n - 1) * (row + 8) // n + scalar
    first = protocol.time(state)
    degrees = (protocol.topology.weights(t).out_degree.max() for t in range(first, first + protocol.mixes))
    return sum(int(degree) for degree in degrees) * (row + 8) + scalar
