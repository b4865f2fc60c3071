"""What a round of a run leaves behind: one line of rounds.csv."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dpps.protocol import DPPS, RoundRecord

COLUMNS = ("round", "real", "estimated", "used", "scale", "epsilon", "loss")
"""Of rounds.csv."""


@dataclass(frozen=True)
class RoundLog:
    """One round. `loss` is computed from the data without noise: it is for the node's own eyes.

    `epsilon` is that of this round's message alone, where its noise has a pure one (Laplace). A Gaussian round has none: what
    all of them cost together is in `Run.privacy`, which takes an accountant too long to be asked after every round.
    """

    round: int
    real: float | None
    estimated: float | None
    used: float | None
    scale: float
    epsilon: float | None
    loss: float
    bytes: int = 0
    watched: dict[str, float] = field(default_factory=dict)
    accuracy: float | None = None
    """Percent on the test set, after the last round of an epoch."""
    clipped: float | None = None
    """Share of the round's examples whose gradient was clipped (unit record), not noised: for the node's own eyes."""
    update_to_noise: float | None = None
    """Norm of a node's update over the expected norm of the noise of its message, not noised either."""

    @classmethod
    def of(
        cls, round_: int, record: RoundRecord | None, losses: Tensor, protocol: DPPS, rows: Tensor
    ) -> "RoundLog":
        """From what the protocol recorded (nothing when nothing is shared), every node's loss, and the protocol's rows."""
        loss = float(losses.mean())
        if record is None:
            return cls(round_, None, None, None, 0.0, 0.0, loss)
        epsilon = record.epsilon if math.isfinite(record.epsilon) else None
        found = (record.real, record.estimated, record.used, record.scale, epsilon)
        watched = {name: value for name, value in record.watched.items() if name != "real"}
        sent, ratio = bytes_sent(protocol, record.clock, rows), update_to_noise(protocol, record, rows)
        return cls(round_, *found, loss, sent, watched, update_to_noise=ratio)

    def row(self) -> list[object]:
        """The values of `COLUMNS`; empty where there is none."""
        return ["" if getattr(self, name) is None else getattr(self, name) for name in COLUMNS]

    def to_json(self) -> list[Any]:
        """For a checkpoint."""
        return [*self.row(), self.bytes, self.watched]

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> "RoundLog":
        """What `to_json` gave."""
        *values, sent, watched = row
        named: dict[str, Any] = {n: None if v == "" else v for n, v in zip(COLUMNS, values, strict=True)}
        return cls(**named, bytes=sent, watched=watched)


def bytes_sent(protocol: DPPS, clock: int, rows: Tensor) -> int:
    """By the busiest node in a round: its row and 8 bytes more to each peer, or an all-reduce mean; and the scalar S_i to
    everybody where one is broadcast."""
    nodes, row = protocol.fabric.nodes, rows.shape[1] * rows.element_size() + 8
    scalar = 8 * (nodes - 1) if protocol.hides_rows else 0
    if protocol.synchronises(clock):
        return 2 * (nodes - 1) * row // nodes + scalar
    return sum(int(w.out_degree.max()) for w in protocol.gossip_weights(clock)) * row + scalar


def update_to_noise(protocol: DPPS, record: RoundRecord, rows: Tensor) -> float | None:
    """Norm of a perturbation over the expected norm of the noise of its message, mean over the rows here; None without noise."""
    d, mechanism, scale = rows.shape[1], protocol.mechanism, record.scale
    if scale == 0 or not d:
        return None
    present = protocol.topology.present(record.clock * protocol.mixes)
    # with partners the noise is more than the scale
    spread = protocol.noise.standard_deviation(mechanism, scale, present)
    return record.perturbation / (scale * d if mechanism.norm == 1 else spread * math.sqrt(d))
