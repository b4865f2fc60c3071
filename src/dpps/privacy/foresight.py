"""Warnings before a run starts: a bound that outgrows all numbers, a delta that hides nothing, nodes with few examples."""

import math
from collections.abc import Sequence

import numpy as np

from dpps.errors import UsageError
from dpps.noise.mechanisms import Mechanism
from dpps.privacy.units import NodeSwap, Plan, Unit
from dpps.sensitivity import WINDOW, Certified, Paper, coefficients, noise_factor
from dpps.topology import Topology

BEYOND = 1e34
"""A noise scale from which on float32 has no numbers left for sums."""
TOLERABLE = 100.0
"""Growth of a bound, over what one round by itself needs, up to which nothing is said."""
HARMLESS = 20.0
"""Growth up to which runs learn well: the period of synchronisation that is advised keeps to it."""


def foresee(unit: Unit, plan: Plan, dimension: int, topology: Topology, sync_every: int) -> list[str]:
    """What to tell a user before the first round.

    Raises:
        UsageError: the run cannot end well: its bound outgrows all numbers, or delta is no failure probability.
    """
    check_delta(unit, plan.declared_sizes)
    found = _small_nodes(unit, plan)
    if isinstance(unit, NodeSwap) and dimension:
        found += _growth(unit, plan, dimension, topology, sync_every)
    return found


def check_delta(unit: Unit, sizes: Sequence[int]) -> None:
    """Publishing each record with probability delta is (0, delta)-private: above 1 / records somebody is expected to be hit."""
    largest = max(sizes, default=0)
    if unit.per_example and unit.delta * largest >= 1:
        raise UsageError(
            f"delta is {unit.delta:g} and a node has {largest} records: delta is the chance that the "
            "guarantee fails, so it must be "
            f"well below 1 / records = {1 / largest:.2g}; use {_power_below(0.1 / largest):g} or less"
        )


def _power_below(value: float) -> float:
    return 10.0 ** math.floor(math.log10(value) + 1e-9)


def _small_nodes(unit: Unit, plan: Plan) -> list[str]:
    small = [
        (size, node)
        for node, size in enumerate(plan.declared_sizes)
        if not plan.batches and size < plan.batch_size
    ]
    if not unit.per_example or not small:
        return []
    size, node = min(small)
    return [
        f"node {node} has {size} examples, fewer than a batch of {plan.batch_size}: every round uses all of them, divided by "
        f"{plan.batch_size}; a smaller batch size gives it more weight and more privacy for the same noise, "
        "and one that is a part of "
        "every node's examples (1/8) lets nobody set the noise of the others"
    ]


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
    remedy = "share fewer parameters, or add less noise (a larger budget or epsilon)"
    if over > 1:
        remedy = (
            f"synchronise at least every {over} rounds (--sync-every {over}, sync_every={over}), {remedy}"
        )
    name, last = type(sensitivity).__name__.lower(), math.log(bounds[-1])
    if len(bounds) > 1:  # beyond the rounds that were looked at it goes on as in the last one
        last += (stretch - len(bounds)) * max(0.0, math.log(bounds[-1] / bounds[-2]))
    told = f"the {name} sensitivity is {_times(bounds, 1)} as large in round 1 as in round 0, and {_times(bounds, -1)} in round {len(bounds) - 1}"
    if isinstance(sensitivity, Certified) and last + math.log(mechanism.scale(1.0)) > math.log(BEYOND):
        raise UsageError(f"{told}: before the run ends the noise outgrows all numbers; {remedy}")
    return [f"{told}: the noise drowns what is learned; {remedy}"]


def _times(bounds: Sequence[float], t: int) -> str:
    return f"{bounds[t] / bounds[0]:.3g} times"


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
