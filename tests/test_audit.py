"""The audit: its statistics, that claims hold, that sabotage and leaks are found, and the float32 leak."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from dpps.cli import audit as command
from dpps.cli import main
from dpps.errors import RunError, UsageError
from dpps.fabric import Stacked
from dpps.keystream import Keystream
from dpps.learning.batches import Poisson
from dpps.mechanisms import Laplace
from dpps.noise import Outgoing, Seeded
from dpps.privacy import inversion
from dpps.privacy.audit import (
    CLAIM,
    Case,
    Joined,
    NoiseNormCase,
    Weakened,
    Wiretap,
    attack,
    audit,
    cases,
    certifiable,
    clopper_pearson,
    epsilon_lower,
    weakened,
)
from dpps.privacy.inversion import invert, picture
from dpps.privacy.units import NodeSwap
from dpps.protocol import DPPS
from dpps.secure import SecureNoise
from dpps.sensitivity import Bounded, Certified, Paper, WorstCase
from dpps.topology import Exponential, Ring

CLAIMS = [c for c in cases() if not c.leaks]
LEAKS = [c for c in cases() if c.leaks]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _name(value: object) -> str:
    return f"{value.name}-{value.kind}" if isinstance(value, Case) else str(value)


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


# The claims


@pytest.mark.parametrize("secure", [False, True], ids=["seeded", "secure"])
@pytest.mark.parametrize("case", CLAIMS, ids=_name)
def test_claims_hold_and_their_twins_are_caught(case: Case, secure: bool) -> None:
    finding = audit(case, trials=5_000, seed=1, secure_noise=secure)
    assert finding.twin is not None
    assert 0.3 < finding.bound.epsilon <= CLAIM < finding.twin.epsilon
    assert finding.verdict == "holds"


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True], ids=["seeded", "secure"])
@pytest.mark.parametrize("case", CLAIMS, ids=_name)
def test_claims_hold_with_100000_a_side(case: Case, secure: bool) -> None:
    finding = audit(case, trials=100_000, seed=1, secure_noise=secure)
    assert finding.twin is not None
    assert 0.8 < finding.bound.epsilon <= CLAIM
    assert finding.twin.epsilon > 1.3


@pytest.mark.parametrize("case", [c for c in LEAKS if isinstance(c, NoiseNormCase)], ids=_name)
def test_noise_norms_in_the_scalar_give_the_sender_away(case: Case) -> None:
    bound = attack(case, Seeded, 500, seed=1)
    assert (bound.hits, bound.false) == (500, 0)
    assert bound.epsilon > 4


@pytest.mark.parametrize("sensitivity", [Paper(0.78, 0.55), WorstCase()])
@pytest.mark.parametrize("noise", [Seeded, lambda _: SecureNoise()], ids=["seeded", "secure"])
def test_every_pick_is_right_at_a_nominal_epsilon_of_a_twentieth(sensitivity, noise) -> None:
    case = NoiseNormCase(NodeSwap(epsilon=0.05, sensitivity=sensitivity), "node-swap", "leak", claim=0.05)
    zero, one = case.scores(200, noise, 5)
    assert (zero > 0).all()
    assert (one < 0).all()


def test_rounds_of_node_swap_cost_more_than_their_sum() -> None:
    carried = next(c for c in LEAKS if not isinstance(c, NoiseNormCase))
    finding = audit(carried, secure_noise=True)
    assert finding.bound.epsilon > 1.03
    assert finding.verdict == "leaks, as documented"


def test_certified_broadcasts_the_same_scalars_whatever_the_noise_and_paper_does_not() -> None:
    rows = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]).repeat(3, 1)

    def two_rounds(sensitivity) -> None:
        protocol = DPPS(Exponential(2), Laplace(0.5), sensitivity, noise=Seeded(1), fabric=Wiretap(2, 3))
        state = protocol.start(torch.zeros(6, 2))
        protocol.step(state, rows)
        protocol.step(state, rows)

    two_rounds(Certified())
    for leaking in (Paper(0.78, 0.55), WorstCase()):
        with pytest.raises(RunError, match="scalars differ"):
            two_rounds(leaking)


# Errors elsewhere than in the noise are found too


def test_a_clip_that_is_not_enforced_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bounded, "admit", lambda self, eps, norms, rate: (eps, norms))
    assert attack(CLAIMS[0], Seeded, 2_000, seed=1).epsilon > CLAIM


def test_a_sensitivity_of_half_the_size_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bounded, "estimate", lambda self, memory, look: self.distance / 2)
    assert attack(CLAIMS[1], Seeded, 5_000, seed=1).epsilon > CLAIM


def test_batches_that_are_not_sampled_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Poisson, "_joins", lambda self, row, round_, n, q: np.ones(n, dtype=bool))
    assert attack(CLAIMS[2], Seeded, 5_000, seed=1).epsilon > CLAIM


# The instruments


def test_networks_side_by_side_are_what_they_are_alone() -> None:
    weights = Ring(3).weights(0)
    x, a = torch.randn(12, 5), torch.ones(12, 1)
    together = Wiretap(3, 4).mix(weights, x, a)
    for k in range(4):
        part = slice(3 * k, 3 * k + 3)
        alone = Stacked(3).mix(weights, x[part], a[part])
        assert all(torch.equal(t[part], o) for t, o in zip(together, alone, strict=True))


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


# Floating point


def _released(source, x: float, count: int) -> np.ndarray:
    """Messages of scale 1 for a row of x, in node-swap (the whole row is hidden)."""
    s = torch.full((1, count), x)
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
        s = torch.full((1, 50_000), x, dtype=torch.float64)
        out = Outgoing(s, torch.zeros_like(s), s.clone(), [0], 0, base_is_public=False)
        source.release(Laplace(1.0), 1.0, out)
        whole = out.half[0].numpy() / step
        assert np.array_equal(whole, np.rint(whole))
        other = whole - (1 - x) / step  # the noise that the other input would have needed
        assert np.array_equal(other, np.rint(other))
        assert np.abs(other).max() < 2.0**62  # where the sampler cuts


# The command


def test_command_prints_a_table_and_judges(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--unit", "contribution", "--samples", "5000", "--epsilon", "5000"]) == 0
    text = capsys.readouterr().out
    assert text.count("holds") == 4
    assert text.count("caught") >= 4
    assert "beyond testing" in text


def test_command_for_programs_and_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = [replace(c, leak_trials=300) if c.leaks else c for c in cases()]
    monkeypatch.setattr(command, "cases", lambda: quick)
    assert main(["audit", "--sensitivity", "paper", "--json", "--no-secure-noise"]) == 0
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["verdict"] == "leaks, as documented"
    assert finding["epsilon_lower"] > 3
    monkeypatch.setattr(Bounded, "admit", lambda self, eps, norms, rate: (eps, norms))
    assert main(["audit", "--unit", "contribution", "--samples", "2000", "--no-secure-noise", "--json"]) == 1
    assert "VIOLATED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--samples", "10"], "1000 or more"),
        (["--plot", "x.png"], "--attack"),
        (["--unit", "record", "--sensitivity", "paper"], "leave it out"),
        (["--epsilon", "0"], "above 0"),
    ],
)
def test_command_refuses(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", *options]) == 2
    assert said in capsys.readouterr().err


# The illustration


def test_images_are_read_off_messages_without_noise_and_not_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solved = {"laplace": 0.0629, "gaussian": 0.954}  # what noise_for finds, in seconds
    monkeypatch.setattr(inversion, "noise_for", lambda *given, **_: solved[given[3]])
    images, probes = invert(images=20, seed=3)
    plain, paper, contribution, record = probes
    assert plain.correlation > 0.999
    assert plain.identified == 20
    assert paper.correlation > 0.6  # the paper's noise blurs the image and does not hide it
    for protected in (contribution, record):
        assert abs(protected.correlation) < 0.2
        assert protected.identified <= 1
    picture(tmp_path / "read.png", images, probes)
    assert (tmp_path / "read.png").stat().st_size > 1_000
    with pytest.raises(UsageError, match="png"):
        picture(tmp_path / "read.txt", images, probes)
    with pytest.raises(UsageError, match="multiple of 10"):
        invert(images=5)
