"""What a round of a run leaves behind: one line of rounds.csv."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dpps.protocol import RoundRecord

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
    def of(cls, round_: int, record: RoundRecord | None, losses: Tensor) -> "RoundLog":
        """From what the protocol recorded (nothing when nothing is shared) and every node's loss."""
        loss = float(losses.mean())
        if record is None:
            return cls(round_, None, None, None, 0.0, 0.0, loss)
        epsilon = record.epsilon if math.isfinite(record.epsilon) else None
        found = (record.real, record.estimated, record.used, record.scale, epsilon)
        watched = dict(record.watched)
        return cls(round_, *found, loss, record.bytes, watched, update_to_noise=record.update_to_noise)

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
