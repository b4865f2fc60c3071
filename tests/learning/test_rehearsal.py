"""A rehearsal computes gradients on made-up examples, and leaves no trace."""

import pytest
import torch
from torch import nn

import dpps
from dpps.learning import size_of
from dpps.learning.rehearsal import rehearsal
from tests.support.learning import started_on_images

UNITS = {
    "none": started_on_images,
    "record": lambda: started_on_images(dpps.Record(epsilon=5, delta=1e-3), lambda: nn.GroupNorm(2, 4)),
}


@pytest.mark.parametrize("unit", UNITS)
def test_a_rehearsal_leaves_no_trace(unit):
    def finished(*, rehearse: bool) -> torch.Tensor:
        run = UNITS[unit]()
        if rehearse:
            work, state = rehearsal(run.nodes, run.state), torch.get_rng_state()
            work()
            work()
            assert torch.equal(state, torch.get_rng_state())
        run.fit(2)
        return torch.cat([run.state.shared.s, run.local], 1)

    assert torch.equal(finished(rehearse=True), finished(rehearse=False))


def test_what_the_time_depends_on_is_the_size_of_the_work_and_not_its_values():
    plain, noisy = started_on_images(), UNITS["record"]()
    assert size_of(plain.nodes) == size_of(started_on_images().nodes)
    assert size_of(plain.nodes) | {"each example clipped": True} == size_of(noisy.nodes) | {
        "parameters": size_of(plain.nodes)["parameters"]
    }
    other = started_on_images(model=nn.Sequential(nn.Conv2d(1, 5, 3), nn.Flatten(), nn.Linear(80, 3)))
    assert size_of(other.nodes)["parameters"] != size_of(plain.nodes)["parameters"]
