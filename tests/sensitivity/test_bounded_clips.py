"""`Bounded` never states an epsilon over an update that it did not clip."""

import pytest
import torch

import dpps
from dpps.errors import UsageError


def moved(bound: dpps.Sensitivity, update: float) -> float:
    """How far one node's update of this length moves the rows of the whole network, without noise getting in the way."""
    protocol = dpps.DPPS(dpps.Ring(3), dpps.Gaussian(5.0), bound, noise=dpps.Seeded(0))
    rows = []
    for length in (update, -update):
        state = protocol.start(torch.zeros(3, 4, dtype=torch.float64))
        protocol.step(state, torch.tensor([[length, 0, 0, 0], [0] * 4, [0] * 4], dtype=torch.float64))
        rows.append(state.s.sum(0))
    return float(torch.linalg.vector_norm(rows[0] - rows[1]))


@pytest.mark.parametrize("update", [0.3, 1.0, 2000.0])
def test_replacing_an_update_moves_the_rows_by_at_most_the_distance_charged_for(update: float) -> None:
    bound = dpps.Bounded(clip=1.0)
    assert bound.distance == 2.0
    assert moved(bound, update) <= bound.distance


def test_without_a_clip_it_is_refused() -> None:
    with pytest.raises(UsageError, match="clip"):
        dpps.Bounded(1.0)
    with pytest.raises(UsageError, match="clip"):
        dpps.Bounded(distance=1.0, start_distance=3.0)


@pytest.mark.parametrize(("distance", "clip"), [(1.0, 1.0), (0.0, 1.0), (1.999999, 1.0), (0.0, 1e-9)])
def test_a_distance_that_two_updates_can_exceed_is_refused(distance: float, clip: float) -> None:
    with pytest.raises(UsageError, match=f"distance is {distance}"):
        dpps.Bounded(distance=distance, clip=clip)


def test_a_larger_distance_is_charged_for() -> None:
    """Two nodes of one owner move by more than one does: sqrt(2) times as far in the L2 norm."""
    bound = dpps.Bounded(clip=1.0, distance=3.0)
    protocol = dpps.DPPS(dpps.Ring(3), dpps.Gaussian(5.0), bound, noise=dpps.Seeded(0))
    assert protocol.step(protocol.start(torch.zeros(3, 2))).used == 3.0


def test_only_the_start_values_are_private() -> None:
    bound = dpps.Bounded(clip=0, start_distance=1)
    assert bound == dpps.Bounded(distance=0, clip=0, start_distance=1)
    protocol = dpps.DPPS(dpps.Ring(3), dpps.Laplace(1.0), bound, noise=dpps.Seeded(0))
    state = protocol.start(torch.tensor([[0.0], [0.5], [1.0]]))
    used = [protocol.step(state, torch.ones(3, 1)).used for _ in range(3)]
    assert used == [1.0, 0.0, 0.0]


def test_the_form_without_a_clip_is_no_public_name() -> None:
    assert "Unclipped" not in dpps.__all__
    assert not hasattr(dpps, "Unclipped")
