"""From a perturbation to a message: what is charged and noised, absent nodes, private starts, and nothing that leaves without noise."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import dpps
from dpps.errors import RunError, UsageError
from dpps.noise import Keystream, SecureNoise
from dpps.privacy import Ledger
from tests.support.protocol import Wire


def test_an_absent_node_keeps_its_row_and_applies_no_perturbation():
    topology = dpps.Exponential(6).with_dropouts({1: [2], 2: [2]})
    protocol = dpps.DPPS(
        topology,
        dpps.Laplace(1),
        dpps.Bounded(clip=0.5, start_distance=100.0),
        sync_every=3,
        noise=dpps.Seeded(0),
    )
    state = protocol.start(torch.randn(6, 9))
    protocol.step(state, torch.ones(6, 9))
    before = state.s[2].clone()
    for _ in range(2):  # the second of these rounds synchronises those present
        record = protocol.step(state, torch.ones(6, 9))
        assert torch.equal(state.s[2], before)
        assert not record.synchronised
    assert bool((state.s[[0, 1, 3, 4, 5]] == state.s[0]).all())
    protocol.step(state, torch.ones(6, 9))
    assert not torch.equal(state.s[2], before)


def test_private_start_values_need_everybody_in_round_0_and_a_true_bound():
    bound = dpps.Bounded(distance=0, clip=0, start_distance=1.0)
    away = dpps.Exponential(4).with_dropouts({0: [2]})
    with pytest.raises(UsageError, match="round 0"):
        dpps.DPPS(away, dpps.Laplace(1), bound).start(torch.rand(4, 1))
    with pytest.raises(UsageError, match=r"\b5\b.*start_distance 1\b"):
        dpps.DPPS(dpps.Exponential(4), dpps.Laplace(1), bound).start(
            torch.tensor([[0.0], [5.0], [0.0], [0.0]])
        )


def test_nothing_unnoised_reaches_the_fabric():
    """Every coordinate of every message differs from the row, by noise that differs from row to row and round to round."""
    wire = Wire(4)
    protocol = dpps.DPPS(
        dpps.Ring(4), dpps.Laplace(1), dpps.Bounded(1.0, clip=0.5), fabric=wire, noise=dpps.Seeded(0)
    )
    state = protocol.start(torch.zeros(4, 500))
    noises = []
    for _ in range(3):
        before = state.s.clone()
        protocol.step(state)
        noises.append(wire.sent[-1] - before)
    noise = torch.stack(noises)
    assert bool((noise != 0).all())
    assert len(torch.unique(noise)) == pytest.approx(noise.numel(), rel=0.01)


def test_when_only_the_start_is_private_later_rounds_are_free():
    ledger = Ledger(range(8))
    bound = dpps.Bounded(distance=0, clip=0, start_distance=10.0)
    protocol = dpps.DPPS(
        dpps.Exponential(8), dpps.Laplace(budget=2.0), bound, noise=dpps.Seeded(0), ledger=ledger
    )
    state = protocol.start(torch.rand(8, 3, dtype=torch.float64))
    # perturbations are clipped to nothing
    records = [protocol.step(state, torch.ones(8, 3)) for _ in range(4)]
    assert [r.epsilon for r in records] == [2.0, 0, 0, 0]
    assert [round_ for round_, _ in ledger.history] == [0]
    assert float((state.y - state.y[0]).abs().max()) < 1e-12
    with pytest.raises(UsageError, match=r"distance.*0.*clip.*0"):
        dpps.Bounded(distance=0, clip=1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_perturbation_is_refused_and_costs_nothing(value):
    protocol = dpps.DPPS(dpps.Ring(4), dpps.Laplace(1), dpps.Bounded(clip=0.5), noise=dpps.Seeded(0))
    state = protocol.start(torch.zeros(4, 3))
    protocol.step(state)
    before = state.s.clone()
    eps = torch.zeros(4, 3)
    eps[2, 1] = value
    with pytest.raises(UsageError, match="node 2 in round 1"):
        protocol.step(state, eps)
    with pytest.raises(UsageError, match=r"\(4, 2\)"):
        protocol.step(state, torch.zeros(4, 2))
    assert torch.equal(state.s, before)
    assert state.round == 1


def test_a_diverging_sensitivity_says_why_and_what_to_do():
    protocol = dpps.DPPS(dpps.Ring(4), dpps.Laplace(1.0, 1.0), dpps.Paper(2.0, 0.9), noise=dpps.Seeded(0))
    state = protocol.start(torch.zeros(4, 1000, dtype=torch.float64))
    growth = 0.9 * (1 + 2 * 2.0 * 1000)

    def many_rounds():
        for _ in range(200):
            protocol.step(state, torch.ones(4, 1000))

    message = f"= {growth:.4g} .*sync_every.*budget"
    with pytest.raises(RunError, match=message):
        many_rounds()
    assert torch.isfinite(state.s).all()


# Which rows are charged at which rate, and what a round sends


@pytest.mark.parametrize(
    ("sampling", "charged"),
    [
        (0.5, [(0.5, "all")]),
        ([0.5, 0.5, 0.5], [(0.5, "all")]),
        ([0.1, 0.2, 0.1], [(0.1, (0, 2)), (0.2, (1,))]),
    ],
)
def test_rows_of_one_rate_are_charged_together(sampling, charged) -> None:
    class Listening(Ledger):
        def charge(self, release) -> None:
            found.append((release.event.sampling, release.rows))

    found = []
    options = {"sampling": sampling, "ledger": Listening(range(3))}
    protocol = dpps.DPPS(dpps.Ring(3), dpps.Gaussian(1.0), dpps.Bounded(clip=0.5), **options)
    protocol.step(protocol.start(torch.zeros(3, 2)))
    assert found == charged
    with pytest.raises(UsageError, match=r"2 sampling rates .*3 rows"):
        dpps.DPPS(dpps.Ring(3), sampling=[0.1, 0.2])


def test_private_start_values_are_charged_in_full_whoever_is_drawn() -> None:
    bound = dpps.Bounded(distance=1.0, clip=0.5, start_distance=1.0)
    protocol = dpps.DPPS(dpps.Ring(3), dpps.Gaussian(1.0), bound, sampling=0.01)
    state = protocol.start(torch.rand(3, 2) / 3, common_start=False)
    for _ in range(2):
        protocol.step(state)
    assert [charge.event.sampling for _, charge in protocol.ledger.history] == [1.0, 0.01]


# Private start rows reach the noise grid as they are: rounding to float32 on the way would move them further than is charged for


FAR = 2.0**19
"""Here neighbouring float32 numbers are 1/16 apart."""
COORDINATES, CLIP, START = 1000, 40.0, 0.5
STEP = SecureNoise().grid(2 * CLIP + START)


@dataclass(frozen=True)
class Known(dpps.Laplace):
    """Noise that takes the rows back to zero, where float32 shows what was put on the grid."""

    def draw_whole(self, keystream: Keystream, steps: float, size: int) -> np.ndarray:
        return np.full(size, -round(FAR / STEP), dtype=np.int64)


def sent(update: float, away: bool) -> tuple[torch.Tensor, float]:
    """The first message of a node that adds this to every coordinate, and what was charged for."""
    topology = dpps.Ring(3).with_dropouts({1: [2]}) if away else dpps.Ring(3)
    wire, bound = Wire(3), dpps.Bounded(clip=CLIP, start_distance=START)
    protocol = dpps.DPPS(topology, Known(1.0), bound, noise=SecureNoise(), fabric=wire)
    state = protocol.start(torch.full((3, COORDINATES), FAR), common_start=False)
    record = protocol.step(state, torch.full((3, COORDINATES), update))
    assert wire.sent[0].dtype == torch.float32
    assert record.used is not None
    return wire.sent[0][0].double(), record.used


@pytest.mark.parametrize("away", [False, True])
def test_two_updates_are_no_further_apart_than_was_charged(away: bool) -> None:
    (one, charged), (other, _) = sent(0.04, away), sent(-0.04, away)
    assert 79.9 < float((one - other).abs().sum()) <= charged


def test_seeded_noise_is_added_to_the_same_rows() -> None:
    """Float32 messages of rows far from zero: the update survives up to the rounding of the message itself."""
    bound = dpps.Bounded(clip=CLIP, start_distance=START)
    protocol = dpps.DPPS(dpps.Ring(3), dpps.Laplace(1e9), bound, noise=dpps.Seeded(0))
    state = protocol.start(torch.full((3, 4), FAR), common_start=False)
    protocol.step(state, torch.full((3, 4), 1.0))
    torch.testing.assert_close(state.s, torch.full((3, 4), FAR + 1.0), rtol=0, atol=1e-6)


# The bare protocol states an epsilon over noise that nobody knows, or says that it is simulated


class Elsewhere(dpps.Stacked):
    simulation = False


START_ONLY = dpps.Bounded(clip=0, start_distance=1.0)


@pytest.mark.parametrize("fabric", [dpps.Stacked(4), Elsewhere(4)])
@pytest.mark.parametrize("noise", [None, dpps.Seeded()])
def test_a_total_over_seeded_noise_says_so_wherever_it_is_printed(
    fabric: dpps.transport.Fabric, noise: dpps.NoiseSource | None
) -> None:
    """By default nobody knows the noise."""
    protocol = dpps.DPPS(dpps.Ring(4), dpps.Laplace(1.0), START_ONLY, fabric=fabric, noise=noise)
    state = protocol.start(torch.rand(4, 1, dtype=torch.float64), common_start=False)
    for _ in range(3):
        protocol.step(state)
    total = protocol.privacy(0.0)
    assert isinstance(protocol.noise, SecureNoise) == (noise is None) == (not total.simulated)
    assert total.epsilon == pytest.approx(1.0)
    assert ("simulated" in str(total)) == ("simulated" in f"{total}") == total.simulated
    assert ("simulated=True" in repr(total)) == total.simulated


def test_the_paper_s_unit_says_so_too() -> None:
    for noise, simulated in ((dpps.Seeded(1), True), (None, False)):
        protocol = dpps.DPPS(dpps.Ring(4), dpps.Laplace(1.0), dpps.Certified(), noise=noise)
        protocol.step(protocol.start(torch.zeros(4, 3)))
        assert protocol.privacy(0.0).simulated is simulated


def test_secure_noise_is_drawn_afresh_for_every_protocol() -> None:
    rows = []
    for _ in range(2):
        protocol = dpps.DPPS(dpps.Complete(3), dpps.Gaussian(1.0), dpps.Bounded(clip=1.0))
        state = protocol.start(torch.zeros(3, 50))
        protocol.step(state)
        rows.append(state.s)
    assert not torch.equal(*rows)
    assert math.isclose(float(rows[0].std()), 2 / math.sqrt(3), rel_tol=0.6)


def test_a_run_s_privacy_says_whether_it_was_simulated() -> None:
    found = {}
    for secure in (False, True):
        data = [(torch.randn(20, 3), torch.randint(0, 2, (20,))) for _ in range(2)]
        algorithm = dpps.PartPSP(torch.nn.Linear(3, 2), "all", batch_size=10)
        options = {"topology": dpps.Ring(2), "privacy": dpps.Record(epsilon=3.0), "seed": 0}
        run = dpps.Run(algorithm, data, secure_noise=secure, **options).fit(epochs=1)  # type: ignore[arg-type]
        found[secure] = run.privacy.simulated, run.privacy.to_json()["simulated"]
    assert found == {False: (True, True), True: (False, False)}
