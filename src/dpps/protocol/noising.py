"""From a perturbation to a message: what enters a round, how much noise it needs, and the noise itself."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpps.errors import RunError, UsageError
from dpps.noise.calibration import NoiseLevel, calibrate
from dpps.noise.source import Outgoing
from dpps.protocol.checks import refuse_non_finite, row_norms, sensitivities_of
from dpps.protocol.state import State
from dpps.sensitivity import RoundView, Sensitivity

if TYPE_CHECKING:
    from dpps.protocol.algorithm import DPPS


def admit(protocol: "DPPS", state: State, perturbation: Tensor | None) -> tuple[Tensor, Tensor]:
    """Check the perturbation, silence absent nodes, clip where the bound relies on it."""
    eps = torch.zeros_like(state.s) if perturbation is None else perturbation.detach()
    if eps.shape != state.s.shape:
        raise UsageError(
            f"perturbation has shape {tuple(eps.shape)}: expected {tuple(state.s.shape)}, one row per node"
        )
    public = protocol.sensitivity is not None and protocol.sensitivity.base_is_public
    # a bound on sums holds before they are rounded to fewer digits: float64 stays as it is until there is noise
    keep = public and eps.dtype == torch.float64
    eps = eps.to(state.s.device, eps.dtype if keep else state.s.dtype).contiguous()
    present = protocol.present(state)
    if present is not None:
        away = torch.from_numpy(~present[list(protocol.fabric.rows)]).to(eps.device)
        eps = eps.masked_fill(away[:, None], 0.0)
    exact = torch.float64 if public else None  # a clip relies on it
    norms = row_norms(eps, protocol.mechanism.norm, exact).to("cpu", torch.float64)
    if protocol.hides_failures:
        bad = ~torch.isfinite(norms)
        eps, norms = eps.masked_fill(bad.to(eps.device)[:, None], 0.0), norms.masked_fill(bad, 0.0)
    refuse_non_finite(norms, protocol.fabric, state.round, "perturbation")
    return protocol.sensitivity.admit(eps, norms, state.rate) if protocol.sensitivity else (eps, norms)


def noise_level(protocol: "DPPS", state: State, view: RoundView) -> tuple[float | None, NoiseLevel]:
    """The sensitivity estimated, and the noise calibrated to it."""
    sensitivity, d, norm = protocol.sensitivity, state.config.dimension, protocol.mechanism.norm
    if sensitivity is None:
        return None, NoiseLevel(0.0, 0.0, 0.0)
    estimated = sensitivity.estimate(state.memory, view)

    def rounding(step: float) -> float:
        own = sensitivity.rounding(d, step, norm)
        # a private start row is rounded beside its perturbation, which costs what it costs in node-swap
        return own + (
            Sensitivity.rounding(sensitivity, d, step, norm) if _start_is_hidden(protocol, state) else 0.0
        )

    if not math.isfinite(protocol.mechanism.scale(estimated)):
        raise RunError(_diverged(protocol, state, estimated))
    rate = state.rate if sensitivity.noise_decays else 1.0
    level = calibrate(protocol.mechanism, protocol.noise, estimated, rounding, rate=rate)
    if not level.scale <= torch.finfo(state.s.dtype).max:
        raise RunError(_diverged(protocol, state, level.sensitivity))
    return estimated, level


def _diverged(protocol: "DPPS", state: State, used: float) -> str:
    assert protocol.sensitivity is not None
    growth = protocol.sensitivity.growth(protocol.mechanism, state.config.dimension)
    why = (
        f"; the estimate grows by decay(1 + 2 c_prime noise_rate d / budget) = {growth:.4g} a round"
        if growth is not None
        else ""
    )
    return (
        f"the sensitivity is {used} in round {state.round}{why}: synchronise more often (sync_every), "
        "share fewer parameters, or add less noise (larger budget or smaller noise rate)"
    )


def base_is_public(protocol: "DPPS", state: State) -> bool:
    """Whether rows follow from earlier messages. Private start values do not: in round 0 they are what the noise hides."""
    known = state.round > 0 or state.config.common_start
    return protocol.sensitivity is not None and protocol.sensitivity.base_is_public and known


def _start_is_hidden(protocol: "DPPS", state: State) -> bool:
    """Whether this round's noise hides private start values."""
    public = protocol.sensitivity is not None and protocol.sensitivity.base_is_public
    return public and not base_is_public(protocol, state)


def _private_rows(s: Tensor, eps: Tensor, step: float) -> Tensor:
    """Start rows plus perturbations in float64, each a whole number of grid steps.

    In float32 the sum would be rounded before it gets onto the grid, which can move two rows further apart than was charged
    for. Steps are powers of two, so dividing by one is exact; rounding a perturbation toward zero lengthens nothing.
    """
    s, eps = s.double(), eps.double()
    return s + eps if step == 0 else (torch.round(s / step) + torch.trunc(eps / step)) * step


def add_noise(protocol: "DPPS", state: State, eps: Tensor, half: Tensor, level: NoiseLevel) -> Tensor:
    """Make messages of the rows in `half`; returns the norms of the noise, where somebody asks for them."""
    public = base_is_public(protocol, state)
    norms_wanted = any(w.needs_noise_norms for w in sensitivities_of(protocol))
    rows = _private_rows(state.s, eps, level.step) if _start_is_hidden(protocol, state) else half
    out = Outgoing(state.s, eps, rows, protocol.fabric.rows, state.round, public, norms_wanted, level.step)
    present = protocol.present(state)
    if present is None:
        norms = protocol.noise.release(protocol.mechanism, level.scale, out)
        if rows is not half:
            half.copy_(rows)
        return norms
    # an absent node sends nothing: its row stays as it is
    here = torch.from_numpy(present[list(protocol.fabric.rows)])
    nodes = [r for r, p in zip(protocol.fabric.rows, here.tolist(), strict=True) if p]
    chosen = here.to(half.device)
    part = replace(
        out, s=state.s[chosen], perturbation=eps[chosen], half=rows[chosen], nodes=nodes, present=present
    )
    norms = torch.zeros(len(here), dtype=torch.float64)
    norms[here] = protocol.noise.release(protocol.mechanism, level.scale, part)
    half[chosen] = part.half.to(half)
    return norms


class Scratch:
    """Memory for the messages, used again in every round: fresh pages would cost as much as the addition."""

    def __init__(self) -> None:
        self._held = torch.empty(0)

    def like(self, rows: Tensor) -> Tensor:
        """Memory for rows of this shape and type; what it held before is lost."""
        held = self._held
        if (held.shape, held.dtype, held.device) != (rows.shape, rows.dtype, rows.device):
            self._held = torch.empty_like(rows)
        return self._held
