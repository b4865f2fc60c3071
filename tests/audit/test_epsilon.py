"""The audit: claims hold, sabotage and leaks are found; its statistics and instruments are right."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from torch import nn

from dpps.audit import (
    CLAIM,
    Case,
    Wiretap,
    attack,
    audit,
    cases,
    certifiable,
    clopper_pearson,
    epsilon_lower,
    weakened,
)
from dpps.audit.epsilon import (
    CarriedCase,
    Joined,
    LocalRecordCase,
    NoiseNormCase,
    PEDFLCase,
    StatisticsCase,
    Weakened,
    calibration,
)
from dpps.errors import RunError
from dpps.learning import Poisson
from dpps.noise import Keystream, Laplace, Outgoing, SecureNoise, Seeded
from dpps.privacy import NodeSwap
from dpps.protocol import DPPS
from dpps.sensitivity import Bounded, Certified, Paper, WorstCase
from dpps.topology import Exponential, Ring
from dpps.transport import Exchange, Stacked

CLAIMS = [c for c in cases() if not c.leaks]
CARRIED = next(c for c in cases() if isinstance(c, CarriedCase))
LOCAL_RECORD = next(c for c in CLAIMS if isinstance(c, LocalRecordCase))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def claim(unit: str, kind: str) -> Case:
    return next(c for c in CLAIMS if (c.name, c.kind) == (unit, kind))


def _name(value: object) -> str:
    return f"{value.name}-{value.kind}" if isinstance(value, Case) else str(value)


@pytest.mark.parametrize("secure", [False, True], ids=["seeded", "secure"])
@pytest.mark.parametrize("case", CLAIMS, ids=_name)
def test_claims_hold_and_their_twins_are_caught(case: Case, secure: bool) -> None:
    trials = 10_000 if isinstance(case, PEDFLCase) else 5_000  # its first message tells nothing
    finding = audit(case, trials=trials, seed=1, secure_noise=secure)
    assert finding.twin is not None
    assert 0.3 < finding.bound.epsilon <= CLAIM < finding.twin.epsilon
    assert finding.verdict == "holds"


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True], ids=["seeded", "secure"])
@pytest.mark.parametrize("case", CLAIMS, ids=_name)
def test_claims_hold_with_100000_a_side(case: Case, secure: bool) -> None:
    finding = audit(case, trials=100_000, seed=1, secure_noise=secure)
    assert finding.twin is not None
    assert 0.75 < finding.bound.epsilon <= CLAIM  # of PEDFL, eleven of twelve messages tell
    assert finding.twin.epsilon > 1.3


def test_rounds_of_node_swap_cost_more_than_their_sum() -> None:
    finding = audit(CARRIED, secure_noise=True)
    assert finding.verdict.startswith("leaks")
    assert finding.bound.epsilon > 1.03


# Errors elsewhere than in the noise are found too


def test_a_clip_that_is_not_enforced_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bounded, "admit", lambda self, eps, norms, rate: (eps, norms))
    assert attack(claim("contribution", "laplace"), Seeded, 2_000, seed=1).epsilon > CLAIM


def test_a_sensitivity_of_half_the_size_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bounded, "estimate", lambda self, memory, look: self.distance / 2)
    assert attack(claim("contribution", "gaussian"), Seeded, 5_000, seed=1).epsilon > CLAIM


def test_batches_that_are_not_sampled_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Poisson, "_joins", lambda self, row, round_, n, q: np.ones(n, dtype=bool))
    assert attack(claim("record", "gaussian"), Seeded, 5_000, seed=1).epsilon > CLAIM


def test_a_local_part_without_noise_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Seeded):
        def release(self, mechanism, scale, out):
            return torch.zeros(len(out.nodes), dtype=torch.float64)

    monkeypatch.setattr(Seeded, "for_local_part", lambda self: Silent(self.seed))
    assert attack(LOCAL_RECORD, Seeded, 2_000, seed=1).epsilon > CLAIM


def test_a_second_gossip_step_that_adds_the_update_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What leaves after the first step must be made of messages alone."""
    collect = Wiretap.collect

    def once_more(self, seconds=None):
        arrived = collect(self, seconds)
        arrived.s[0::2, 0] += 1e-3
        self.received[-1] = self.received[-1].clone()
        self.received[-1][0::2, 0] -= 1e-3
        return arrived

    monkeypatch.setattr(Wiretap, "collect", once_more)
    for unit, mechanism in (("contribution", "laplace"), ("record", "gaussian")):
        case = claim(unit, f"{mechanism}, synchronised, 2 gossip steps")
        assert attack(case, Seeded, 1_000, seed=1).epsilon > 4


def test_noise_for_one_record_is_caught_where_a_person_owns_two(monkeypatch: pytest.MonkeyPatch) -> None:
    for_one = lambda unit, *given: calibration(replace(unit, records_per_user=1), *given)  # noqa: E731
    monkeypatch.setattr("dpps.audit.epsilon.calibration", for_one)
    person = next(c for c in CLAIMS if c.unit.records_per_user == 2)
    assert attack(person, Seeded, 2_000, seed=1).epsilon > CLAIM


def test_an_update_of_pedfl_that_is_not_clipped_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpps.learning.algorithms.clip_rows", lambda rows, clip: rows)
    monkeypatch.setattr(Bounded, "admit", lambda self, eps, norms, rate: (eps, norms))
    assert attack(claim("contribution", "gaussian, PEDFL"), Seeded, 1_000, seed=1).epsilon > CLAIM


# Floating point


def _released(source, x: float, count: int, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """Messages of scale 1 for a row of x, in node-swap (the whole row is hidden)."""
    s = torch.full((1, count), x, dtype=dtype)
    out = Outgoing(s, torch.zeros_like(s), s.clone(), [0], 0, base_is_public=False)
    source.release(Laplace(1.0), 1.0, out)
    return out.half[0].numpy()


def test_float32_laplace_separates_0_from_1() -> None:
    """At epsilon 1: numpy's float32 uniform numbers are k / 2^24, so everything that x=1 can give is listed."""
    everything = torch.arange(1 << 24, dtype=torch.float32).div_(1 << 24)
    possible = np.unique((1 + Laplace(1.0).shape(everything)).numpy())
    assert np.isin(_released(Seeded(1), 1.0, 100_000), possible).all()
    impossible = 1 - np.isin(_released(Seeded(2), 0.0, 200_000), possible).mean()
    assert impossible > 0.25


def test_grid_noise_does_not() -> None:
    """Every whole number of steps can come from either input: the supports are equal, before and after rounding to float32."""
    source = SecureNoise()
    step = source.grid(1.0)
    for x in (0.0, 1.0):
        whole = _released(source, x, 50_000, torch.float64) / step
        assert np.array_equal(whole, np.rint(whole))
        other = whole - (1 - x) / step  # the noise that the other input would have needed
        assert np.array_equal(other, np.rint(other))
        assert np.abs(other).max() < 2.0**62  # where the sampler cuts


# What only those find who look for it


@pytest.mark.parametrize("sensitivity", [Paper(0.78, 0.55), WorstCase()])
@pytest.mark.parametrize("noise", [Seeded, lambda _: SecureNoise()], ids=["seeded", "secure"])
def test_every_pick_is_right_at_a_nominal_epsilon_of_a_twentieth(sensitivity, noise) -> None:
    case = NoiseNormCase(NodeSwap(epsilon=0.05, sensitivity=sensitivity), "leak")
    zero, one = case.scores(200, noise, 5)
    assert (zero > 0).all()
    assert (one < 0).all()


def test_models_that_are_no_chain_of_layers_give_the_observer_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The local part is audited in a chain, whose gradients are computed for all networks at once."""

    class WeightAndBias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.zeros(1, 2)), nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight, self.bias)

    chain = LOCAL_RECORD.scores(20, Seeded, 3)
    monkeypatch.setattr(type(LOCAL_RECORD), "_model", lambda _: (WeightAndBias(), ["weight"]))
    other = LOCAL_RECORD.scores(20, Seeded, 3)
    np.testing.assert_allclose(chain, other, atol=1e-5)


# Statistics


@pytest.mark.parametrize(("hits", "trials"), [(0, 50), (1, 50), (17, 50), (50, 50), (25_000, 100_000)])
def test_clopper_pearson_is_the_exact_interval(hits: int, trials: int) -> None:
    exact = binomtest(hits, trials).proportion_ci(0.98, method="exact")
    assert clopper_pearson(hits, trials, 0.01) == pytest.approx((exact.low, exact.high), rel=1e-9, abs=1e-12)


def test_epsilon_lower_by_hand() -> None:
    low, high = clopper_pearson(300, 1000, 5e-4)[0], clopper_pearson(100, 1000, 5e-4)[1]
    assert epsilon_lower(300, 100, 1000, 0.05, 1e-3) == pytest.approx(math.log((low - 0.05) / high))
    assert epsilon_lower(100, 300, 1000) == 0
    assert epsilon_lower(30, 0, 1000, delta=0.05) == 0
    assert certifiable(100_000) == pytest.approx(math.log(1e5 / math.log(2000)), abs=0.01)


def test_bound_of_textbook_laplace_is_below_and_near_its_epsilon() -> None:
    rng, n = np.random.default_rng(3), 100_000
    zero, one = (int((x + rng.laplace(size=n) >= 1).sum()) for x in (1.0, 0.0))
    assert 0.95 < epsilon_lower(zero, one, n) < 1


def test_bounds_are_too_high_as_rarely_as_promised() -> None:
    rng, n = np.random.default_rng(4), 2_000
    zero, one = rng.binomial(n, 0.5, 2_000), rng.binomial(n, 0.5 / math.e, 2_000)
    too_high = sum(epsilon_lower(int(a), int(b), n, alpha=0.1) > 1 for a, b in zip(zero, one, strict=True))
    assert too_high / 2_000 < 0.1


# Instruments


def test_certified_broadcasts_the_same_scalars_whatever_the_noise_and_paper_does_not() -> None:
    rows = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]).repeat(3, 1)

    def two_rounds(sensitivity) -> None:
        protocol = DPPS(Exponential(2), Laplace(0.5), sensitivity, noise=Seeded(1), fabric=Wiretap(2, 3))
        state = protocol.start(torch.zeros(6, 2))
        protocol.step(state, rows)
        protocol.step(state, rows)

    two_rounds(Certified())
    for leaking in (Paper(0.78, 0.55), WorstCase()):
        with pytest.raises(RunError, match="copies=1"):
            two_rounds(leaking)


def test_networks_side_by_side_are_what_they_are_alone() -> None:
    weights = Ring(3).weights(0)
    x, a = torch.randn(12, 5), torch.ones(12, 1)
    together = Wiretap(3, 4).mix(weights, x, a)
    for k in range(4):
        part = slice(3 * k, 3 * k + 3)
        alone = Stacked(3).mix(weights, x[part], a[part])
        assert all(torch.equal(t[part], o) for t, o in zip(together, alone, strict=True))


def test_networks_side_by_side_synchronise_each_for_itself() -> None:
    wire, x, a = Wiretap(3, 4), torch.randn(12, 5), torch.ones(12, dtype=torch.float64)
    wire.push(Exchange(0, None), x, a, {})
    means = x.view(4, 3, 5).mean(1).repeat_interleave(3, 0)
    torch.testing.assert_close(wire.collect().s, means)
    assert torch.equal(wire.messages[0], x)


def test_the_twin_has_two_thirds_of_the_noise() -> None:
    def noise(source) -> torch.Tensor:
        s = torch.zeros(1, 4, dtype=torch.float64)
        out = Outgoing(s, s, s.clone(), [0], 0, base_is_public=True)
        source.release(Laplace(1.0), 3.0, out)
        return out.half

    assert torch.allclose(noise(weakened(Seeded)(7)) * 1.5, noise(Seeded(7)), rtol=1e-12)
    assert not Weakened(SecureNoise()).private


def test_joined_rows_are_one_long_row() -> None:
    key = bytes(range(32))

    def outgoing(rows: int) -> Outgoing:
        x = torch.arange(6.0).view(rows, -1)
        return Outgoing(x, x / 7, x + x / 7, range(rows), 0, base_is_public=True)

    joined, long = outgoing(3), outgoing(1)
    norms = Joined(Keystream(key)).release(Laplace(1.0), 2.0, joined)
    SecureNoise(Keystream(key)).release(Laplace(1.0), 2.0, long)
    assert torch.equal(joined.half.view(1, -1), long.half)
    assert norms.isnan().all()


@pytest.mark.parametrize(("enlarged", "caught"), [(1.0, False), (math.sqrt(2), True)])
def test_a_question_whose_bound_is_off_is_caught(enlarged: float, caught: bool) -> None:
    statistics = next(c for c in CLAIMS if isinstance(c, StatisticsCase))
    case = replace(statistics, questions=("mean(x, weight=10)", "count()"), enlarged=enlarged)
    assert (attack(case, Seeded, 6000, seed=1).epsilon > CLAIM) is caught
