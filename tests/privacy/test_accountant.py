"""The accountant: published values, limits, refusals, and the proofs of its discrete charges as numbers."""

import math
from collections.abc import Callable, Iterator

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_ndtr
from scipy.stats import norm

from dpps.errors import UsageError
from dpps.noise import events
from dpps.noise.sampler import discrete_gaussian_slack
from dpps.privacy import Charge, accountant, label, noise_for, total
from dpps.privacy.accountant import _bounds

LAPLACE = Charge.laplace(epsilon=0.1, count=720)
GAUSSIAN = Charge.gaussian(noise_multiplier=10.0, count=720)
SAMPLED = Charge.gaussian(noise_multiplier=1.01, sampling=1 / 60, count=720)


@pytest.mark.parametrize(
    ("charge", "expected"),
    [
        (LAPLACE, {"sum": 72.0, "rdp": 15.06, "pld": 14.09}),
        (GAUSSIAN, {"rdp": 15.45, "pld": 14.45}),
        (SAMPLED, {"rdp": 2.99, "pld": 2.66}),
    ],
)
def test_known_values(charge: Charge, expected: dict[str, float]) -> None:
    result = total([charge], 1e-5)
    assert result.by_method == pytest.approx(expected, abs=0.006)
    assert result.accountant == "pld"
    assert result.epsilon == result.by_method["pld"]
    assert result.epsilon_sum == (pytest.approx(72) if charge is LAPLACE else None)


def test_sampled_total_agrees_with_an_independent_call() -> None:
    independent = PLDAccountant()
    event = dp_accounting.PoissonSampledDpEvent(1 / 60, dp_accounting.GaussianDpEvent(1.01))
    independent.compose(event, 720)
    assert total([SAMPLED], 1e-5).epsilon == pytest.approx(independent.get_epsilon(1e-5), rel=2e-4)


def test_order_and_splitting_of_charges_do_not_matter() -> None:
    half = Charge.laplace(epsilon=0.1, count=360)
    assert total([half, GAUSSIAN, half], 1e-5) == total([LAPLACE, GAUSSIAN], 1e-5)


def test_huge_laplace_falls_back_on_the_sum_and_is_not_private() -> None:
    result = total([Charge.laplace(epsilon=1000, count=180)], 1e-5)
    assert "pld" not in result.by_method
    assert result.epsilon_sum == 180_000
    assert 179_000 < result.epsilon <= 180_000


def test_rdp_is_capped_by_the_sum() -> None:
    result = total([Charge.laplace(epsilon=0.5)], 1e-12)
    assert result.by_method["rdp"] > 0.5
    assert result.epsilon <= 0.5


def test_many_scales_stay_an_upper_bound_and_below_rdp() -> None:
    scales = [Charge.laplace(epsilon=0.1 + i * 1e-4) for i in range(300)]
    result = total(scales, 1e-5)
    least = total([Charge.laplace(epsilon=0.1, count=300)], 1e-5).epsilon
    most = total([Charge.laplace(epsilon=0.13, count=300)], 1e-5).epsilon
    assert least < result.by_method["pld"] < min(most, result.by_method["rdp"])


def test_delta_zero_is_the_plain_sum() -> None:
    result = total([LAPLACE], 0.0)
    assert (result.epsilon, result.accountant) == (pytest.approx(72), "sum")


def test_sampled_laplace_has_an_amplified_sum() -> None:
    charge = Charge.laplace(epsilon=2.0, sampling=0.1, count=3)
    assert total([charge], 0.0).epsilon == pytest.approx(3 * math.log(1 + 0.1 * math.expm1(2.0)))
    assert total([charge], 1e-5).epsilon < total([charge], 0.0).epsilon
    assert events.sampled(0.5, events.laplace(1 / 900)).pure_epsilon == pytest.approx(900 + math.log(0.5))


@pytest.mark.parametrize(
    "charge",
    [
        Charge(events.non_private(), 1),
        Charge.gaussian(noise_multiplier=0.0),
        Charge.laplace(epsilon=math.inf),
    ],
)
def test_no_noise_is_no_privacy(charge: Charge) -> None:
    result = total([LAPLACE, charge], 1e-5)
    assert result.epsilon == math.inf
    assert result.by_method == {}


def test_nothing_sent_costs_nothing() -> None:
    free = [Charge(events.non_private(), 0), Charge.laplace(epsilon=1, sampling=0.0)]
    assert total(free, 1e-5).epsilon == 0
    assert total([], 0.0).epsilon == 0


@pytest.fixture
def nothing_kept() -> Iterator[None]:
    """Bounds that were computed before or with a broken accountant are not answers."""
    _bounds.cache_clear()
    yield
    _bounds.cache_clear()


@pytest.mark.usefixtures("nothing_kept")
def test_failing_accountants_never_read_as_private(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> object:
        raise IndexError("broken")

    monkeypatch.setattr(accountant, "_pld", broken)
    assert total([GAUSSIAN], 1e-5).accountant == "rdp"
    for nonsense in (math.nan, math.inf, -1.0):
        monkeypatch.setattr(accountant, "_rdp", lambda *_, value=nonsense: lambda _delta: value)
        _bounds.cache_clear()
        assert total([GAUSSIAN], 1e-5).epsilon == math.inf
        assert total([LAPLACE], 1e-5).epsilon == pytest.approx(72)


@settings(deadline=None, max_examples=20)
@given(
    st.floats(0.01, 5.0),
    st.integers(1, 500),
    st.sampled_from([events.laplace, events.gaussian]),
    st.floats(1e-9, 1e-3),
)
def test_more_rounds_or_less_noise_or_less_delta_cost_more(
    noise: float, count: int, mechanism: Callable[[float], events.Event], delta: float
) -> None:
    def cost(scale: float, times: int, allowance: float) -> float:
        return total([Charge(mechanism(scale), times)], allowance).epsilon

    base = cost(noise, count, delta)
    slack = 1 - 1e-3  # the grid of the privacy loss
    assert cost(noise, count + 1, delta) >= base * slack
    assert cost(noise / 1.1, count, delta) >= base * slack
    assert cost(noise, count, delta / 10) >= base * slack


def test_groups() -> None:
    tripled = Charge.laplace(0.3, count=720)
    assert total([LAPLACE], 1e-5, 3).epsilon == pytest.approx(total([tripled], 1e-5).epsilon)
    tripled = Charge.gaussian(noise_multiplier=10 / 3, count=720)
    assert total([GAUSSIAN], 1e-5, 3).epsilon == pytest.approx(total([tripled], 1e-5).epsilon)
    alone, pair = total([SAMPLED], 1e-5), total([SAMPLED], 1e-5, 2)
    # Two records together cost more than twice one of them at the same delta, and the exact mixture
    # is tighter than converting the guarantee of one.
    assert 2 * alone.epsilon < pair.by_method["pld"] < pair.by_method["rdp"]


def test_many_gaussian_rounds_are_one_of_less_noise() -> None:
    many, one = (total([charge], 1e-5) for charge in (Charge.gaussian(4.0, count=16), Charge.gaussian(1.0)))
    assert many.epsilon == pytest.approx(one.epsilon, rel=1e-9)


def test_distance_costs_delta() -> None:
    half = total([SAMPLED], 5e-6).epsilon
    paid = total([SAMPLED], 1e-5, distance=1e-8).epsilon
    price = (1 + math.exp(half)) * 1e-8
    assert paid == pytest.approx(total([SAMPLED], 1e-5 - price).epsilon)
    assert total([SAMPLED], 1e-5, distance=1e-5).epsilon == math.inf


@pytest.mark.parametrize(
    ("mechanism", "sampling", "group", "target", "delta"),
    [
        (events.laplace, 1.0, 1, 8.0, 1e-5),
        (events.laplace, 1.0, 2, 1e5, 1e-5),
        (events.laplace, 1.0, 1, 3.0, 0.0),
        (events.gaussian, 1.0, 1, 8.0, 1e-5),
        (events.gaussian, 1.0, 3, 0.05, 1e-5),
        (events.gaussian, 1 / 60, 1, 3.0, 1e-5),
        (events.gaussian, 1 / 60, 1, 0.1, 1e-6),
    ],
)
def test_calibration_is_safe_and_tight(
    mechanism: Callable[[float], events.Event], sampling: float, group: int, target: float, delta: float
) -> None:
    noise = noise_for(target, delta, 720, mechanism, sampling, group)
    reached = total([Charge(events.sampled(sampling, mechanism(noise)), 720)], delta, group).epsilon
    assert target * (1 - 1e-3) <= reached <= target


@settings(deadline=None, max_examples=100)
@given(
    st.floats(0.01, 200.0),
    st.integers(1, 5000),
    st.sampled_from([(events.laplace, 0.0), (events.gaussian, 1e-6)]),
)
def test_calibration_is_safe_and_tight_wherever_it_starts(
    target: float, rounds: int, kind: tuple[Callable[[float], events.Event], float]
) -> None:
    """Where epsilon is quick to compute: the plain sum, and one Gaussian in closed form."""
    mechanism, delta = kind
    noise = noise_for(target, delta, rounds, mechanism)
    assert target * (1 - 1e-3) <= total([Charge(mechanism(noise), rounds)], delta).epsilon <= target


@pytest.mark.parametrize(
    "call",
    [
        lambda: total([GAUSSIAN], 0.0),
        lambda: total([LAPLACE], 1.0),
        lambda: total([LAPLACE], math.nan),
        lambda: total([LAPLACE], 1e-5, 0),
        lambda: total([LAPLACE], 1e-5, distance=math.nan),
        lambda: Charge.laplace(epsilon=-1),
        lambda: Charge.laplace(epsilon=math.nan),
        lambda: Charge.gaussian(noise_multiplier=1, sampling=1.5),
        lambda: Charge.gaussian(noise_multiplier=1, count=-1),
        lambda: events.Event.of("laplas"),  # type: ignore[arg-type]
        lambda: noise_for(0.0, 1e-5, 10, events.laplace),
        lambda: noise_for(math.inf, 1e-5, 10, events.laplace),
        lambda: noise_for(1.0, 1e-5, 0, events.laplace),
        lambda: noise_for(1.0, 1e-5, 10, events.laplace, sampling=0.0),
        lambda: noise_for(1.0, 0.0, 10, events.gaussian),
        lambda: noise_for(1.0, 1e-5, 10, lambda _: events.non_private()),
        lambda: discrete_gaussian_slack(10.0, 1, 1),
    ],
)
def test_wrong_requests_are_refused(call: object) -> None:
    with pytest.raises(UsageError):
        call()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("epsilon", "text"),
    [
        (2.98, "epsilon 2.98"),
        (2.9801, "epsilon 2.99"),
        (0.1, "epsilon 0.1"),
        (0.0, "epsilon 0"),
        (0.00012345, "epsilon 0.000124"),
        (20.0, "epsilon 20"),
        (20.01, "epsilon 20.1 (no meaningful protection)"),
        (180000, "epsilon 180000 (no meaningful protection)"),
        (math.inf, "epsilon infinite (no meaningful protection)"),
    ],
)
def test_label(epsilon: float, text: str) -> None:
    assert label(epsilon) == text


def _discrete_laplace_deltas(t: float, shift: int, epsilons: np.ndarray) -> np.ndarray:
    k = np.arange(-int(60 * t), int(60 * t) + shift + 1)
    p, q = (np.tanh(1 / (2 * t)) * np.exp(-np.abs(k - c) / t) for c in (0, shift))
    return np.array([np.maximum(p - math.exp(e) * q, 0).sum() for e in epsilons])


def _laplace_deltas(epsilon: float, epsilons: np.ndarray) -> np.ndarray:
    return np.maximum(-np.expm1((epsilons - epsilon) / 2), 0.0)


@pytest.mark.parametrize(("t", "shift"), [(0.7, 1), (3.0, 1), (3.0, 5), (20.0, 7), (50.0, 200)])
def test_discrete_laplace_is_dominated_by_its_charge_only(t: float, shift: int) -> None:
    charge = shift / t + 1 / (4 * t * t)  # see SecureNoise.discreteness
    epsilons = np.linspace(0, charge, 400)
    real = _discrete_laplace_deltas(t, shift, epsilons)
    assert np.all(real <= _laplace_deltas(charge, epsilons) + 1e-12)
    # The naive charge shift/t is not enough, so the extra term is needed.
    assert np.any(real > _laplace_deltas(shift / t, epsilons) + 1e-12)


@pytest.mark.parametrize("sigma", [64.0, 100.3, 300.0])
def test_discrete_gaussian_slack_bounds_the_real_distance(sigma: float) -> None:
    k = np.arange(-int(13 * sigma), int(13 * sigma) + 1)
    weights = np.exp(-(k**2) / (2 * sigma**2))
    s = math.sqrt(sigma**2 - 1 / 12)
    upper, lower = -np.abs(k) + 0.5, -np.abs(k) - 0.5
    rounded = norm.cdf(upper / s) - norm.cdf(lower / s)
    distance = 0.5 * np.abs(rounded - weights / weights.sum()).sum()
    slack = discrete_gaussian_slack(sigma, 1, 1)
    assert distance <= slack
    # Charged as if it had the variance sigma², it would be farther away than the slack allows.
    naive = norm.cdf(upper / sigma) - norm.cdf(lower / sigma)
    if sigma >= 300:
        assert 0.5 * np.abs(naive - weights / weights.sum()).sum() > slack
    assert discrete_gaussian_slack(sigma, 10, 7) == pytest.approx(70 * slack)


@pytest.mark.parametrize("sigma", [64.0, 1000.0])
def test_discrete_gaussian_log_ratio_is_within_the_proof(sigma: float) -> None:
    """ln(P(Y=k)/P(Z=k)) is constant to the B of the proof, as far as doubles can see it."""
    s = math.sqrt(sigma**2 - 1 / 12)
    k = np.arange(0, int(13 * sigma))
    high, low = log_ndtr(-(k - 0.5) / s), log_ndtr(-(k + 0.5) / s)
    ratio = high + np.log(-np.expm1(low - high)) + k**2 / (2 * sigma**2)
    b = discrete_gaussian_slack(sigma, 1, 1) / 2
    assert np.ptp(ratio) <= 2 * b + 1e-9


def test_fine_grid_makes_the_distance_negligible() -> None:
    distance = discrete_gaussian_slack(2.0**24, 100_000, 720)
    assert distance < 1e-17
    assert total([SAMPLED], 1e-5, distance=distance).epsilon == pytest.approx(total([SAMPLED], 1e-5).epsilon)


@pytest.mark.parametrize(("q", "noise", "rounds"), [(1 / 60, 1.01, 720), (0.5, 30.0, 3), (0.01, 0.7, 5000)])
def test_few_renyi_orders_find_what_all_of_them_find(q: float, noise: float, rounds: int) -> None:
    every = RdpAccountant()
    gaussian = dp_accounting.GaussianDpEvent(noise)
    every.compose(dp_accounting.PoissonSampledDpEvent(q, gaussian), rounds)
    found = total([Charge.gaussian(noise_multiplier=noise, sampling=q, count=rounds)], 1e-5)
    assert found.by_method["rdp"] == every.get_epsilon(1e-5)
