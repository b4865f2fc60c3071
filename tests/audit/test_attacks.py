"""The audit: claims hold, sabotage and leaks are found, and the float32 leak."""

import numpy as np
import pytest
import torch

from dpps.audit import CLAIM, Case, LocalRecordCase, NoiseNormCase, attack, audit
from dpps.audit.cases import cases
from dpps.learning import Poisson
from dpps.noise import Laplace, Outgoing, SecureNoise, Seeded
from dpps.sensitivity import Bounded

CLAIMS = [c for c in cases() if not c.leaks]
LEAKS = [c for c in cases() if c.leaks]
LOCAL_RECORD = next(c for c in CLAIMS if isinstance(c, LocalRecordCase))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _name(value: object) -> str:
    return f"{value.name}-{value.kind}" if isinstance(value, Case) else str(value)


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


def test_rounds_of_node_swap_cost_more_than_their_sum() -> None:
    carried = next(c for c in LEAKS if not isinstance(c, NoiseNormCase))
    finding = audit(carried, secure_noise=True)
    assert finding.verdict.startswith("leaks")
    assert finding.bound.epsilon > 1.03


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


def test_a_local_part_without_noise_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Seeded):
        def release(self, mechanism, scale, out):
            return torch.zeros(len(out.nodes), dtype=torch.float64)

    monkeypatch.setattr(Seeded, "for_local_part", lambda self: Silent(self.seed))
    assert attack(LOCAL_RECORD, Seeded, 2_000, seed=1).epsilon > CLAIM


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
