"""What a protocol knows between rounds, what a round has released, and what a round did."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from dpps.noise.calibration import NoiseLevel
from dpps.sensitivity import Memory, ProtocolConfig, RoundView
from dpps.transport import Link


@dataclass
class State:
    """The rows held here, and all a run needs to go on. Changed by `DPPS.step` only, once a round is complete."""

    s: Tensor
    """(rows, d): the shared vectors s_i."""
    a: Tensor
    """(rows,): the normalising scalars a_i, float64."""
    config: ProtocolConfig
    round: int = 0
    clock: int = 0
    """Counter of topology and synchronisation; `DPPS.restart_clock` sets it to 0."""
    rate: float = 1.0
    """Factor on the noise rate (node-swap) or on the clip (other units)."""
    memory: Memory = field(default_factory=dict)
    watched: dict[str, Memory] = field(default_factory=dict)
    link: Link = field(default_factory=dict)
    """What the fabric remembers from round to round."""

    @property
    def y(self) -> Tensor:
        """The corrected vectors y_i = s_i / a_i. With doubly stochastic weights a is 1 and y is s itself."""
        a = self.a.to(self.s.dtype)
        return self.s if bool((a == 1).all()) else self.s / a.to(self.s.device)[:, None]


@dataclass(frozen=True)
class RoundRecord:
    """What a round did. `epsilon` is the pure epsilon of this round's message (infinite where there is none)."""

    round: int
    estimated: float | None
    used: float | None
    """What the noise was calibrated to: the estimate, and what rounding to a grid adds."""
    real: float | None
    """The real distance of the rows, when asked for (`track_real`)."""
    scale: float
    epsilon: float
    bytes: int
    """Sent by one node (the busiest) in this round."""
    synchronised: bool
    watched: Mapping[str, float] = field(default_factory=dict)
    update_to_noise: float | None = None
    """Norm of a perturbation over the expected norm of the noise of its message, mean over the rows here;
    None without noise. It is
    computed of what was not noised: for the node's own eyes."""


@dataclass(frozen=True)
class Message:
    """What the rows held here have released for a round: paid for and noised, so it may leave, and leave again as it is."""

    rows: Tensor
    view: RoundView
    estimated: float | None
    level: NoiseLevel
    noise_norms: Tensor
    real: float | None
    watched: Mapping[str, float]
