"""What a run will cost and how much noise that means, before it starts."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from dpps.mechanisms import Laplace
from dpps.privacy.accountant import Charge
from dpps.privacy.units import Contribution, NodeSwap, Plan, Record, Terms, Unit
from dpps.sensitivity import Certified, Paper
from dpps.topology import Topology


@dataclass(frozen=True)
class Outlook:
    """The answers of `dpps plan`; None where a question does not arise.

    Attributes:
        unit: who is protected.
        mechanism: which noise.
        rounds: over how many rounds.
        epsilon: total.
        delta: at which failure probability.
        accountant: which bound won.
        epsilon_per_round: Laplace: of one round.
        noise_multiplier: Gaussian: deviation over sensitivity.
        noise_scale: scale of the noise per coordinate of a message, in the units of the parameters (node-swap: per unit of S).
        signal_to_noise: norm of the largest admissible update over the expected norm of the noise of one message.
        signal_to_noise_averaged: the same once the noise of all nodes has been averaged.
        paper_growth: factor by which the paper's estimate grows a round between synchronisations; above 1 it diverges.
        certified_gain: factor with which noise comes back in the certified bound; without synchronisation it must be below 1.
        warnings: what to know before starting.
    """

    unit: str
    mechanism: str
    rounds: int
    epsilon: float
    delta: float
    accountant: str
    epsilon_per_round: float | None
    noise_multiplier: float | None
    noise_scale: float
    signal_to_noise: float | None
    signal_to_noise_averaged: float | None
    paper_growth: float | None
    certified_gain: float | None
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON has no infinity: None instead."""
        return {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()
        }


def outlook(
    unit: Unit, plan: Plan, dimension: int, topology: Topology, sync_every: int, paper: Paper | None = None
) -> Outlook:
    """What `unit` means for a run of `plan` with `dimension` shared parameters.

    Args:
        paper: constants of the paper's estimate, whose growth is reported in the unit node-swap.
    """
    terms = unit.terms(plan)
    total = unit.total(_charges(terms, plan))
    node_swap = isinstance(unit, NodeSwap)
    growth = gain = None
    if isinstance(unit, NodeSwap):
        growth = (paper or Paper(0.78, 0.55)).growth(terms.mechanism, dimension)
        certified = unit.sensitivity if isinstance(unit.sensitivity, Certified) else Certified()
        gain = certified.gain(terms.mechanism, topology, dimension, rounds=plan.count)
    scale = terms.mechanism.scale(1.0 if node_swap else terms.sensitivity.distance)  # type: ignore[attr-defined]
    signal = None if node_swap else _signal(unit, plan) / _noise_norm(terms, scale, dimension)
    averaged = None if signal is None else signal * math.sqrt(topology.nodes)
    laplace = isinstance(terms.mechanism, Laplace)
    return Outlook(
        unit=unit.name,
        mechanism=terms.mechanism.name,
        rounds=plan.count,
        epsilon=total.epsilon,
        delta=total.delta,
        accountant=total.accountant,
        epsilon_per_round=1 / terms.mechanism.scale(1.0)
        if laplace and terms.mechanism.scale(1.0) > 0
        else None,
        noise_multiplier=None if laplace else terms.mechanism.scale(1.0),
        noise_scale=scale,
        signal_to_noise=signal,
        signal_to_noise_averaged=averaged,
        paper_growth=growth,
        certified_gain=gain,
        warnings=tuple(_warnings(unit, total.epsilon, signal, growth, gain, sync_every)),
    )


def _charges(terms: Terms, plan: Plan) -> list[Charge]:
    one = terms.mechanism.scale(1.0)
    if terms.mechanism.name == "gaussian":
        return [Charge("gaussian", noise_multiplier=one, sampling=terms.sampling, count=plan.paid)]
    if one == 0:
        return [Charge("none", count=plan.paid)]
    if not terms.sensitivity.noise_decays:
        return [Charge("laplace", epsilon=1 / one, count=plan.paid)]
    return [Charge("laplace", epsilon=1 / (one * rate), count=count) for rate, count in plan.rounds]


def _signal(unit: Unit, plan: Plan) -> float:
    """The norm of the largest update a node can send."""
    assert isinstance(unit, (Contribution, Record))
    return plan.lr_shared * unit.clip


def _noise_norm(terms: Terms, scale: float, dimension: int) -> float:
    """E||noise|| of one message, in the mechanism's norm."""
    return scale * dimension if terms.mechanism.norm == 1 else scale * math.sqrt(dimension)


def _warnings(
    unit: Unit,
    epsilon: float,
    signal: float | None,
    growth: float | None,
    gain: float | None,
    sync_every: int,
) -> list[str]:
    found = []
    if epsilon > 20:
        found.append(f"a total epsilon of {epsilon:.4g} is no meaningful protection")
    if signal is not None and signal < 1e-3:
        found.append(
            f"the noise is {1 / signal:.3g} times the largest update: expect to learn little; share fewer parameters or allow more"
        )
    if growth is not None and growth > 1:
        often = (
            f"by {growth ** (sync_every - 1):.3g} between synchronisations"
            if sync_every
            else "without end: synchronise"
        )
        found.append(f"the paper's estimate grows by {growth:.3g} a round, {often}")
    if gain is not None and gain >= 1 and sync_every == 0:
        found.append(
            f"the certified bound grows without end (gain {gain:.3g}, must be below 1): synchronise, or share fewer parameters"
        )
    if isinstance(unit, NodeSwap):
        found.append(
            "node-swap hides which node sent a message; it protects no training example and no node's contribution"
        )
    return found
