"""What a run costs in total: epsilon from the charges of its ledger, and the noise for a wanted epsilon.

A round is a Laplace mechanism (noise scale against L1 sensitivity) or a Gaussian one (standard deviation
against L2 sensitivity), on all data or on a Poisson sample. Rounds compose adaptively. The total is the
smallest of three upper bounds, each of them valid by itself:

* ``sum``: the plain sum of pure epsilons (Laplace only; the one bound that exists at delta = 0);
* ``rdp``: Rényi differential privacy, from dp-accounting; quick, but not capped by the sum;
* ``pld``: privacy loss distributions, from dp-accounting; the tightest. Every rounding in it is pessimistic.

Why a vector of Laplace noises may be charged as one number. Let two inputs differ by (a, b) in two
coordinates. A test with false alarm rate x between 0 and (a, 0) has power at most F_a(x), F_a being the best
power between Lap(0) and Lap(a); between (a, 0) and (a, b) the same with F_b. So between 0 and (a, b) it is at
most F_b(F_a(x)), and that is F_{a+b}(x), because the best tests between shifts of a log-concave density in
one dimension are thresholds. The whole difference in one coordinate is therefore the worst case, for every
accountant, also under sampling.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from functools import lru_cache

from dpps.errors import UsageError
from dpps.noise.events import GAUSSIAN, LAPLACE, Event, gaussian, laplace, sampled

NO_PROTECTION = 20.0
"""A total epsilon above this is labelled as no meaningful protection wherever it is printed."""

DeltaToEpsilon = Callable[[float], float]


@dataclass(frozen=True)
class Charge:
    """One kind of message and how often it was sent.

    Attributes:
        event: what one such message costs.
        count: how many there were.
    """

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
        """Rounds of Gaussian noise: noise_multiplier is deviation / L2 sensitivity."""
        if not noise_multiplier >= 0:
            raise UsageError(f"noise multiplier {noise_multiplier}: it must be a number, 0 or more")
        return cls(sampled(sampling, gaussian(noise_multiplier)), count)

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
        epsilon: smallest of the bounds; infinite when there is none.
        delta: the whole allowance it holds at.
        accountant: the bound that won; ``none`` when there is none.
        epsilon_sum: plain sum of the rounds' pure epsilons; None where a Gaussian round has no pure epsilon.
        by_method: every finite bound by its name.
        simulated: the noise came from a seed: whoever knows that can subtract it, so these very messages are not protected.
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
    charges: Iterable[Charge],
    delta: float,
    group: int = 1,
    *,
    distance: float = 0.0,
) -> Total:
    """The (epsilon, delta) guarantee of all charges together: min(sum, RDP, PLD).

    Args:
        charges: what happened, in any order.
        delta: the whole allowance.
        group: how many records one person may own (group privacy).
        distance: total variation distance between all noise drawn and the noise charged for (samplers are
            truncated, see ``keystream``; a discrete Gaussian is charged as a continuous one). If M' is
            (epsilon, delta')-private and M is within ``distance`` of it on every input, then M is (epsilon,
            delta' + (1 + e^epsilon) distance)-private.
    """
    return _total(charges, delta, group, distance, steps=1)


def replacement(charges: Iterable[Charge], delta: float, group: int = 1, *, distance: float = 0.0) -> Total:
    """The same where a person's records are replaced by other ones, instead of by records that teach nothing.

    That is two steps, from the old records to none and from none to the new ones. If each step is (e, d)-private, both together
    are (2 e, (1 + exp(e)) d)-private, whatever the mechanism. Where nothing is sampled, the two are at most twice as far apart,
    which is known exactly.
    """
    return _total(charges, delta, group, distance, steps=2)


def _total(charges: Iterable[Charge], delta: float, group: int, distance: float, steps: int) -> Total:
    kinds = _merge(charges)
    _check_request(kinds, delta, group, distance)
    epsilon_sum = _sum(kinds, group * steps)
    if any(kind.unprotected for kind in kinds):
        return Total(math.inf, delta, "none", epsilon_sum, {})
    finite = dict(_bounds(tuple(kinds), group, delta, distance, steps))
    if not finite:
        return Total(math.inf, delta, "none", epsilon_sum, {})
    winner = min(finite, key=lambda name: finite[name])
    return Total(finite[winner], delta, winner, epsilon_sum, finite)


@lru_cache(maxsize=512)
def _bounds(
    kinds: tuple[Charge, ...], group: int, allowance: float, distance: float, steps: int
) -> tuple[tuple[str, float], ...]:
    """Every finite bound by its name. Kept: one takes half a second, and a run asks for the same ones several times."""
    bounds: dict[str, float] = {}
    epsilon_sum = _sum(kinds, group * steps)
    if epsilon_sum is not None:
        bounds["sum"] = _afford(lambda _: epsilon_sum, allowance, distance)
    if allowance > 0 and kinds:
        from dpps.privacy import composition  # dp-accounting takes a second to load

        charges = list(kinds)
        composition.attempt(
            bounds, "rdp", lambda: _afford(composition.rdp(charges, group * steps), allowance, distance)
        )
        upper = min(bounds.values(), default=math.inf)
        composition.attempt(
            bounds, "pld", lambda: _afford(composition.pld(charges, group, upper, steps), allowance, distance)
        )
    return tuple((name, value) for name, value in bounds.items() if math.isfinite(value))


@lru_cache(maxsize=64)
def multiplier_for(epsilon: float, delta: float, rounds: int, sampling: float, group: int) -> float:
    """The noise multiplier of sampled Gaussian rounds, as `noise_for` finds it; a rule for rates asks before the run does."""
    return noise_for(epsilon, delta, rounds, gaussian, sampling=sampling, group=group)


def noise_for(
    target_epsilon: float,
    delta: float,
    rounds: int | Sequence[tuple[float, int]],
    event: Callable[[float], Event],
    sampling: float = 1.0,
    group: int = 1,
    *,
    distance: float = 0.0,
) -> float:
    """The least noise whose total over the rounds is at most the target, and at least 0.999 of it.

    Args:
        target_epsilon: wanted total.
        delta: whole allowance, as in :func:`total`.
        rounds: planned number of rounds, or one (sampling rate, rounds) pair for each node: nodes compose in
            parallel, so each of them must keep to the target.
        event: what one round costs at a noise multiplier (scale / sensitivity): a mechanism's `event`.
        sampling: Poisson rate q when ``rounds`` is a number.
        group: records per person.
        distance: as in :func:`total`.

    Returns:
        The noise multiplier.
    """
    if not 0 < target_epsilon < math.inf:
        raise UsageError(
            f"epsilon is {target_epsilon:g}: it must be a positive number; smaller is more private"
        )
    plans = [(sampling, rounds)] if isinstance(rounds, int) else list(rounds)
    if not plans or any(not 0 < q <= 1 or count < 1 for q, count in plans):
        raise UsageError(f"rounds {rounds} at sampling rate {sampling}: give 1 or more, and a rate in (0, 1]")

    def solve(q: float, count: int) -> float:
        def epsilon_of(noise: float) -> float:
            charge = Charge(sampled(q, Event.of(event(noise))), count)
            return total([charge], delta, group, distance=distance).epsilon

        return _least_noise(
            epsilon_of, target_epsilon, _first_guess(event, target_epsilon / group, delta, q, count)
        )

    return max(solve(q, count) for q, count in _hardest(plans))


SUM_OF_ROUNDS = "sum of rounds, no guarantee"
"""What the epsilon of a whole run is called in the unit node-swap."""


def label(epsilon: float) -> str:
    """Epsilon for people, rounded up to three digits, with the warning that a useless one deserves."""
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
    for event in sorted(counts, key=_by_noise):
        last = merged.pop() if merged and _alike(merged[-1].event, event) else Charge(event, 0)
        merged.append(Charge(last.event, last.count + counts[event]))
    return merged


def _by_noise(event: Event) -> tuple[str, str, float, float]:
    """Kinds that may be the same beside each other, the costlier first."""
    plain = event.inner.type in (LAPLACE, GAUSSIAN)
    multiplier = event.noise_multiplier if plain else 0.0
    return event.inner.type, "" if plain else repr(event), event.sampling, multiplier


def _alike(one: Event, other: Event) -> bool:
    """The same kind but for the last digits: scale / sensitivity at another learning rate, say."""
    *kind, noise = _by_noise(one)
    *other_kind, other_noise = _by_noise(other)
    return kind == other_kind and math.isclose(noise, other_noise, rel_tol=1e-12)


def _check_request(kinds: list[Charge], delta: float, group: int, distance: float) -> None:
    if not 0 <= delta < 1:
        raise UsageError(f"delta {delta} must lie in [0, 1): choose well below 1 / (number of records)")
    if group < 1:
        raise UsageError(f"records per user {group}: it must be 1 or more")
    if not distance >= 0:
        raise UsageError(f"distance {distance}: it must be a number, 0 or more")
    if delta == 0 and any(kind.event.inner.type == GAUSSIAN for kind in kinds):
        raise UsageError("delta 0 is impossible with Gaussian noise: allow 1e-5, say, or use Laplace noise")


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


def _hardest(plans: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Plans not dominated by another with as large a rate and as many rounds: epsilon grows with both."""
    unique = set(plans)
    return [p for p in unique if not any(o != p and o[0] >= p[0] and o[1] >= p[1] for o in unique)]


def _first_guess(
    event: Callable[[float], Event], target: float, delta: float, sampling: float, count: int
) -> float:
    pure = Event.of(event(1.0)).pure_epsilon
    if pure is not None:  # the plain sum is always enough
        return pure * count / target * (1 + 1e-12)
    mu = target / math.sqrt(2 * math.log(1.25 / max(delta, 1e-300)) + 2 * target)
    return max(sampling * math.sqrt(count) / mu, 0.5 / math.sqrt(1 + target))


def _least_noise(epsilon_of: Callable[[float], float], target: float, guess: float) -> float:
    """The smallest noise with epsilon <= target, to 1e-3 of epsilon: regula falsi in logarithms."""
    points = {guess: epsilon_of(guess)}
    factor = 1.3
    while min(points.values()) > target:
        noise = max(points) * factor
        if noise > 1e15:
            raise UsageError(
                f"no noise reaches epsilon {target:g}: allow a larger delta, fewer records per user, or use a finer noise grid"
            )
        points[noise] = epsilon_of(noise)
        factor *= factor
    factor = 1.3
    while max(points.values()) <= target * (1 - 1e-3):
        noise = min(points) / factor
        points[noise] = epsilon_of(noise)
        factor *= factor
    for _ in range(100):
        good = min(noise for noise, epsilon in points.items() if epsilon <= target)
        bad = max((noise for noise, epsilon in points.items() if epsilon > target), default=0.0)
        if points[good] >= target * (1 - 1e-3) or good <= bad * (1 + 1e-7):
            break
        noise = _between(bad, points[bad], good, points[good], target * (1 - 5e-4))
        points[noise] = epsilon_of(noise)
    return good


def _between(bad: float, high: float, good: float, low: float, wanted: float) -> float:
    """The noise where the straight line in logarithms meets the wanted epsilon, kept off both ends."""
    share = 0.5
    if low > 0 and math.isfinite(high) and high > low:
        share = math.log(high / wanted) / math.log(high / low)
    share = min(max(share, 0.02), 0.98)
    return float(bad ** (1 - share) * good**share)
