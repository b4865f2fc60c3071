"""How much privacy a run costs: epsilon from the charges of its ledger, and the noise for a wanted epsilon.

A round is a Laplace mechanism (noise scale against L1 sensitivity) or a Gaussian one (standard deviation
against L2 sensitivity), on all data or on a Poisson sample. Rounds compose adaptively. The total is the
smallest of three upper bounds, each of them valid by itself:

* ``sum``: the plain sum of pure epsilons (Laplace only; the one bound that exists at delta = 0);
* ``rdp``: Rényi differential privacy, from dp-accounting: quick, but not capped by the sum. It also chooses the grid of the
  next one, and is all there is for events that have no privacy loss distribution;
* ``pld``: privacy loss distributions, from dp-accounting: the tightest. Every rounding in it is pessimistic.

dp-accounting takes a second to load, so it is imported when a bound first needs it.

Why a vector of Laplace noises may be charged as one number. Let two inputs differ by (a, b) in two
coordinates. A test with false alarm rate x between 0 and (a, 0) has power at most F_a(x), F_a being the best
power between Lap(0) and Lap(a); between (a, 0) and (a, b) the same with F_b. So between 0 and (a, b) it is at
most F_b(F_a(x)), and that is F_{a+b}(x), because the best tests between shifts of a log-concave density in
one dimension are thresholds. The whole difference in one coordinate is therefore the worst case, for every
accountant, also under sampling.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Decimal
from functools import lru_cache
from typing import TYPE_CHECKING

from dpps.errors import UsageError
from dpps.logs import only_from
from dpps.noise.events import GAUSSIAN, LAPLACE, Event, gaussian, laplace, sampled

if TYPE_CHECKING:
    from dp_accounting import DpEvent
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

log = logging.getLogger(__name__)

NO_PROTECTION = 20.0
"""A total epsilon above this is labelled as no meaningful protection wherever it is printed."""

SUM_OF_ROUNDS = "sum of rounds, no guarantee"
"""What the epsilon of a whole run is called in the unit node-swap."""

# dp-accounting's Laplace distribution breaks from epsilon 710 on and is worth nothing long before that.
_PLD_LARGEST_EPSILON = 50.0
# Each further kind of round costs a convolution, so many kinds get a coarser grid.
_PLD_LARGEST_KINDS = 128
_PLD_KINDS_AT_FULL_GRID = 32
# A grid of epsilon / 5000 is accurate to about 1e-4 of epsilon and keeps the arrays below a million entries.
_PLD_GRID_POINTS = 5_000

DeltaToEpsilon = Callable[[float], float]


@dataclass(frozen=True)
class Charge:
    """The cost of one kind of message, and how often it was sent."""

    event: Event
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 0:
            raise UsageError(f"count {self.count}: it must be 0 or more")

    @classmethod
    def laplace(cls, epsilon: float, sampling: float = 1.0, count: int = 1) -> "Charge":
        """Rounds of Laplace noise, each of pure epsilon (L1 sensitivity / scale) before sampling."""
        if not epsilon >= 0:
            raise UsageError(f"epsilon {epsilon}: it must be a number, 0 or more")
        return cls(sampled(sampling, laplace(1 / epsilon if epsilon else math.inf)), count)

    @classmethod
    def gaussian(cls, noise_multiplier: float, sampling: float = 1.0, count: int = 1) -> "Charge":
        """Rounds of Gaussian noise: noise_multiplier is standard deviation / L2 sensitivity."""
        if not noise_multiplier >= 0:
            raise UsageError(f"noise multiplier {noise_multiplier}: it must be a number, 0 or more")
        return cls(sampled(sampling, gaussian(noise_multiplier)), count)

    @property
    def unsampled(self) -> bool:
        """Whether it is Laplace or Gaussian noise on all records: how far apart two messages are is known exactly."""
        return self.event.noisy and self.event.sampling == 1

    @property
    def free(self) -> bool:
        """Whether it reveals nothing."""
        return self.count == 0 or self.event.free

    @property
    def unprotected(self) -> bool:
        """Whether it reveals everything."""
        return self.count > 0 and self.event.unprotected


@dataclass(frozen=True)
class Total:
    """The guarantee of a composition.

    Attributes:
        epsilon: the smallest of the bounds; infinite when there is none.
        accountant: the bound that won; ``none`` when there is none.
        epsilon_sum: plain sum of the rounds' pure epsilons; None where a Gaussian round has no pure epsilon.
        by_method: every finite bound by its name.
        simulated: the noise came from a seed: whoever knows it can subtract the noise, so these messages are not protected.
    """

    epsilon: float
    delta: float
    accountant: str
    epsilon_sum: float | None
    by_method: dict[str, float]
    simulated: bool = False

    def __str__(self) -> str:
        """For people: rounded up, and what must be said with it."""
        remark = ", simulated: seeded noise protects nobody" if self.simulated else ""
        return f"{label(self.epsilon)}, delta {self.delta:g} (by {self.accountant}){remark}"


def total(
    charges: Iterable[Charge], delta: float, group: int = 1, *, distance: float = 0.0, replaced: bool = False
) -> Total:
    """The (epsilon, delta) guarantee of all charges together: min(sum, RDP, PLD).

    Args:
        charges: the charges, in any order.
        delta: the total delta.
        group: how many records one person may own (group privacy).
        distance: total variation distance between all noise drawn and the noise charged for (samplers are
            truncated, see ``keystream``; a discrete Gaussian is charged as a continuous one). If M' is
            (epsilon, delta')-private and M is within ``distance`` of it on every input, then M is (epsilon,
            delta' + (1 + e^epsilon) distance)-private.
        replaced: a person's records are replaced by other ones, instead of by records that teach nothing. That is two steps,
            from the old records to none and from none to the new ones. If each step is (e, d)-private, both together are
            (2 e, (1 + exp(e)) d)-private, whatever the mechanism. Where nothing is sampled, the two are at most twice as far
            apart, which is known exactly.
    """
    kinds, steps = _merge(charges), 2 if replaced else 1
    if not 0 <= delta < 1:
        raise UsageError(f"delta {delta} must lie in [0, 1): choose well below 1 / (number of records)")
    if group < 1:
        raise UsageError(f"records per user {group}: it must be 1 or more")
    if not distance >= 0:
        raise UsageError(f"distance {distance}: it must be a number, 0 or more")
    if delta == 0 and any(kind.event.type == GAUSSIAN for kind in kinds):
        raise UsageError("delta 0 is impossible with Gaussian noise: allow 1e-5, say, or use Laplace noise")
    unprotected = any(kind.unprotected for kind in kinds)
    bounds = {} if unprotected else dict(_bounds(tuple(kinds), group, delta, distance, steps))
    best = min(bounds, key=lambda name: bounds[name], default="none")
    return Total(bounds.get(best, math.inf), delta, best, _sum(kinds, group * steps), bounds)


def running_total(
    charges: Iterable[Charge], delta: float, planned: int, *, distance: float = 0.0
) -> float | None:
    """The epsilon of equal sampled Gaussian rounds so far, in milliseconds: for a log that asks again and again.

    It is :func:`total` by the privacy loss distribution, with one grid for all planned rounds. `total` chooses a finer grid
    for fewer rounds. Both are upper bounds, and they agree to about five digits.

    Args:
        charges: what happened.
        delta: the total delta.
        planned: the number of rounds of the run, which the grid is made for.
        distance: as in :func:`total`.

    Returns:
        None where the rounds are of another kind: ask `total`.
    """
    kinds = _merge(charges)
    if not kinds:
        return 0.0
    (kind, *others), bounds = kinds, dict[str, float]()
    if others or kind.event.type != GAUSSIAN or kind.unsampled or kind.unprotected:
        return None

    def epsilon() -> float:
        whole = _one_round(kind.event, delta, max(planned, kind.count)).self_compose(kind.count)
        return _afford(lambda d: float(whole.get_epsilon_for_delta(d)), delta, distance)

    _attempt(bounds, "pld", epsilon)
    return bounds.get("pld")


# dp-accounting warns of every Rényi order it leaves out; the bound is valid without them
_quietly = only_from(logging.ERROR, logging.getLogger("absl"))


@lru_cache(maxsize=32)
@_quietly
def _one_round(event: Event, delta: float, planned: int) -> "PrivacyLossDistribution":
    """The privacy loss of one sampled Gaussian round, on the grid of all planned ones."""
    from dp_accounting.pld import privacy_loss_distribution

    upper = _rdp([Charge(event, planned)], 1)(delta)
    return privacy_loss_distribution.from_gaussian_mechanism(
        event.noise_multiplier,
        value_discretization_interval=_pld_interval(upper, 1, 1),
        sampling_prob=event.sampling,
    )


@lru_cache(maxsize=512)
@_quietly
def _bounds(
    kinds: tuple[Charge, ...], group: int, delta: float, distance: float, steps: int
) -> tuple[tuple[str, float], ...]:
    """Every finite bound by its name. Cached: one takes half a second, and a run asks for the same ones several times."""
    bounds: dict[str, float] = {}
    epsilon_sum = _sum(kinds, group * steps)
    if epsilon_sum is not None:
        bounds["sum"] = _afford(lambda _: epsilon_sum, delta, distance)
    if delta > 0 and kinds:
        _attempt(bounds, "rdp", lambda: _afford(_rdp(kinds, group * steps), delta, distance))
        upper = min(bounds.values(), default=math.inf)
        _attempt(bounds, "pld", lambda: _afford(_pld(kinds, group, upper, steps), delta, distance))
    return tuple((name, value) for name, value in bounds.items() if math.isfinite(value))


def _attempt(bounds: dict[str, float], name: str, bound: Callable[[], float]) -> None:
    """Keep a bound if there is one: a failing accountant is left out, never read as private."""
    from dp_accounting import UnsupportedEventError

    failures = (ValueError, ArithmeticError, IndexError, MemoryError, RuntimeWarning, UnsupportedEventError)
    try:
        value = float(bound())
    except failures as error:
        log.debug("accountant %s left out: %s", name, error)
        return
    if value >= 0:  # false for NaN
        bounds[name] = value


def noise_for(
    target_epsilon: float,
    delta: float,
    rounds: int,
    event: Callable[[float], "Event | DpEvent"],
    sampling: float = 1.0,
    group: int = 1,
) -> float:
    """The smallest noise multiplier whose total over the rounds is at most the target, and at least 0.999 of it.

    Args:
        target_epsilon: wanted total.
        delta: as in :func:`total`, like `group`.
        rounds: planned number of rounds.
        event: what one round costs at a noise multiplier (scale / sensitivity): a mechanism's `event`.
        sampling: Poisson rate q.
        group: records per person.
    """
    if not 0 < target_epsilon < math.inf:
        raise UsageError(
            f"epsilon is {target_epsilon:g}: it must be a positive number; smaller is more private"
        )
    if rounds < 1 or not 0 < sampling <= 1:
        raise UsageError(f"rounds {rounds} at sampling rate {sampling}: give 1 or more, and a rate in (0, 1]")

    def epsilon_of(noise: float) -> float:
        charge = Charge(sampled(sampling, Event.of(event(noise))), rounds)
        return total([charge], delta, group).epsilon

    guess = _first_guess(event, target_epsilon / group, delta, sampling, rounds)
    return _least_noise(epsilon_of, target_epsilon, guess)


def finite_or_none(value: float | None) -> float | None:
    """For JSON, which has no infinity and no NaN."""
    return value if value is not None and math.isfinite(value) else None


def label(epsilon: float) -> str:
    """Epsilon as text, rounded up to three digits, with a warning if it is too large to protect anybody."""
    if not math.isfinite(epsilon):
        return "epsilon infinite (no meaningful protection)"
    exact = Decimal(repr(float(epsilon)))
    step = Decimal(1).scaleb(min(0, exact.adjusted() - 2)) if exact else Decimal(1)
    text = f"epsilon {exact.quantize(step, ROUND_CEILING).normalize():f}"
    return f"{text} (no meaningful protection)" if epsilon > NO_PROTECTION else text


def _merge(charges: Iterable[Charge]) -> list[Charge]:
    """Equal kinds added up, at the costlier where they differ by rounding only; kinds that cost nothing left out."""
    counts: Counter[Event] = Counter()
    for charge in charges:
        if not charge.free:
            counts[charge.event] += charge.count
    merged: list[Charge] = []
    # equal kinds next to each other, the costlier first: scale / sensitivity differs in its last digits between learning rates
    for event in sorted(counts, key=lambda e: (e.type, e.arguments, e.sampling, e.noise_multiplier)):
        last = merged[-1].event if merged else Event("")
        close = math.isclose(last.noise_multiplier, event.noise_multiplier, rel_tol=1e-12)
        if close and replace(last, noise_multiplier=event.noise_multiplier) == event:
            merged[-1] = Charge(last, merged[-1].count + counts[event])
        else:
            merged.append(Charge(event, counts[event]))
    return merged


def _sum(kinds: Sequence[Charge], group: int) -> float | None:
    """Pure epsilons added up; None where a round has none."""
    pure = [kind.event.pure_epsilon for kind in kinds]
    if any(epsilon is None for epsilon in pure):
        return None
    return math.fsum(group * kind.count * (e or 0.0) for kind, e in zip(kinds, pure, strict=True))


def _afford(epsilon_at: DeltaToEpsilon, delta: float, distance: float) -> float:
    """Epsilon after paying (1 + e^epsilon) distance out of delta."""
    if distance == 0:
        return epsilon_at(delta)
    # epsilon(delta/2) is an upper bound of the answer as long as the price stays below delta/2.
    upper = epsilon_at(delta / 2)
    price = (1 + math.exp(upper)) * distance if upper < 700 else math.inf
    return epsilon_at(delta - price) if price <= delta / 2 else math.inf


def _first_guess(
    event: Callable[[float], "Event | DpEvent"], target: float, delta: float, sampling: float, count: int
) -> float:
    pure = Event.of(event(1.0)).pure_epsilon
    if pure is not None:  # the plain sum is always enough
        return pure * count / target * (1 + 1e-12)
    mu = target / math.sqrt(2 * math.log(1.25 / max(delta, 1e-300)) + 2 * target)
    return max(sampling * math.sqrt(count) / mu, 0.5 / math.sqrt(1 + target))


def _least_noise(epsilon_of: Callable[[float], float], target: float, guess: float) -> float:
    """The least noise with epsilon <= target, to 1e-3 of epsilon.

    Brent's method, as in dp-accounting's `calibrate_dp_mechanism`, but in logarithms, where the curve is nearly straight.
    """
    from scipy.optimize import brentq

    def gap(log_noise: float) -> float:
        epsilon = min(max(epsilon_of(math.exp(log_noise)), 1e-300), 1e300)
        return math.log(epsilon / target) + 5e-4

    low = high = guess
    while epsilon_of(high) > target:
        low, high = high, 2 * high
        if high > 1e15:
            raise UsageError(
                f"no noise reaches epsilon {target:g}: allow a larger delta, fewer records per user, or use a finer noise grid"
            )
    while epsilon_of(low) <= target * (1 - 1e-3):
        low, high = low / 2, low
    for noise in (low, high):
        if target * (1 - 1e-3) <= epsilon_of(noise) <= target:
            return noise
    noise = math.exp(brentq(gap, math.log(low), math.log(high), xtol=1e-4))
    while epsilon_of(noise) > target:  # where the curve is steep
        noise *= 1 + 1e-4
    return noise


def _rdp(kinds: Sequence[Charge], group: int) -> DeltaToEpsilon:
    """Rényi accounting.

    Epsilon has one minimum over the orders, and one order costs milliseconds. So every twelfth order is tried first, then those
    around the best: the same result as from all of them. A bound is valid for any orders.
    """
    from dp_accounting.rdp import RdpAccountant
    from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS

    scalable, every = all(kind.unsampled for kind in kinds), list(DEFAULT_RDP_ORDERS)

    def over(orders: list[float]) -> RdpAccountant:
        accountant = RdpAccountant(orders)
        for kind in _scale(kinds, group) if scalable else kinds:
            accountant.compose(kind.event.dp_event(), kind.count)
        # dp-accounting reads a negative divergence (numerical trouble) as epsilon 0.
        if not all(divergence >= 0 for divergence in accountant.rdp):
            raise ArithmeticError("negative Rényi divergence")
        return accountant

    if group > 1 and not scalable:
        return _converted(over(every).get_delta, group)
    coarse = over([*every[::12], every[-1]])

    def epsilon_at(delta: float) -> float:
        best = every.index(coarse.get_epsilon_and_optimal_order(delta)[1])
        return float(over(every[max(0, best - 12) : best + 13]).get_epsilon(delta))

    return epsilon_at


def _pld(kinds: Sequence[Charge], group: int, upper: float, steps: int) -> DeltaToEpsilon:
    """Accounting by the distribution of the privacy loss; `upper` is a bound that is known already.

    `steps` is 2 where a group of records is replaced by another one: it is removed, and the other one is added.
    """
    from dp_accounting import GaussianDpEvent, get_epsilon_gaussian
    from dp_accounting.pld import PLDAccountant

    others = [kind for kind in kinds if not kind.unsampled]
    if not others:  # how far apart two messages are is known, so nothing is converted
        group, steps = group * steps, 1
    known = _scale([kind for kind in kinds if kind.unsampled], group)
    pure_noise = _fewer_scales([kind for kind in known if kind.event.type == LAPLACE])
    # all Gaussian rounds are one: 1/sigma² adds up
    gaussians = (kind for kind in known if kind.event.type == GAUSSIAN)
    precision = math.fsum(kind.count / kind.event.noise_multiplier**2 for kind in gaussians)
    multiplier = 1 / math.sqrt(precision) if precision > 0 else math.inf
    if not pure_noise and not others:  # one Gaussian: dp-accounting has its privacy loss in closed form
        return lambda delta: float(get_epsilon_gaussian(multiplier, delta))
    pure = [replace(kind.event, sampling=1.0).pure_epsilon for kind in pure_noise + others]
    if any(epsilon is not None and epsilon > _PLD_LARGEST_EPSILON for epsilon in pure):
        raise ValueError(f"an epsilon per round above {_PLD_LARGEST_EPSILON}")
    if len(others) > _PLD_LARGEST_KINDS:
        raise ValueError(f"{len(others)} kinds of rounds that are neither Laplace nor Gaussian")
    interval = _pld_interval(upper / steps, len(pure_noise) + len(others), group if others else 1)
    accountant = PLDAccountant(value_discretization_interval=interval)
    for kind in pure_noise:
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


def _scale(kinds: Sequence[Charge], group: int) -> Sequence[Charge]:
    """Unsampled Laplace and Gaussian rounds as a group of that size sees them: its members' contributions add up."""
    if group == 1:
        return kinds
    return [
        replace(kind, event=replace(kind.event, noise_multiplier=kind.event.noise_multiplier / group))
        for kind in kinds
    ]


def _group_event(event: Event, group: int) -> "DpEvent":
    """A Poisson sampled Gaussian round as a group sees it that is added, or removed, as a whole: a binomial number i of its g
    members is drawn.

    The mixture of Gaussians with shifts i dominates (Ganesh 2024, arXiv 2401.10294). A group that is replaced by another one is
    not such a group: it is two steps, converted by `_converted`.
    """
    from dp_accounting.dp_event import MixtureOfGaussiansDpEvent

    if event.type != GAUSSIAN:
        raise ValueError(f"no group bound for rounds of {event.type}")
    drawn, q = range(group + 1), event.sampling
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


def _fewer_scales(kinds: Sequence[Charge]) -> list[Charge]:
    """Many Laplace scales, neighbours merged at their least noise, which dominates the others."""
    width = math.ceil(len(kinds) / _PLD_LARGEST_KINDS)
    if width <= 1:
        return list(kinds)
    ordered = sorted(kinds, key=lambda kind: -kind.event.noise_multiplier)
    chunks = [ordered[i : i + width] for i in range(0, len(ordered), width)]
    return [replace(chunk[-1], count=sum(kind.count for kind in chunk)) for chunk in chunks]
