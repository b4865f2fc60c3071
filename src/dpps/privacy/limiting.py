"""Who limits whom: nodes that draw at different rates spend differently under the same noise, and the largest rate sets it."""

from dataclasses import dataclass, replace

from dpps.privacy.charges import planned_charges
from dpps.privacy.units import Plan, Unit

SHOWN = 12
"""Of how many different rates epsilons are computed: each takes the accountant a part of a second."""


@dataclass(frozen=True)
class Limits:
    """Which node sets the noise of all.

    Attributes:
        node: the one that draws most often; the noise is solved for its rate.
        size: what it declares.
        noise_multiplier: that follows from its rate.
        part: the rate with which all nodes together would draw as many examples as planned.
        noise_multiplier_at_part: what would do if every node drew with that rate.
        epsilons: (node, declared size, expected batch, rate, total epsilon at that rate) of nodes with different rates, the
            dearest first.
    """

    node: int
    size: int
    noise_multiplier: float
    part: float
    noise_multiplier_at_part: float
    epsilons: tuple[tuple[int, int, float, float, float], ...]


def limits(unit: Unit, plan: Plan) -> Limits | None:
    """Who sets the noise of a run of this plan; None where all nodes draw at one rate."""
    rates = dict.fromkeys(plan.sampling)
    if not unit.per_example or len(rates) < 2:
        return None
    order = sorted(range(plan.nodes), key=lambda node: -plan.sampling[node])
    node, size = order[0], plan.declared_sizes[order[0]]
    part = sum(plan.batch_of(k) for k in range(plan.nodes)) / sum(plan.declared_sizes)
    noise = unit.noise(plan)
    alike = unit.noise(replace(plan, sampling=(min(1.0, part),) * plan.nodes)) if unit.epsilon else noise
    first = {plan.sampling[k]: k for k in reversed(order)}  # one node of each rate
    chosen = sorted(first.values(), key=order.index)
    if len(chosen) > SHOWN:
        chosen = [*chosen[: SHOWN - 1], chosen[-1]]
    return Limits(node, size, noise, part, alike, tuple(_cost(unit, plan, noise, k) for k in chosen))


def _cost(unit: Unit, plan: Plan, noise: float, node: int) -> tuple[int, int, float, float, float]:
    rate = plan.sampling[node]
    calibration = unit.calibrate(replace(plan, sampling=(rate,) * plan.nodes), noise)
    epsilon = unit.total(planned_charges(calibration, plan)).epsilon
    return node, plan.declared_sizes[node], plan.batch_of(node), rate, epsilon
