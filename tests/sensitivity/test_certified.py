"""The certified sensitivity: its estimate is the formula, and its claim holds in whole runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from dpps.errors import UsageError
from dpps.noise import Event, Gaussian, Laplace, Mechanism, NoiseSource, NoNoise, Seeded, non_private
from dpps.protocol import DPPS, RoundRecord
from dpps.sensitivity import (
    Certified,
    Paper,
    Released,
    RoundView,
    Sensitivity,
    WorstCase,
    mean_abs,
    noise_factor,
)
from dpps.sensitivity import coefficients as table
from dpps.topology import Base, DOut, Exponential, OnePeerRandom, Ring, Topology
from tests.support.protocol import Scripted
from tests.support.sensitivity import safe_mean

LAPLACE = Laplace(budget=5, noise_rate=0.001)


# --- the estimate is the formula --------------------------------------------------------------------------------


@dataclass
class Past:
    clock: int
    norms: np.ndarray
    scale: float


def by_definition(
    topology: Topology, past: list[Past], now: np.ndarray, start: np.ndarray, t: int, d: int, delta: float
) -> float:
    """S(t) straight from the theorem, all rounds one by one."""
    n = topology.nodes
    x = math.log(n * (n - 1) / 2 * max(1, len(past)) * (t + 1) * (t + 2) / delta)
    best = 0.0
    for i in range(n):
        for j in range(i):
            total, product = now[i] + now[j], np.eye(n)
            for event in reversed(past):
                product = product @ topology.weights(event.clock).dense()
                c = product[i] - product[j]
                total += np.abs(c) @ event.norms + event.scale * safe_mean(c) * noise_factor(d, x)
            total += np.abs(product[i] - product[j]) @ start
            best = max(best, total)
    return best


@pytest.mark.parametrize("private_start", [False, True])
def test_estimate_is_the_theorem_through_a_clock_restart_and_a_resume(private_start: bool) -> None:
    n, d, sensitivity = 6, 30, Certified(delta=1e-4)
    topology = Exponential(n)
    protocol = DPPS(topology, Laplace(5, 0.1), sensitivity, sync_every=7, noise=Seeded(1))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(n, d, generator=generator, dtype=torch.float64)
    state = protocol.start(rows if private_start else rows[:1].repeat(n, 1))
    start = rows.abs().sum(1).numpy() if private_start else np.zeros(n)
    past: list[Past] = []
    synchronised = []
    for t in range(14):
        if t == 5:
            protocol.restart_clock(state, 0.1)
        eps = torch.randn(n, d, generator=generator, dtype=torch.float64) * torch.rand(
            n, 1, generator=generator
        )
        norms = eps.abs().sum(1).numpy()
        clock = state.clock
        state.memory = {name: value.clone() for name, value in state.memory.items()}  # as from a checkpoint
        record = protocol.step(state, eps)
        expected = by_definition(topology, past, norms, start, t, d, sensitivity.delta)
        assert record.estimated == pytest.approx(expected, rel=1e-4)
        past.append(Past(clock, norms, record.scale))
        if record.synchronised:
            synchronised.append(t)
            past, start = [], np.zeros(n)
    assert synchronised == [11]  # not 6 and 13: the clock restarted in round 5


def test_estimate_does_not_change_memory() -> None:
    protocol = DPPS(Ring(5), LAPLACE, Certified(), noise=Seeded(0))
    state = protocol.start(torch.zeros(5, 3))
    protocol.step(state, torch.ones(5, 3))
    before = {name: value.clone() for name, value in state.memory.items()}
    norms = torch.ones(5, dtype=torch.float64)
    view = RoundView(state.config, state.round, state.clock, 1.0, norms, state.s)
    assert Certified().estimate(state.memory, view) == Certified().estimate(state.memory, view)
    for name, value in before.items():
        assert torch.equal(state.memory[name], value)


def test_grid_adds_two_steps_per_coordinate() -> None:
    protocol = DPPS(Exponential(4), LAPLACE, Certified(), noise=Seeded(0))
    state = protocol.start(torch.zeros(4, 10))
    view = RoundView(state.config, 0, 0, 1.0, torch.ones(4, dtype=torch.float64), state.s)
    released = Released(2.0, 0.0, torch.zeros(4, dtype=torch.float64), False, step=0.01)
    after = Certified().advance(state.memory, view, released)
    assert after["norms"][0].tolist() == pytest.approx([1 + 2 * 0.01 * 10] * 4)


# --- whole runs: the real distance is never above the bound -----------------------------------------------------


def run(
    topology: Topology,
    sensitivity: Sensitivity,
    *,
    d: int,
    rounds: int,
    sync_every: int = 0,
    mechanism: Mechanism = LAPLACE,
    watch: dict[str, Sensitivity] | None = None,
    private_start: bool = False,
    restarts: Sequence[int] = (),
    noise: NoiseSource | None = None,
    seed: int = 0,
) -> list[RoundRecord]:
    """A closed loop with gradient-like perturbations: sparse, of uneven norms, shrinking over time."""
    torch.set_num_threads(1)
    n, generator = topology.nodes, torch.Generator().manual_seed(seed)
    protocol = DPPS(
        topology,
        mechanism,
        sensitivity,
        sync_every=sync_every,
        noise=noise or Seeded(seed),
        watch=watch,
        track_real=True,
    )
    rows = 0.05 * torch.randn(n if private_start else 1, d, generator=generator)
    state = protocol.start(rows.expand(n, d))
    records = []
    for t in range(rounds):
        if t in restarts:
            protocol.restart_clock(state, 0.1 ** (1 + restarts.index(t)))
        eps = torch.randn(n, d, generator=generator) * (torch.rand(n, d, generator=generator) < 0.3)
        size = 10 * (0.5 + 0.5 * torch.rand(n, 1, generator=generator)) * math.exp(-t / 100) * state.rate
        records.append(protocol.step(state, eps / eps.abs().sum(1, keepdim=True) * size))
    return records


def ratios(records: list[RoundRecord]) -> np.ndarray:
    return np.array([(r.estimated or 0.0) / (r.real or math.nan) for r in records])


@pytest.mark.parametrize("sync_every", [4, 5])
@pytest.mark.parametrize("topology", [DOut(10, 2), DOut(10, 8), Exponential(10)], ids=str)
def test_never_below_the_real_distance_and_below_twice_of_it(topology: Topology, sync_every: int) -> None:
    watch: dict[str, Sensitivity] = {"paper": Paper(0.78, 0.55), "worst": WorstCase()}
    records = run(topology, Certified(), d=7850, rounds=120, sync_every=sync_every, watch=watch)
    certified = ratios(records)
    paper = np.median([r.watched["paper"] / (r.real or math.nan) for r in records])
    print(f"{topology}: median certified/real {np.median(certified):.2f}, paper/real {paper:.2f}")
    assert certified.min() >= 1
    assert np.median(certified) < 2.0
    assert all(r.watched["worst"] >= (r.real or 0.0) for r in records)


@pytest.mark.parametrize(
    ("topology", "options"),
    [
        (DOut(50, 2), {"sync_every": 5, "rounds": 20}),
        (Exponential(8), {"rounds": 80}),
        (DOut(6, 2), {"rounds": 100, "mechanism": Laplace(50, 0.001)}),
        (OnePeerRandom(12, seed=1), {"rounds": 40, "mechanism": Laplace(50, 0.001)}),
        (Exponential(10).with_dropouts(0.2, seed=3), {"sync_every": 5, "rounds": 60}),
        (DOut(10, 4), {"sync_every": 5, "rounds": 30, "private_start": True}),
        (Exponential(10), {"sync_every": 5, "rounds": 40, "restarts": (13, 27)}),
        (Exponential(70), {"sync_every": 4, "rounds": 10}),
        (Base(66, 2), {"sync_every": 6, "rounds": 10}),
    ],
    ids=str,
)  # fmt: skip
def test_never_below_the_real_distance(topology: Topology, options: dict[str, object]) -> None:
    records = run(topology, Certified(), d=1500, watch={"worst": WorstCase()}, **options)  # type: ignore[arg-type]
    assert ratios(records).min() >= 1
    assert all(r.watched["worst"] >= (r.real or 0.0) for r in records)


def test_older_rounds_summed_up_early_are_still_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = Laplace(50, 0.001)
    exact = run(DOut(8, 3), Certified(), d=400, rounds=40, mechanism=quiet)
    monkeypatch.setattr(table, "NEGLIGIBLE", 0.7)
    monkeypatch.setattr("dpps.sensitivity.certified.WINDOW", 3)
    summed = run(DOut(8, 3), Certified(), d=400, rounds=40, mechanism=quiet)
    assert ratios(summed).min() >= 1
    assert np.median(ratios(summed)) > np.median(ratios(exact))


def test_memory_stays_small_without_synchronisation() -> None:
    protocol = DPPS(DOut(6, 4), Laplace(500, 0.001), Certified(), noise=Seeded(0))
    state = protocol.start(torch.zeros(6, 20))
    for _ in range(100):
        protocol.step(state, torch.ones(6, 20))
    assert 0 < len(state.memory["clocks"]) < 20


class WithoutNoisePart(Certified):
    """Sabotaged: forgets the noise of past rounds."""

    def _factor(self, view: RoundView, rounds: int) -> float:
        return 0.0


class WithoutThePast(Certified):
    """Sabotaged: forgets past perturbations."""

    def advance(self, memory, view, released):  # type: ignore[no-untyped-def]
        after = dict(super().advance(memory, view, released))
        return {**after, "norms": 0 * after["norms"], "bases": 0 * after["bases"]}


@pytest.mark.parametrize("sabotaged", [WithoutNoisePart(), WithoutThePast()], ids=str)
def test_sabotaged_twin_is_caught(sabotaged: Sensitivity) -> None:
    # noise is calibrated to the true bound; the twin only watches
    mechanism = LAPLACE if isinstance(sabotaged, WithoutNoisePart) else Laplace(500, 0.001)
    records = run(DOut(10, 2), Certified(), d=3000, rounds=40, mechanism=mechanism, watch={"twin": sabotaged})
    assert any(r.watched["twin"] < (r.real or 0.0) for r in records)
    assert ratios(records).min() >= 1


def test_worst_case_holds_for_noise_that_certified_calls_impossible() -> None:
    huge = [30 * np.sign(np.arange(4)[:, None] - 1.5) * np.ones((4, 50)) for _ in range(6)]
    loud = Laplace(5, 0.05)
    source = Scripted(huge)
    certified = run(Ring(4), Certified(), d=50, rounds=6, mechanism=loud, noise=source)
    assert ratios(certified).min() < 1
    worst = run(Ring(4), WorstCase(), d=50, rounds=6, mechanism=loud, noise=Scripted(huge))
    assert ratios(worst).min() >= 1


def test_without_noise_only_perturbations_count() -> None:
    records = run(Exponential(8), Certified(), d=60, rounds=20, mechanism=NoNoise())
    watched = run(Exponential(8), WorstCase(), d=60, rounds=20, mechanism=NoNoise())
    assert ratios(records).min() >= 1
    assert [r.estimated for r in records] == pytest.approx([r.estimated for r in watched])


# --- gain -------------------------------------------------------------------------------------------------------


def test_gain_tells_boundedness_without_synchronisation() -> None:
    topology, certified = Exponential(8), Certified()
    gains = {d: certified.gain(LAPLACE, topology, d, rounds=150) for d in (1500, 3500)}
    assert gains[1500] < 0.9
    assert gains[3500] > 1.1

    def largest(d: int) -> tuple[float, float]:
        protocol = DPPS(topology, LAPLACE, certified, noise=Seeded(0))
        state = protocol.start(torch.zeros(8, d, dtype=torch.float64))  # rounding is no part of the gain
        push = torch.full((8, d), 1.0 / d)  # norm 1 in every round: at most 2 + 2 + 2 from the last three
        s = [protocol.step(state, push).estimated or 0.0 for _ in range(150)]
        return max(s[:75]), max(s[75:])

    early, late = largest(1500)
    assert late < 1.05 * early
    assert late <= 6 / (1 - gains[1500])
    early, late = largest(3500)
    assert late > 1e3 * early


def test_gain_of_the_mean_alone_is_one_at_2600_parameters_and_the_tail_comes_on_top() -> None:
    quarters = np.array([0.25] * 4 + [-0.25] * 4)
    mean_alone = 0.001 / 5 * 2600 * (35 / 32 + float(mean_abs(quarters)))
    assert mean_alone == pytest.approx(0.98, abs=0.01)
    assert (
        Certified().gain(LAPLACE, Exponential(8), 2000) < 1 < Certified().gain(LAPLACE, Exponential(8), 2400)
    )


def test_gain_counts_rounds_beyond_the_window() -> None:
    slow = Certified().gain(LAPLACE, DOut(40, 2), 100)
    fast = Certified().gain(LAPLACE, DOut(40, 20), 100)
    assert 0 < fast < slow < math.inf


# --- refusals ---------------------------------------------------------------------------------------------------


class Triangular(Mechanism):
    norm, name = 1, "triangular"

    def scale(self, sensitivity: float) -> float:
        return sensitivity

    def draw(self, stream: np.random.Generator, out: np.ndarray) -> None:
        out[...] = stream.random(out.shape) - stream.random(out.shape)

    def event(self, noise_multiplier: float) -> Event:
        return non_private()


def test_noise_of_another_distribution_is_refused() -> None:
    protocol = DPPS(Ring(4), Triangular(), Certified())
    with pytest.raises(UsageError, match=r"'triangular'.*Laplace"):
        protocol.start(torch.zeros(4, 2))
    with pytest.raises(UsageError, match="triangular"):
        Certified().gain(Triangular(), Ring(4), 10)
    DPPS(Ring(4), Triangular(), WorstCase()).start(torch.zeros(4, 2))


def test_gaussian_noise_is_refused() -> None:
    with pytest.raises(UsageError, match="L1"):
        DPPS(Ring(4), Gaussian(1.0), Certified())


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-6, math.nan])
def test_delta_must_be_a_probability(delta: float) -> None:
    with pytest.raises(UsageError, match="delta"):
        Certified(delta)
