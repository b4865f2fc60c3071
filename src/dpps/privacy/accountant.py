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
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Decimal
from typing import Literal

from dpps.errors import UsageError, unknown

Mechanism = Literal["laplace", "gaussian", "none"]

NO_PROTECTION = 20.0
"""A total epsilon above this is labelled as no meaningful protection wherever it is printed."""

DeltaToEpsilon = Callable[[float], float]


@dataclass(frozen=True)
class Charge:
    """One kind of round and how often it happened.

    Attributes:
        mechanism: ``laplace``, ``gaussian``, or ``none`` for a round that was sent without noise.
        epsilon: Laplace: L1 sensitivity / scale of the noise, the epsilon of one round. Gaussian: unused (0).
        noise_multiplier: Gaussian: standard deviation / L2 sensitivity. Laplace: unused (0).
        sampling: Poisson rate q; 1 means no amplification.
        count: how many such rounds.
    """

    mechanism: Mechanism
    epsilon: float = 0.0
    noise_multiplier: float = 0.0
    sampling: float = 1.0
    count: int = 1

    def __post_init__(self) -> None:
        if self.mechanism not in ("laplace", "gaussian", "none"):
            raise unknown("mechanism", self.mechanism, ("laplace", "gaussian", "none"))
        if not (self.epsilon >= 0 and self.noise_multiplier >= 0):
            raise UsageError(
                f"epsilon {self.epsilon} and noise multiplier {self.noise_multiplier} must be numbers >= 0"
            )
        if not 0 <= self.sampling <= 1:
            raise UsageError(f"sampling rate {self.sampling} must lie between 0 and 1")
        if self.count < 0:
            raise UsageError(f"count {self.count} must not be negative")

    @property
    def free(self) -> bool:
        """Whether it reveals nothing: it never happened, or nobody was sampled, or the signal is zero."""
        return (
            self.count == 0
            or self.sampling == 0
            or (self.mechanism == "laplace" and self.epsilon == 0)
            or (self.mechanism == "gaussian" and self.noise_multiplier == math.inf)
        )

    @property
    def unprotected(self) -> bool:
        """Whether it reveals everything."""
        return (
            self.mechanism == "none"
            or self.epsilon == math.inf
            or (self.mechanism == "gaussian" and self.noise_multiplier == 0)
        )


@dataclass(frozen=True)
class Total:
    """The guarantee of a composition.

    Attributes:
        epsilon: smallest of the bounds; infinite when there is none.
        delta: the whole allowance it holds at.
        accountant: the bound that won; ``none`` when there is none.
        epsilon_sum: plain sum of the rounds' pure epsilons; None where a Gaussian round has no pure epsilon.
        by_method: every finite bound by its name.
    """

    epsilon: float
    delta: float
    accountant: str
    epsilon_sum: float | None
    by_method: dict[str, float]


def total(
    charges: Iterable[Charge],
    delta: float,
    group: int = 1,
    *,
    spent_delta: float = 0.0,
    distance: float = 0.0,
) -> Total:
    """The (epsilon, delta) guarantee of all charges together: min(sum, RDP, PLD).

    Args:
        charges: what happened, in any order.
        delta: the whole allowance.
        group: how many records one person may own (group privacy).
        spent_delta: part of delta used up elsewhere, such as the failure probability of ``certified``.
        distance: total variation distance between all noise drawn and the noise charged for (samplers are
            truncated, see ``keystream``; a discrete Gaussian is charged as a continuous one). If M' is
            (epsilon, delta')-private and M is within ``distance`` of it on every input, then M is (epsilon,
            delta' + (1 + e^epsilon) distance)-private.
    """
    kinds = _merge(charges)
    _check_request(kinds, delta, group, spent_delta, distance)
    if any(kind.unprotected for kind in kinds):
        return Total(math.inf, delta, "none", _sum(kinds, group), {})
    allowance = delta - spent_delta
    bounds: dict[str, float] = {}
    epsilon_sum = _sum(kinds, group)
    if epsilon_sum is not None:
        bounds["sum"] = _afford(lambda _: epsilon_sum, allowance, distance)
    if allowance > 0 and kinds:
        from dpps.privacy import composition  # dp-accounting takes a second to load

        composition.attempt(
            bounds, "rdp", lambda: _afford(composition.rdp(kinds, group), allowance, distance)
        )
        upper = min(bounds.values(), default=math.inf)
        composition.attempt(
            bounds, "pld", lambda: _afford(composition.pld(kinds, group, upper), allowance, distance)
        )
    finite = {name: value for name, value in bounds.items() if math.isfinite(value)}
    if not finite:
        return Total(math.inf, delta, "none", epsilon_sum, {})
    winner = min(finite, key=lambda name: finite[name])
    return Total(finite[winner], delta, winner, epsilon_sum, finite)


def noise_for(
    target_epsilon: float,
    delta: float,
    rounds: int | Sequence[tuple[float, int]],
    mechanism: Mechanism,
    sampling: float = 1.0,
    group: int = 1,
    *,
    spent_delta: float = 0.0,
    distance: float = 0.0,
) -> float:
    """The least noise whose total over the rounds is at most the target, and at least 0.999 of it.

    Args:
        target_epsilon: wanted total.
        delta: whole allowance, as in :func:`total`.
        rounds: planned number of rounds, or one (sampling rate, rounds) pair for each node: nodes compose in
            parallel, so each of them must keep to the target.
        mechanism: ``laplace`` or ``gaussian``.
        sampling: Poisson rate q when ``rounds`` is a number.
        group: records per person.
        spent_delta: as in :func:`total`.
        distance: as in :func:`total`.

    Returns:
        Laplace: the epsilon of one round (sensitivity / scale). Gaussian: the noise multiplier.
    """
    if mechanism not in ("laplace", "gaussian"):
        raise unknown("mechanism", mechanism, ("laplace", "gaussian"))
    if not 0 < target_epsilon < math.inf:
        raise UsageError(f"epsilon {target_epsilon} must be a positive number: smaller is more private")
    plans = [(sampling, rounds)] if isinstance(rounds, int) else list(rounds)
    if not plans or any(not 0 < q <= 1 or count < 1 for q, count in plans):
        raise UsageError(f"rounds {rounds} at sampling rate {sampling}: give 1 or more, and a rate in (0, 1]")

    def solve(q: float, count: int) -> float:
        def epsilon_of(noise: float) -> float:
            charge = _charge(mechanism, noise, q, count)
            return total([charge], delta, group, spent_delta=spent_delta, distance=distance).epsilon

        return _least_noise(
            epsilon_of, target_epsilon, _first_guess(mechanism, target_epsilon / group, delta, q, count)
        )

    noise = max(solve(q, count) for q, count in _hardest(plans))
    return 1 / noise if mechanism == "laplace" else noise


def label(epsilon: float) -> str:
    """Epsilon for people, rounded up to three digits, with the warning that a useless one deserves."""
    if not math.isfinite(epsilon):
        return "epsilon infinite (no meaningful protection)"
    exact = Decimal(repr(float(epsilon)))
    step = Decimal(1).scaleb(min(0, exact.adjusted() - 2)) if exact else Decimal(1)
    text = f"epsilon {exact.quantize(step, ROUND_CEILING).normalize():f}"
    return f"{text} (no meaningful protection)" if epsilon > NO_PROTECTION else text


def discrete_laplace_epsilon(sensitivity: float, scale: float) -> float:
    """The ``Charge.epsilon`` of discrete Laplace noise, P(k) ∝ exp(-|k|/t), both arguments in grid units.

    By itself the mechanism on integers has pure epsilon m/t, m being the sensitivity, but its privacy loss is
    a little more concentrated on that extreme than continuous Laplace noise. Claim: the shift m of discrete
    noise is dominated by the shift m + 2t ln cosh(1/2t) <= m + 1/(4t) of continuous Laplace noise of scale t,
    so the charge m/t + 1/(4t²) covers every accountant.

    Proof. Likelihood ratios are monotone, so the vertices of the discrete curve (false alarm, power) are the
    threshold tests Z >= k. With r = e^(-1/t): P(Z >= k) = r^k/(1+r) for k >= 1 and 1 - r^(1-k)/(1+r) for k <=
    0. Put c = -t ln((1+r)/2) = 1/2 - t ln cosh(1/2t), in [0, 1/2]. For continuous X: P(X >= k - c) = P(Z >=
    k) for k >= 1 and P(X >= k - 1 + c) = P(Z >= k) for k <= 0. A vertex with k >= 1 and k - m <= 0 has power
    P(Z >= k - m); the continuous shift that reaches it is (k - c) - (k - m - 1 + c) = m + 1 - 2c = m + 2t ln
    cosh(1/2t). When k and k - m lie on the same side, the shift m reaches it. The continuous curve is
    concave, so it lies above the chords between vertices too. Vertices go to vertices, so the argument for
    vectors in the module's docstring holds as well. ∎
    """
    return sensitivity / scale + 1 / (4 * scale * scale)


def discrete_gaussian_multiplier(sigma: float, sensitivity: float) -> float:
    """The ``Charge.noise_multiplier`` of discrete Gaussian noise, both arguments in grid units.

    It is charged as the continuous Gaussian of variance sigma² - 1/12: rounding that one to integers gives
    back the variance 1/12. What remains between the two is :func:`discrete_gaussian_slack`.
    """
    _check_grid(sigma)
    return math.sqrt(sigma * sigma - 1 / 12) / sensitivity


def discrete_gaussian_slack(sigma: float, coordinates: int, rounds: int) -> float:
    """Total variation distance to pass as ``distance`` when discrete Gaussian noise is charged as continuous.

    Z has P(k) ∝ exp(-k²/2σ²) on integers; Y = round(X), X normal with variance s² = σ² - 1/12. Adding Y to
    integers is rounding after adding X, so Y costs what X costs, sampled or not. Claim: for σ >= 64 the
    distance of Z and Y is at most 2B + 2ζ with c = 14, ζ = 3 e^(-c²/2) and B = c²/(288 s⁴) + (c²σ²/(4s⁴) +
    1/(2s²))²/8, about 315/σ⁴.

    Proof. Put w = 1/(2s²), z = k/(2s²). Then P(Y=k) = const · exp(-k²/2s²) I(k), I(k) = ∫ cosh(2zu) exp(-wu²)
    du over |u| <= 1/2. On |k| <= cσ: |z| <= 1/8 and w <= 2⁻¹². Taylor with remainder, using ∫u² = 1/12 and
    ∫u⁴ = 1/80: I = 1 + z²/6 - w/12 + E, |E| <= 1.01 z⁴/24 + z²w/40 + 1.01 w²/160, and |ln I - (I-1)| <=
    (I-1)², so |ln I - z²/6 + w/12| <= (z² + w)²/8. Since -k²/2s² + k²/2σ² = -k²/(24 s²σ²) and z²/6 = k²/(24
    s⁴), the rest is k²/(288 s⁴σ²) <= c²/(288 s⁴): the choice of s cancels the leading term. So
    ln(P(Y=k)/P(Z=k)) is a constant plus at most B either way. Both tails beyond cσ are below ζ (P(|Z| >= cσ)
    <= 2e^(-c²/2), and rounding moves X by 1/2), so the constant is at most B - ln(1-ζ) and the ratio at most
    e^(2B)/(1-ζ); half its distance from 1, plus the tails, is below 2B + 2ζ. Fresh noise is independent of
    all before it, so distances add over coordinates and rounds. ∎
    """
    _check_grid(sigma)
    c, s2 = 14.0, sigma * sigma - 1 / 12
    b = c * c / (288 * s2 * s2) + (c * c * sigma * sigma / (4 * s2 * s2) + 1 / (2 * s2)) ** 2 / 8
    return min(1.0, coordinates * rounds * (2 * b + 6 * math.exp(-c * c / 2)))


def _check_grid(sigma: float) -> None:
    if not sigma >= 64:
        raise UsageError(
            f"discrete Gaussian noise of {sigma} grid steps is too coarse: use a grid of sigma/64 or finer"
        )


def _merge(charges: Iterable[Charge]) -> list[Charge]:
    """Equal kinds added up; kinds that cost nothing left out."""
    counts: Counter[Charge] = Counter()
    for charge in charges:
        if not charge.free:
            counts[replace(charge, count=1)] += charge.count
    return [replace(kind, count=count) for kind, count in counts.items()]


def _check_request(
    kinds: list[Charge], delta: float, group: int, spent_delta: float, distance: float
) -> None:
    if not 0 <= delta < 1:
        raise UsageError(f"delta {delta} must lie in [0, 1): choose well below 1 / (number of records)")
    if group < 1:
        raise UsageError(f"records per user {group} must be 1 or more")
    if not (spent_delta >= 0 and distance >= 0):
        raise UsageError(f"spent delta {spent_delta} and distance {distance} must be numbers >= 0")
    if spent_delta > delta:
        raise UsageError(f"delta {delta} is already spent ({spent_delta} elsewhere): allow a larger delta")
    if delta == 0 and any(kind.mechanism == "gaussian" for kind in kinds):
        raise UsageError("delta 0 is impossible with Gaussian noise: allow 1e-5, say, or use Laplace noise")


def _sum(kinds: list[Charge], group: int) -> float | None:
    """Pure epsilons added up; sampling at rate q turns epsilon into ln(1 + q(e^epsilon - 1))."""
    if any(kind.mechanism == "gaussian" and not kind.unprotected for kind in kinds):
        return None
    return math.fsum(
        math.inf if kind.unprotected else group * kind.count * _amplified(kind.epsilon, kind.sampling)
        for kind in kinds
    )


def _amplified(epsilon: float, sampling: float) -> float:
    if sampling == 1:
        return epsilon
    # ln(1 + q(e^x - 1)) = x + ln(q + (1-q)e^-x): the second form does not overflow.
    return (
        math.log1p(sampling * math.expm1(epsilon))
        if epsilon < 1
        else epsilon + math.log(sampling + (1 - sampling) * math.exp(-epsilon))
    )


def _afford(epsilon_at: DeltaToEpsilon, delta: float, distance: float) -> float:
    """Epsilon after paying (1 + e^epsilon) distance out of delta."""
    if distance == 0:
        return epsilon_at(delta)
    # epsilon(delta/2) is an upper bound of the answer as long as the price stays below delta/2.
    upper = epsilon_at(delta / 2)
    price = (1 + math.exp(upper)) * distance if upper < 700 else math.inf
    return epsilon_at(delta - price) if price <= delta / 2 else math.inf


def _charge(mechanism: Mechanism, noise: float, sampling: float, count: int) -> Charge:
    if mechanism == "laplace":
        return Charge("laplace", epsilon=1 / noise, sampling=sampling, count=count)
    return Charge("gaussian", noise_multiplier=noise, sampling=sampling, count=count)


def _hardest(plans: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Plans not dominated by another with as large a rate and as many rounds: epsilon grows with both."""
    unique = set(plans)
    return [p for p in unique if not any(o != p and o[0] >= p[0] and o[1] >= p[1] for o in unique)]


def _first_guess(mechanism: Mechanism, target: float, delta: float, sampling: float, count: int) -> float:
    if mechanism == "laplace":  # the plain sum is always enough
        return count / target * (1 + 1e-12)
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
                f"no noise reaches epsilon {target}: allow a larger delta or use a finer noise grid"
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
