"""Is it worth it? What a run will cost, how much noise that means, who sets it, and what will go wrong, before it starts."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from dpps.errors import UsageError
from dpps.noise.mechanisms import Gaussian, Mechanism
from dpps.privacy.accountant import NO_PROTECTION, finite_or_none
from dpps.privacy.partners import OTHER_MEAN_VARIANCES, Partners
from dpps.privacy.promise import planned_charges
from dpps.privacy.units import Calibration, NodeSwap, Plan, Unit
from dpps.sensitivity import Certified, Known, Paper
from dpps.sensitivity.certified import WINDOW, coefficients, noise_factor
from dpps.topology import Topology

HOPELESS = 0.2
"""Signal to noise of a run below which little is learned: with scattering and a linear model on mnist-mini 0.12 gave 21 %, 0.27
38 %, 0.97 76 %."""
BEYOND = 1e34
"""A noise scale beyond which float32 cannot hold sums."""
TOLERABLE = 100.0
"""Growth of a bound, over what one round by itself needs, up to which there is no warning."""
HARMLESS = 20.0
"""Growth up to which runs learn well: the advised period of synchronisation keeps to it."""
SHOWN = 12
"""For how many different rates epsilons are computed: each takes the accountant a fraction of a second."""


@dataclass(frozen=True)
class Outlook:
    """The answers of `dpps plan`; None where a question does not arise."""

    unit: str
    mechanism: str
    rounds: int
    epsilon: float
    """Total; in the unit node-swap the sum of rounds, which is no guarantee."""
    delta: float
    accountant: str
    """The bound that won."""
    epsilon_per_round: float | None
    """Laplace noise only."""
    noise_multiplier: float | None
    """Gaussian noise only: standard deviation over sensitivity."""
    noise_scale: float
    """Per coordinate of a message, in the units of the parameters (node-swap: per unit of S)."""
    signal_to_noise: float | None
    """Norm of the largest admissible update over the expected norm of a message's noise."""
    signal_to_noise_averaged: float | None
    """The same once the noise of all nodes has been averaged."""
    signal_to_noise_of_run: float | None
    """The same for the sum over all rounds, if every round's updates agreed; below 1 the noise is larger."""
    paper_growth: float | None
    """Factor by which the paper's estimate grows per round between synchronisations; above 1 it diverges."""
    certified_gain: float | None
    """Factor with which noise comes back in the certified bound; without synchronisation it must be below 1."""
    coalition: "Coalition | None"
    limits: "LimitingNode | None"
    warnings: tuple[str, ...]

    @classmethod
    def of(
        cls,
        unit: Unit,
        plan: Plan,
        dimension: int,
        topology: Topology,
        sync_every: int,
        paper: Paper | None = None,
    ) -> "Outlook":
        """What `unit` means for a run of `plan` with `dimension` shared parameters; `paper` has constants for its growth."""
        calibration = unit.calibrate(plan)
        mechanism, bound = calibration.mechanism, calibration.sensitivity
        total = unit.total(planned_charges(calibration, plan))
        growth = gain = signal = averaged = whole = None
        if isinstance(unit, NodeSwap):
            growth = (paper or Paper(0.78, 0.55)).growth(mechanism, dimension)
            certified = unit.sensitivity if isinstance(unit.sensitivity, Certified) else Certified()
            gain = certified.gain(mechanism, topology, dimension, rounds=plan.count)
        scale = mechanism.scale(bound.distance if isinstance(bound, Known) else 1.0)
        together = Coalition.of(unit, plan, calibration)
        if isinstance(bound, Known) and unit.clip is not None:
            # the largest update a node can send, over the expected norm of its message's noise
            signal = (
                plan.lr_shared
                * unit.clip
                / (scale * (dimension if mechanism.norm == 1 else math.sqrt(dimension)))
            )
            averaged = signal * math.sqrt(topology.nodes)
            if together is not None:
                scale, signal = scale * together.message_noise, signal / together.message_noise
                averaged /= together.mean_noise
            whole = averaged * math.sqrt(plan.count)
        multiplier = mechanism.scale(1.0)
        found = cls(
            unit=unit.name,
            mechanism=mechanism.name,
            rounds=plan.count,
            epsilon=total.epsilon,
            delta=total.delta,
            accountant=total.accountant,
            epsilon_per_round=1 / multiplier if mechanism.pure and multiplier > 0 else None,
            noise_multiplier=None if mechanism.pure else multiplier,
            noise_scale=scale,
            signal_to_noise=signal,
            signal_to_noise_averaged=averaged,
            signal_to_noise_of_run=whole,
            paper_growth=growth,
            certified_gain=gain,
            coalition=together,
            limits=LimitingNode.of(unit, plan),
            warnings=(),
        )
        warnings = _warnings(unit, found, averaged if together else signal, sync_every)
        return replace(found, warnings=tuple(warnings))

    def to_json(self) -> dict[str, Any]:
        """For JSON, which has no infinity: None instead."""
        return {k: finite_or_none(v) if isinstance(v, float) else v for k, v in asdict(self).items()}


@dataclass(frozen=True)
class Coalition:
    """Noise that cancels, against `colluders` other nodes. Standard deviations are relative to noise without partners.

    Attributes:
        degree: partners of a node.
        strength: lambda_2 - C of the partner graph.
        sigma: standard deviation of the independent noise.
        tau: of the noise that each pair shares.
        message_noise: of a message's whole noise.
        mean_noise: of the noise in the network's mean.
        mean_over_server: variance of the noise in the network's mean over that of a trusted server.
        absences: nodes that may be away unannounced before the mean is noisier than without partners.
        epsilons: (colluders, total epsilon if that many pool their secrets), up to all other nodes.
        trade: the same for other values of `mean_variance`, the chosen one among them.
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

    @classmethod
    def of(cls, unit: Unit, plan: Plan, calibration: Calibration) -> "Coalition | None":
        """The partners of a run of `plan`; None without partners."""
        partners = calibration.partners
        if partners is None:
            return None
        first, last, spare = partners.colluders, partners.nodes - 1, max(0, int(partners.strength))
        # a sparse graph is known to hold until its strength is used up
        half, all_of_it = min(last, first + spare // 2), min(last, first + spare)
        counts = {first, first + 1, half, all_of_it, (first + last) // 2, last}

        def epsilon(colluders: int) -> float:
            # the local part keeps its noise; charging it like the messages can only overstate
            weaker = Gaussian(calibration.mechanism.scale(1.0) * min(1.0, partners.loss(colluders)))
            return unit.total(planned_charges(replace(calibration, mechanism=weaker), plan)).epsilon

        shares, variances = partners.shares(), {*OTHER_MEAN_VARIANCES, partners.mean_variance}
        return cls(
            colluders=first,
            degree=partners.degree,
            strength=partners.strength,
            sigma=shares.independent,
            tau=shares.pair,
            message_noise=partners.message_deviation(),
            mean_noise=shares.independent,
            mean_over_server=partners.mean_over_server,
            absences=partners.absences,
            epsilons=tuple((count, epsilon(count)) for count in sorted(counts)),
            trade=tuple(Trade.of(partners.at(r)) for r in sorted(variances)),
        )


@dataclass(frozen=True)
class Trade:
    """Less noise in the mean means more noise in every message; fields as in `Pairs` and `Coalition`."""

    mean_variance: float
    mean_over_server: float
    message_noise: float
    absences: int

    @classmethod
    def of(cls, partners: Partners) -> "Trade":
        noise = partners.message_deviation()
        return cls(partners.mean_variance, partners.mean_over_server, noise, partners.absences)


def _warnings(unit: Unit, found: Outlook, signal: float | None, sync_every: int) -> Iterator[str]:
    epsilon, whole = found.epsilon, found.signal_to_noise_of_run
    growth, gain = found.paper_growth, found.certified_gain
    if epsilon > NO_PROTECTION:
        yield f"a {'total epsilon' if unit.has_total else 'sum of rounds'} of {epsilon:.4g} is no meaningful protection"
    if signal is not None and signal < 1e-3:
        yield (
            f"the noise is {1 / signal:.3g} times the largest update: expect to learn little; share fewer "
            "parameters or allow more"
        )
    if whole is not None and whole < 1:
        what = "hopeless" if whole < HOPELESS else "expect far less accuracy than without noise"
        yield (
            f"{what}: all updates of all nodes over the whole run, if they agreed, would be {whole:.3g} of their noise; use larger "
            "batches, fewer shared parameters, more data or a larger epsilon"
        )
    if growth is not None and growth > 1:
        between = f"by {growth ** (sync_every - 1):.3g} between synchronisations" if sync_every else ""
        often = between or "without end: synchronise"
        yield f"the paper's estimate grows by {growth:.3g} a round, {often}"
    if gain is not None and gain >= 1 and sync_every == 0:
        yield f"the certified bound grows without end (gain {gain:.3g}, must be below 1): synchronise, or share fewer parameters"
    if isinstance(unit, NodeSwap):
        yield "node-swap hides which node sent a message; it protects no training example and no node's contribution"


@dataclass(frozen=True)
class LimitingNode:
    """Nodes that draw at different rates spend differently under the same noise, and the largest rate sets it.

    Attributes:
        node: draws most often; the noise is solved for its rate.
        size: what it declares.
        part: the rate with which all nodes together would draw as many examples as planned.
        noise_multiplier_at_part: what would be enough if every node drew with that rate.
        epsilons: (node, declared size, expected batch, rate, total epsilon) of one node for each rate, the most
            expensive first.
    """

    node: int
    size: int
    noise_multiplier: float
    part: float
    noise_multiplier_at_part: float
    epsilons: tuple[tuple[int, int, float, float, float], ...]

    @classmethod
    def of(cls, unit: Unit, plan: Plan) -> "LimitingNode | None":
        """The node that sets the noise of a run of this plan; None where all nodes draw at one rate."""
        if not unit.per_example or len(set(plan.sampling)) < 2:
            return None
        order = sorted(range(plan.nodes), key=lambda node: -plan.sampling[node])
        part = sum(plan.batch_of(k) for k in range(plan.nodes)) / sum(plan.declared_sizes)
        noise = unit.noise(plan)
        alike = unit.noise(replace(plan, sampling=(min(1.0, part),) * plan.nodes)) if unit.epsilon else noise
        first = {plan.sampling[k]: k for k in reversed(order)}  # one node of each rate
        chosen = sorted(first.values(), key=order.index)
        if len(chosen) > SHOWN:
            chosen = [*chosen[: SHOWN - 1], chosen[-1]]

        def cost(node: int) -> tuple[int, int, float, float, float]:
            rate = plan.sampling[node]
            calibration = unit.calibrate(replace(plan, sampling=(rate,) * plan.nodes), noise)
            epsilon = unit.total(planned_charges(calibration, plan)).epsilon
            return node, plan.declared_sizes[node], plan.batch_of(node), rate, epsilon

        size = plan.declared_sizes[order[0]]
        return cls(order[0], size, noise, part, alike, tuple(cost(k) for k in chosen))


def foresee(unit: Unit, plan: Plan, dimension: int, topology: Topology, sync_every: int) -> list[str]:
    """Warnings before the first round. UsageError: the bound outgrows all numbers, or delta is no failure probability."""
    refuse_large_delta(unit, plan.declared_sizes)
    found = []
    size, node = min(((size, node) for node, size in enumerate(plan.declared_sizes)), default=(math.inf, 0))
    if unit.per_example and not plan.batches and size < plan.batch_size:
        found.append(
            f"node {node} has {size} examples, fewer than a batch of {plan.batch_size}: every round uses all of them, divided by "
            f"{plan.batch_size}; a smaller batch size gives it more weight and more privacy for the same noise, and one that is a "
            "part of every node's examples (1/8) lets nobody set the noise of the others"
        )
    if isinstance(unit, NodeSwap) and dimension:
        found += _growth(unit, plan, dimension, topology, sync_every)
    return found


def refuse_large_delta(unit: Unit, sizes: Sequence[int]) -> None:
    """Publishing each record with probability delta is (0, delta)-private: above 1 / records somebody is expected to be hit."""
    largest = max(sizes, default=0)
    if unit.per_example and unit.delta * largest >= 1:
        power = 10.0 ** math.floor(math.log10(0.1 / largest) + 1e-9)
        raise UsageError(
            f"delta is {unit.delta:g} and a node has {largest} records: delta is the chance that the guarantee fails, so it "
            f"must be well below 1 / records = {1 / largest:.2g}; use {power:g} or less"
        )


def _growth(unit: NodeSwap, plan: Plan, dimension: int, topology: Topology, sync_every: int) -> list[str]:
    mechanism, sensitivity = unit.calibrate(plan).mechanism, unit.sensitivity
    stretch = min(plan.count, sync_every or plan.count)
    if isinstance(sensitivity, Certified):
        bounds = certified_bounds(sensitivity, mechanism, topology, dimension, stretch)
    elif isinstance(sensitivity, Paper):
        growth = sensitivity.growth(mechanism, dimension) or 0.0
        bounds = [min(growth**t, math.inf) if growth > 1 else 1.0 for t in range(min(stretch, WINDOW))]
    else:
        return []
    if max(bounds) <= TOLERABLE * bounds[0]:
        return []
    over = next(t for t, bound in enumerate(bounds) if bound > HARMLESS * bounds[0])
    often = f"synchronise at least every {over} rounds (--sync-every {over}, sync_every={over}), "
    remedy = (
        f"{often if over > 1 else ''}share fewer parameters, or add less noise (a larger budget or epsilon)"
    )
    name, last = type(sensitivity).__name__.lower(), math.log(bounds[-1])
    if len(bounds) > 1:  # beyond the rounds that were looked at it goes on as in the last one
        last += (stretch - len(bounds)) * max(0.0, math.log(bounds[-1] / bounds[-2]))
    grown = (
        f"the {name} sensitivity is {bounds[1] / bounds[0]:.3g} times as large in round 1 as in round 0, and "
        f"{bounds[-1] / bounds[0]:.3g} times in round {len(bounds) - 1}"
    )
    if isinstance(sensitivity, Certified) and last + math.log(mechanism.scale(1.0)) > math.log(BEYOND):
        raise UsageError(f"{grown}: before the run ends the noise outgrows all numbers; {remedy}")
    return [f"{grown}: the noise drowns what is learned; {remedy}"]


def certified_bounds(
    sensitivity: Certified, mechanism: Mechanism, topology: Topology, dimension: int, rounds: int
) -> list[float]:
    """The certified bound in rounds 0, 1, ... without a synchronisation, if every node's perturbation has norm 1.

    It follows from public numbers alone. At most 64 rounds, and none beyond the first that has no number any more.
    """
    table = coefficients(topology, 0)
    ones = np.ones(topology.nodes)
    bounds: list[float] = []
    for t in range(min(rounds, WINDOW)):
        apart = np.zeros(table.rows)
        lags = list(table.lags(range(t)))
        factor = noise_factor(dimension, sensitivity.failure_exponent(topology, t, max(1, len(lags))))
        for age, lag in enumerate(lags, start=1):
            apart += lag.spread @ ones + mechanism.scale(bounds[-age]) * factor * lag.mean
        bounds.append(table.widest(ones, apart))
        if bounds[-1] > 1e100:
            break
    return bounds
