"""Rényi and privacy-loss-distribution accounting through dp-accounting.

A module of its own, imported when first needed: dp-accounting takes a second to load, and many runs never ask.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from dp_accounting import (
    DpEvent,
    GaussianDpEvent,
    UnsupportedEventError,
    get_epsilon_gaussian,
)
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from dpps.logs import only_from
from dpps.noise.events import GAUSSIAN, LAPLACE, POISSON, Event
from dpps.noise.events import gaussian as gaussian_event
from dpps.noise.events import laplace as laplace_event
from dpps.privacy.accountant import Charge, DeltaToEpsilon

# dp-accounting's Laplace distribution breaks from epsilon 710 on and is worth nothing long before that.
_PLD_LARGEST_EPSILON = 50.0
# Each further kind of round costs a convolution, so many kinds get a coarser grid.
_PLD_LARGEST_KINDS = 128
_PLD_KINDS_AT_FULL_GRID = 32
# A grid of epsilon / 5000 is accurate to about 1e-4 of epsilon and keeps the arrays below a million entries.
_PLD_GRID_POINTS = 5_000
_FAILURES = (ValueError, ArithmeticError, IndexError, MemoryError, RuntimeWarning, UnsupportedEventError)

log = logging.getLogger(__name__)


def attempt(bounds: dict[str, float], name: str, bound: Callable[[], float]) -> None:
    """Keep a bound if there is one: a failing accountant is left out, never read as private."""
    try:
        # dp-accounting warns of every Rényi order it leaves out; the bound is valid without them
        with only_from(logging.ERROR, logging.getLogger("absl")):
            value = float(bound())
    except _FAILURES as error:
        log.debug("accountant %s left out: %s", name, error)
        return
    if value >= 0:  # false for NaN
        bounds[name] = value


def rdp(kinds: list[Charge], group: int) -> DeltaToEpsilon:
    """Rényi accounting."""
    scalable = all(kind.event.type in (LAPLACE, GAUSSIAN) for kind in kinds)
    accountant = RdpAccountant()
    for kind in _scale(kinds, group) if scalable else kinds:
        accountant.compose(kind.event.dp_event(), kind.count)
    # dp-accounting reads a negative divergence (numerical trouble) as epsilon 0.
    if not np.all(np.asarray(accountant.rdp) >= 0):
        raise ArithmeticError("negative Rényi divergence")
    if group > 1 and not scalable:
        return _converted(accountant.get_delta, group)
    return lambda delta: float(accountant.get_epsilon(delta))


def pld(kinds: list[Charge], group: int, upper: float, steps: int = 1) -> DeltaToEpsilon:
    """Accounting by the distribution of the privacy loss.

    Args:
        kinds: what happened.
        group: records that are added, or removed, together.
        upper: a bound known already.
        steps: 2 where such a group is replaced by another one: it is removed, and the other one added.
    """
    others = [kind for kind in kinds if kind.event.type not in (LAPLACE, GAUSSIAN)]
    if not others:  # how far apart two messages are is known, so nothing is converted
        group, steps = group * steps, 1
    laplace = _fewer_scales(_scale([kind for kind in kinds if kind.event.type == LAPLACE], group))
    multiplier = _joint_multiplier(_scale([kind for kind in kinds if kind.event.type == GAUSSIAN], group))
    if not laplace and not others:  # one Gaussian: dp-accounting has its privacy loss in closed form
        return lambda delta: float(get_epsilon_gaussian(multiplier, delta))
    pure = [kind.event.inner.pure_epsilon for kind in laplace + others]
    if any(epsilon is not None and epsilon > _PLD_LARGEST_EPSILON for epsilon in pure):
        raise ValueError(f"an epsilon per round above {_PLD_LARGEST_EPSILON}")
    if len(others) > _PLD_LARGEST_KINDS:
        raise ValueError(f"{len(others)} kinds of rounds that are neither Laplace nor Gaussian")
    interval = _pld_interval(upper / steps, len(laplace) + len(others), group if others else 1)
    accountant = PLDAccountant(value_discretization_interval=interval)
    for kind in laplace:
        accountant.compose(kind.event.dp_event(), kind.count)
    for kind in others:
        event = kind.event.dp_event() if group == 1 else _group_event(kind.event, group)
        accountant.compose(event, kind.count)
    if math.isfinite(multiplier):
        accountant.compose(GaussianDpEvent(multiplier))
    if steps > 1:
        return _converted(accountant.get_delta, steps)
    return lambda delta: float(accountant.get_epsilon(delta))


def _pld_interval(upper: float, kinds: int, group: int) -> float:
    """Grid of the privacy loss: any is valid, a finer one is tighter and slower; groups are slow as it is."""
    fine = upper / _PLD_GRID_POINTS if math.isfinite(upper) else 1e-3
    coarser = max(1.0, kinds / _PLD_KINDS_AT_FULL_GRID) * (1 if group == 1 else 5)
    return min(max(fine * coarser, 1e-5), 10.0)


def _scale(kinds: list[Charge], group: int) -> list[Charge]:
    """Unsampled Laplace and Gaussian rounds as a group of that size sees them: its members' contributions add up."""
    if group == 1:
        return kinds
    make = {LAPLACE: laplace_event, GAUSSIAN: gaussian_event}
    return [replace(kind, event=make[kind.event.type](kind.event.noise_multiplier / group)) for kind in kinds]


def _group_event(event: Event, group: int) -> DpEvent:
    """A Poisson sampled Gaussian round as a group sees it that is added, or removed, as a whole: a binomial number i of its g
    members is drawn.

    The mixture of Gaussians with shifts i dominates (Ganesh 2024, arXiv 2401.10294). A group that is replaced by another one is
    not such a group: it is two steps, converted by `_converted`.
    """
    if event.type != POISSON or event.inner.type != GAUSSIAN:
        raise ValueError(f"no group bound for rounds of {event.inner.type}")
    drawn = range(group + 1)
    q = event.sampling
    chances = [math.comb(group, i) * q**i * (1 - q) ** (group - i) for i in drawn]
    mixture: DpEvent = MixtureOfGaussiansDpEvent(event.noise_multiplier, [float(i) for i in drawn], chances)
    return mixture


def _converted(delta_at: Callable[[float], float], group: int) -> DeltaToEpsilon:
    """Group privacy: (e, d) for one record is (g e, d (1 + e^e + ... + e^((g-1)e))) for g of them."""

    def fits(epsilon: float, delta: float) -> bool:
        return float(delta_at(epsilon)) * math.fsum(math.exp(i * epsilon) for i in range(group)) <= delta

    def epsilon_at(delta: float) -> float:
        low, high = 0.0, 1 / 16
        while not fits(high, delta):
            low, high = high, 2 * high
            if high * group > 700:
                return math.inf
        while high - low > 1e-5 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if fits(middle, delta) else (middle, high)
        return group * high

    return epsilon_at


def _joint_multiplier(kinds: list[Charge]) -> float:
    """All unsampled Gaussian rounds are one Gaussian: 1/sigma² adds up."""
    precision = math.fsum(kind.count / kind.event.noise_multiplier**2 for kind in kinds)
    return 1 / math.sqrt(precision) if precision > 0 else math.inf


def _fewer_scales(kinds: list[Charge]) -> list[Charge]:
    """Many Laplace scales, neighbours merged at their least noise, which dominates the others."""
    width = math.ceil(len(kinds) / _PLD_LARGEST_KINDS)
    if width <= 1:
        return kinds
    ordered = sorted(kinds, key=lambda kind: -kind.event.noise_multiplier)
    chunks = [ordered[i : i + width] for i in range(0, len(ordered), width)]
    return [replace(chunk[-1], count=sum(kind.count for kind in chunk)) for chunk in chunks]
