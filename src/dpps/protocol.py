"""DPPS, Algorithm 1 of the paper: perturb, estimate the sensitivity, add noise, send, average, correct."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from dpps.errors import RunError, UsageError
from dpps.fabric import Fabric, Stacked
from dpps.mechanisms import Mechanism, NoNoise
from dpps.noise import NoiseSource, Outgoing, Seeded
from dpps.sensitivity import Look, Memory, Outcome, Sensitivity, Setting, real_sensitivity
from dpps.topology import Topology


@dataclass
class State:
    """The rows held here, and all a run needs to go on. Changed by `DPPS.step` only, once a round is complete."""

    s: Tensor
    """(rows, d): the shared vectors s_i."""
    a: Tensor
    """(rows,): the normalising scalars a_i, float64."""
    setting: Setting
    round: int = 0
    clock: int = 0
    """Counter of topology and synchronisation; `DPPS.restart_clock` sets it to 0."""
    rate: float = 1.0
    """Factor on the noise rate (node-swap) or on the clip (other units)."""
    memory: Memory = field(default_factory=dict)
    watched: dict[str, Memory] = field(default_factory=dict)

    @property
    def y(self) -> Tensor:
        """The corrected vectors y_i = s_i / a_i. With doubly stochastic weights a is 1 and y is s itself."""
        a = self.a.to(self.s.dtype)
        return self.s if bool((a == 1).all()) else self.s / a.to(self.s.device)[:, None]


@dataclass(frozen=True)
class Record:
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


class Charges(Protocol):
    """What the protocol needs of a ledger: a place to write down a message before it leaves."""

    def charge(
        self,
        *,
        round: int,  # noqa: A002
        mechanism: Mechanism,
        sensitivity: float,
        scale: float,
    ) -> None:
        """Return only when the charge is as safe as the ledger promises."""


class DPPS:
    """Differentially private perturbed push-sum over a topology.

    Args:
        topology: who sends to whom in which round.
        mechanism: the noise; `NoNoise()` is plain push-sum.
        sensitivity: what the noise is calibrated to; needed unless there is no noise.
        sync_every: P: in every round t with (t+1) mod P = 0 all nodes average with everybody (0 = never).
        noise: where noise comes from; by default a seed nobody knows. `Seeded(7)` repeats.
        fabric: where the rows live; by default all of them here.
        ledger: charged with every message before it leaves.
        watch: further sensitivities to evaluate in every round without using them.
        track_real: also compute the real sensitivity (costs O(N^2 d) and needs all rows here).

    Example:
        >>> import torch, dpps
        >>> protocol = dpps.DPPS(dpps.Exponential(8), dpps.NoNoise())
        >>> state = protocol.start(torch.arange(8.0)[:, None])
        >>> for _ in range(3):
        ...     record = protocol.step(state)
        >>> state.y.flatten().unique()
        tensor([3.5000])
    """

    def __init__(
        self,
        topology: Topology,
        mechanism: Mechanism | None = None,
        sensitivity: Sensitivity | None = None,
        *,
        sync_every: int = 0,
        noise: NoiseSource | None = None,
        fabric: Fabric | None = None,
        ledger: Charges | None = None,
        watch: Mapping[str, Sensitivity] | None = None,
        track_real: bool = False,
    ) -> None:
        self.topology = topology
        self.mechanism = mechanism or NoNoise()
        self.sensitivity = sensitivity
        self.sync_every = sync_every
        self.noise = noise or Seeded()
        self.fabric = fabric or Stacked(topology.nodes)
        self.ledger = ledger
        self.watch = dict(watch or {})
        self.track_real = track_real
        self._memory: Tensor | None = None
        self._check()

    def _check(self) -> None:
        if self.sync_every < 0:
            raise UsageError(f"sync_every is {self.sync_every}: it must be 0 (never) or a number of rounds")
        if self.fabric.nodes != self.topology.nodes:
            raise UsageError(
                f"the fabric has {self.fabric.nodes} nodes and the topology {self.topology.nodes}: make them equal"
            )
        if self.sensitivity is None and not isinstance(self.mechanism, NoNoise):
            raise UsageError(
                f"{self.mechanism} needs a sensitivity, for example Certified() or Paper(c_prime=0.8, decay=0.6)"
            )
        for sensitivity in self._all_sensitivities():
            if sensitivity.needs_double_stochasticity and not self.topology.doubly_stochastic:
                raise UsageError(
                    f"{sensitivity} needs doubly stochastic weights and {self.topology} has columns only: "
                    "balance the weights, or use a unit other than node-swap"
                )
            if sensitivity.norm not in (None, self.mechanism.norm):
                raise UsageError(
                    f"{self.mechanism} needs a sensitivity in the L{self.mechanism.norm} norm and {sensitivity} bounds "
                    f"the L{sensitivity.norm} norm: use Laplace noise with it, or the unit contribution or record"
                )
            if sensitivity.simulation_only and not self.fabric.simulation:
                raise UsageError(
                    f"{sensitivity} looks at everybody's rows: it works in simulation only; use Certified()"
                )
        if self.track_real and not self.fabric.simulation:
            raise UsageError("track_real looks at everybody's rows: it works in simulation only")

    def _all_sensitivities(self) -> list[Sensitivity]:
        return [*([self.sensitivity] if self.sensitivity else []), *self.watch.values()]

    def start(self, values: Tensor, *, common_start: bool | None = None) -> State:
        """The state before round 0: s_i = y_i = values_i, a_i = 1.

        Args:
            values: (rows, d), one row per node held here; kept as a copy.
            common_start: whether all nodes start from the same public row. Found out by looking in a simulation; to be said
                otherwise.
        """
        rows = len(self.fabric.rows)
        if values.ndim != 2 or values.shape[0] != rows:
            raise UsageError(
                f"start values have shape {tuple(values.shape)}: expected ({rows}, d), one row per node"
            )
        if not values.is_floating_point():
            raise UsageError(
                f"start values are {values.dtype}: use a floating type, for example values.float()"
            )
        _refuse_non_finite(values.abs().sum(1), self.fabric, 0, "start value")
        if common_start is None:
            if not self.fabric.simulation:
                raise UsageError(
                    "say whether all nodes start from the same row: start(values, common_start=True or False)"
                )
            common_start = bool((values == values[0]).all())
        setting = Setting(
            self.fabric, self.topology, self.mechanism, self.sync_every, values.shape[1], common_start
        )
        s = values.detach().clone(memory_format=torch.contiguous_format)
        return State(
            s=s,
            a=torch.ones(rows, dtype=torch.float64),
            setting=setting,
            memory=self.sensitivity.start(setting, s) if self.sensitivity else {},
            watched={name: w.start(setting, s) for name, w in self.watch.items()},
        )

    def restart_clock(self, state: State, rate: float = 1.0) -> None:
        """Restart the counters of topology and synchronisation and set the factor on the rates (the paper's rate decay)."""
        state.clock, state.rate = 0, rate

    def step(self, state: State, perturbation: Tensor | None = None) -> Record:
        """One round of Algorithm 1. It completes, or raises and leaves `state` as it was."""
        eps, norms = self._admit(state, perturbation)
        half = torch.add(state.s, eps, out=self._scratch(state.s))  # s^(t+1/2) = s^(t) + eps^(t)
        look = Look(state.setting, state.round, state.clock, state.rate, norms, half)
        real = real_sensitivity(half, self.mechanism.norm) if self.track_real else None
        estimated, used, scale = self._calibrate(state, look)
        watched = {name: w.estimate(state.watched[name], look) for name, w in self.watch.items()}
        if self.ledger is not None and used:  # a sensitivity of 0 means: nothing new is revealed
            self.ledger.charge(round=state.round, mechanism=self.mechanism, sensitivity=used, scale=scale)
        noise_norms = self._release(state, eps, half, scale)  # half is the message from here on
        s, a, synchronised = self._average(state, half)
        outcome = Outcome(estimated or 0.0, scale, noise_norms, synchronised, self.noise.grid(scale))
        if self.sensitivity:
            state.memory = self.sensitivity.advance(state.memory, look, outcome)
        state.watched = {
            name: w.advance(state.watched[name], look, replace(outcome, estimate=watched[name]))
            for name, w in self.watch.items()
        }
        record = Record(
            round=state.round,
            estimated=estimated,
            used=used,
            real=real,
            scale=scale,
            epsilon=self.mechanism.epsilon(used, scale) if used is not None else math.inf,
            bytes=self._bytes(state, synchronised),
            synchronised=synchronised,
            watched=watched,
        )
        state.s, state.a = s, a
        state.round, state.clock = state.round + 1, state.clock + 1
        return record

    def _scratch(self, like: Tensor) -> Tensor:
        """Memory for the messages, used again in every round: fresh pages would cost as much as the addition."""
        if (
            self._memory is None
            or self._memory.shape != like.shape
            or self._memory.dtype != like.dtype
            or self._memory.device != like.device
        ):
            self._memory = torch.empty_like(like)
        return self._memory

    def _admit(self, state: State, perturbation: Tensor | None) -> tuple[Tensor, Tensor]:
        """Check the perturbation, silence absent nodes, clip where the bound relies on it."""
        eps = torch.zeros_like(state.s) if perturbation is None else perturbation.detach()
        if eps.shape != state.s.shape:
            raise UsageError(
                f"perturbation has shape {tuple(eps.shape)}: expected {tuple(state.s.shape)}, one row per node"
            )
        eps = eps.to(state.s).contiguous()
        present = self.topology.present(state.clock)
        if present is not None:
            away = torch.from_numpy(~present[list(self.fabric.rows)]).to(eps.device)
            eps = eps.masked_fill(away[:, None], 0.0)
        exact = (
            torch.float64 if self.sensitivity and self.sensitivity.base_is_public else None
        )  # a clip relies on it
        norms = _norms(eps, self.mechanism.norm, exact).to("cpu", torch.float64)
        _refuse_non_finite(norms, self.fabric, state.round, "perturbation")
        return self.sensitivity.admit(eps, norms, state.rate) if self.sensitivity else (eps, norms)

    def _calibrate(self, state: State, look: Look) -> tuple[float | None, float | None, float]:
        """The sensitivity estimated and used, and the scale of the noise."""
        if self.sensitivity is None:
            return None, None, 0.0
        rate = state.rate if self.sensitivity.noise_decays else 1.0
        estimated = self.sensitivity.estimate(state.memory, look)
        rough = 2 * self.mechanism.scale(estimated) * rate  # the final scale is below: rounding adds little
        # a private start row is rounded as a whole, which costs what it costs in node-swap
        rounding = self.sensitivity.rounding
        if self.sensitivity.base_is_public and not self._base_is_public(state):
            rounding = partial(Sensitivity.rounding, self.sensitivity)
        extra = self.noise.discreteness(rough) + rounding(
            state.setting.dimension, self.noise.grid(rough), self.mechanism.norm
        )
        used = math.nextafter(estimated + extra, math.inf) if extra else estimated  # rounded up, never down
        scale = self.mechanism.scale(used) * rate
        if not math.isfinite(used) or not math.isfinite(scale):
            raise RunError(self._diverged(state, used))
        return estimated, used, scale

    def _diverged(self, state: State, used: float) -> str:
        assert self.sensitivity is not None
        growth = self.sensitivity.growth(self.mechanism, state.setting.dimension)
        why = (
            f"; the estimate grows by decay(1 + 2 c_prime noise_rate d / budget) = {growth:.4g} a round"
            if growth is not None
            else ""
        )
        return (
            f"the sensitivity is {used} in round {state.round}{why}: synchronise more often (sync_every), "
            "share fewer parameters, or add less noise (larger budget or smaller noise rate)"
        )

    def _base_is_public(self, state: State) -> bool:
        """Whether rows follow from earlier messages. Private start values do not: in round 0 they are what is to be hidden."""
        known = state.round > 0 or state.setting.common_start
        return self.sensitivity is not None and self.sensitivity.base_is_public and known

    def _release(self, state: State, eps: Tensor, half: Tensor, scale: float) -> Tensor:
        public = self._base_is_public(state)
        norms_wanted = any(w.needs_noise_norms for w in self._all_sensitivities())
        out = Outgoing(state.s, eps, half, self.fabric.rows, state.round, public, norms_wanted)
        present = self.topology.present(state.clock)
        if present is None:
            return self.noise.release(self.mechanism, scale, out)
        here = torch.from_numpy(
            present[list(self.fabric.rows)]
        )  # an absent node sends nothing: its row stays as it is
        rows = [r for r, p in zip(self.fabric.rows, here.tolist(), strict=True) if p]
        chosen = here.to(half.device)
        part = Outgoing(state.s[chosen], eps[chosen], half[chosen], rows, state.round, public, norms_wanted)
        norms = torch.zeros(len(here), dtype=torch.float64)
        norms[here] = self.noise.release(self.mechanism, scale, part)
        half[chosen] = part.half
        return norms

    def _average(self, state: State, message: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Mix s and a; in a synchronisation round average over everybody present."""
        if not self._synchronises(state):
            s, a = self.fabric.mix(self.topology.weights(state.clock), message, state.a[:, None])
            return s, a[:, 0], False
        present = self.topology.present(state.clock)
        s_mean, a_mean = self.fabric.mean(message, present), self.fabric.mean(state.a[:, None], present)
        if present is None:
            return s_mean.repeat(len(message), 1), a_mean.expand(len(message)).clone(), True
        here = torch.from_numpy(present[list(self.fabric.rows)])
        s = torch.where(here.to(message.device)[:, None], s_mean, message)
        return s, torch.where(here, a_mean, state.a), bool(present.all())

    def _synchronises(self, state: State) -> bool:
        return self.sync_every > 0 and (state.clock + 1) % self.sync_every == 0

    def _bytes(self, state: State, synchronised: bool) -> int:
        """Row and a (8 bytes) to each peer, or an all-reduce mean; plus the scalar S_i to everybody where one is broadcast."""
        n, row = self.fabric.nodes, state.s.shape[1] * state.s.element_size()
        scalar = 8 * (n - 1) if self.sensitivity and not self.sensitivity.base_is_public else 0
        if self._synchronises(state):
            return 2 * (n - 1) * (row + 8) // n + scalar
        return int(self.topology.weights(state.clock).out_degree.max()) * (row + 8) + scalar


def _norms(rows: Tensor, norm: int, dtype: torch.dtype | None) -> Tensor:
    if norm != 1:
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=dtype)
        return norms
    width = max(1, (1 << 17) // len(rows))  # pieces whose absolute values stay in the cache
    parts = [piece.abs().sum(1, dtype=dtype) for piece in torch.split(rows, width, dim=1)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def _refuse_non_finite(norms: Tensor, fabric: Fabric, round_: int, what: str) -> None:
    bad = [k for k, norm in enumerate(norms.tolist()) if not math.isfinite(norm)]
    if bad:
        names = ", ".join(str(fabric.rows[k]) for k in bad[:8])
        raise UsageError(
            f"the {what} of node {names} in round {round_} is NaN or infinite: nothing was sent; lower the learning rate or clip it"
        )
