"""From a perturbation to a message: absent nodes, private starts, and nothing that leaves without noise."""

import math

import pytest
import torch

import dpps
from dpps.errors import RunError, UsageError
from dpps.privacy import Ledger
from dpps.protocol import Scratch


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
    seen = []

    class Watched(dpps.Stacked):
        def mix(self, weights, *xs):
            seen.append(xs[0].clone())
            return super().mix(weights, *xs)

    protocol = dpps.DPPS(
        dpps.Ring(4), dpps.Laplace(1), dpps.Bounded(1.0, clip=0.5), fabric=Watched(4), noise=dpps.Seeded(0)
    )
    state = protocol.start(torch.zeros(4, 500))
    noises = []
    for _ in range(3):
        before = state.s.clone()
        protocol.step(state)
        noises.append(seen[-1] - before)
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


def test_scratch_memory_is_used_again_for_rows_of_the_same_kind():
    scratch, rows = Scratch(), torch.zeros(3, 4)
    first = scratch.like(rows)
    assert scratch.like(rows) is first
    assert scratch.like(rows.double()).dtype == torch.float64
    assert scratch.like(torch.zeros(2, 4)).shape == (2, 4)
