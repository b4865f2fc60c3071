"""What a run will cost and how much noise that means, before it starts."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from dpps.noise.mechanisms import Gaussian
from dpps.privacy.charges import planned_charges
from dpps.privacy.limiting import Limits, limits
from dpps.privacy.trust import OTHER_MEAN_VARIANCES, Partners
from dpps.privacy.units import Calibration, NodeSwap, Plan, Unit
from dpps.sensitivity import Certified, Known, Paper
from dpps.topology import Topology

HOPELESS = 0.2
"""Signal to noise of a run below which little is learned: with scattering and a linear model on mnist-mini 0.12 gave 21 %, 0.27
38 %, 0.97 76 %."""


@dataclass(frozen=True)
class Outlook:
    """The answers of `dpps plan`; None where a question does not arise.

    Attributes:
        unit: who is protected.
        mechanism: which noise.
        rounds: over how many rounds.
        epsilon: total; in the unit node-swap the sum of rounds, no guarantee.
        delta: at which failure probability.
        accountant: which bound won.
        epsilon_per_round: Laplace: of one round.
        noise_multiplier: Gaussian: deviation over sensitivity.
        noise_scale: scale of the noise per coordinate of a message, in the units of the parameters (node-swap: per unit of S).
        signal_to_noise: norm of the largest admissible update over the expected norm of the noise of one message.
        signal_to_noise_averaged: the same once the noise of all nodes has been averaged.
        signal_to_noise_of_run: the same of the sum over all rounds, if every round's updates agreed: below 1 noise prevails.
        paper_growth: factor by which the paper's estimate grows a round between synchronisations; above 1 it diverges.
        certified_gain: factor with which noise comes back in the certified bound; without synchronisation it must be below 1.
        coalition: with partners (`Pairs`): what they make of the noise, and what more colluders would cost.
        limits: who sets the noise of all where nodes draw at different rates.
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
    signal_to_noise_of_run: float | None
    paper_growth: float | None
    certified_gain: float | None
    coalition: "Coalition | None"
    limits: Limits | None
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON has no infinity: None instead."""
        return {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()
        }


@dataclass(frozen=True)
class Coalition:
    """What noise that cancels comes to, against so many colluders.

    Attributes:
        colluders: C, which the promise stands.
        degree: partners of a node.
        strength: lambda_2 - C of the partner graph.
        sigma: deviation of the independent noise over that of a message without partners.
        tau: the same of the noise that each pair shares.
        message_noise: deviation of a message's whole noise over that without partners.
        mean_noise: deviation of the noise in the network's mean over that without partners.
        mean_over_server: variance of the noise in the network's mean over a trusted server's.
        absences: nodes that may be away unannounced before the mean is noisier than without partners.
        epsilons: (colluders, total epsilon if so many pool their secrets), up to all other nodes.
        trade: what other values of `mean_variance` would come to, the chosen one among them.
    """

    colluders: int
    degree: int
    strength: float
    sigma: float
    tau: float
    message_noise: float
    mean_noise: float
    mean_over_server: float
    absences: int
    epsilons: tuple[tuple[int, float], ...]
    trade: tuple["Trade", ...]


@dataclass(frozen=True)
class Trade:
    """Less noise in the mean is more noise in every message.

    Attributes:
        mean_variance: of the noise in the mean over the least that the colluders allow.
        mean_over_server: the same over a trusted server's.
        message_noise: deviation of a message's whole noise over that without partners.
        absences: nodes that may be away unannounced before the mean is noisier than without partners.
    """

    mean_variance: float
    mean_over_server: float
    message_noise: float
    absences: int

    @classmethod
    def of(cls, partners: Partners) -> "Trade":
        """What these partners come to."""
        noise = math.sqrt(partners.message_variance)
        return cls(partners.mean_variance, partners.mean_over_server, noise, partners.absences)


def coalition(unit: Unit, plan: Plan, calibration: Calibration) -> Coalition | None:
    """What `unit`'s partners come to; None without partners."""
    partners = calibration.partners
    if partners is None:
        return None
    shares = partners.shares()
    first, last, spare = partners.colluders, partners.nodes - 1, max(0, int(partners.strength))
    # a sparse graph is known to hold until its strength is used up
    counts = {
        first,
        first + 1,
        min(last, first + spare // 2),
        min(last, first + spare),
        (first + last) // 2,
        last,
    }

    def epsilon(colluders: int) -> float:
        # the local part keeps its noise; charging it like the messages can only overstate
        weaker = Gaussian(calibration.mechanism.scale(1.0) * min(1.0, partners.loss(colluders)))
        return unit.total(planned_charges(replace(calibration, mechanism=weaker), plan)).epsilon

    return Coalition(
        partners.colluders,
        partners.degree,
        partners.strength,
        shares.independent,
        shares.pair,
        math.sqrt(partners.message_variance),
        shares.independent,
        partners.mean_over_server,
        partners.absences,
        tuple((count, epsilon(count)) for count in sorted(counts)),
        tuple(Trade.of(partners.at(r)) for r in sorted({*OTHER_MEAN_VARIANCES, partners.mean_variance})),
    )


def outlook(
    unit: Unit, plan: Plan, dimension: int, topology: Topology, sync_every: int, paper: Paper | None = None
) -> Outlook:
    """What `unit` means for a run of `plan` with `dimension` shared parameters.

    Args:
        paper: constants of the paper's estimate, whose growth is reported in the unit node-swap.
    """
    calibration = unit.calibrate(plan)
    total = unit.total(planned_charges(calibration, plan))
    growth = gain = None
    if isinstance(unit, NodeSwap):
        growth = (paper or Paper(0.78, 0.55)).growth(calibration.mechanism, dimension)
        certified = unit.sensitivity if isinstance(unit.sensitivity, Certified) else Certified()
        gain = certified.gain(calibration.mechanism, topology, dimension, rounds=plan.count)
    bound = calibration.sensitivity
    scale = calibration.mechanism.scale(bound.distance if isinstance(bound, Known) else 1.0)
    signal = None
    if isinstance(bound, Known) and unit.clip is not None:
        # the largest update a node can send, over the expected noise of its message
        signal = plan.lr_shared * unit.clip / _noise_norm(calibration, scale, dimension)
    averaged = None if signal is None else signal * math.sqrt(topology.nodes)
    together = coalition(unit, plan, calibration)
    if together is not None and signal is not None and averaged is not None:
        scale, signal = scale * together.message_noise, signal / together.message_noise
        averaged /= together.mean_noise
    whole = None if averaged is None else averaged * math.sqrt(plan.count)
    multiplier, pure = calibration.mechanism.scale(1.0), calibration.mechanism.pure
    return Outlook(
        unit=unit.name,
        mechanism=calibration.mechanism.name,
        rounds=plan.count,
        epsilon=total.epsilon,
        delta=total.delta,
        accountant=total.accountant,
        epsilon_per_round=1 / multiplier if pure and multiplier > 0 else None,
        noise_multiplier=None if pure else multiplier,
        noise_scale=scale,
        signal_to_noise=signal,
        signal_to_noise_averaged=averaged,
        signal_to_noise_of_run=whole,
        paper_growth=growth,
        certified_gain=gain,
        coalition=together,
        limits=limits(unit, plan),
        warnings=tuple(
            _warnings(unit, total.epsilon, averaged if together else signal, whole, growth, gain, sync_every)
        ),
    )


def _noise_norm(calibration: Calibration, scale: float, dimension: int) -> float:
    """E||noise|| of one message, in the mechanism's norm."""
    return scale * dimension if calibration.mechanism.norm == 1 else scale * math.sqrt(dimension)


def _warnings(
    unit: Unit,
    epsilon: float,
    signal: float | None,
    whole: float | None,
    growth: float | None,
    gain: float | None,
    sync_every: int,
) -> list[str]:
    found = []
    if epsilon > 20:
        what = "total epsilon" if unit.has_total else "sum of rounds"
        found.append(f"a {what} of {epsilon:.4g} is no meaningful protection")
    if signal is not None and signal < 1e-3:
        found.append(
            f"the noise is {1 / signal:.3g} times the largest update: expect to learn little; share fewer "
            "parameters or allow more"
        )
    if whole is not None and whole < 1:
        what = "hopeless" if whole < HOPELESS else "expect far less accuracy than without noise"
        found.append(
            f"{what}: all updates of all nodes over the whole run, if they agreed, would be {whole:.3g} of their noise; use larger "
            "batches, fewer shared parameters, more data or a larger epsilon"
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
