"""The protocol's state between rounds, a round's message, and the record of a round."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from dpps.noise import NoiseLevel
from dpps.sensitivity import Memory, ProtocolConfig, RoundView
from dpps.transport import Link


@dataclass
class State:
    """The rows in this process, and everything that a run needs to continue. Only `DPPS` changes it, when a
    round is complete."""

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
    """State of the sensitivity."""
    watched: dict[str, Memory] = field(default_factory=dict)
    """State of the watched sensitivities, by name."""
    link: Link = field(default_factory=dict)
    """State of the fabric."""

    @property
    def y(self) -> Tensor:
        """The corrected vectors y_i = s_i / a_i. With doubly stochastic weights a is 1 and y is s itself."""
        a = self.a.to(self.s.dtype)
        return self.s if bool((a == 1).all()) else self.s / a.to(self.s.device)[:, None]


@dataclass(frozen=True)
class Message:
    """What the rows held here release in a round: charged and noised, so it may leave.

    The memory of `rows` is used again by the next release.
    """

    rows: Tensor
    view: RoundView
    estimated: float | None
    """The sensitivity; None without one."""
    level: NoiseLevel
    noise_norms: Tensor
    watched: Mapping[str, float]
    gain: float = 1.0
    """How many times longer than the released update its effect on the rows can be; infinite: not known."""


@dataclass(frozen=True)
class RoundRecord:
    """What a round did. `epsilon` is the pure epsilon of this round's message (infinite where there is none)."""

    round: int
    clock: int
    estimated: float | None
    used: float | None
    """What the noise was calibrated to: the estimate, and what rounding to a grid adds."""
    scale: float
    epsilon: float
    synchronised: bool
    perturbation: float
    """Mean norm of the perturbations of the rows here. Not noised: it must stay at the node."""
    watched: Mapping[str, float] = field(default_factory=dict)
    """Estimates of the watched sensitivities, by name."""

    @property
    def real(self) -> float | None:
        """The real distance of the rows, if it was watched (`watch={"real": Oracle()}`)."""
        return self.watched.get("real")
