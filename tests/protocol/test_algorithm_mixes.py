"""Several gossip steps per released message."""

import pytest
import torch

import dpps
from dpps.errors import UsageError
from dpps.noise import Seeded


def test_each_step_is_a_step_of_the_topology():
    values = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    many, one = (dpps.DPPS(dpps.Exponential(8), dpps.NoNoise(), mixes=m) for m in (3, 1))
    fast, slow = many.start(values), one.start(values)
    many.step(fast)
    for _ in range(3):
        one.step(slow)
    torch.testing.assert_close(fast.s, slow.s)
    torch.testing.assert_close(fast.s, values.mean(0).expand(8, 3))  # three steps reach everybody
    assert (fast.round, fast.clock) == (1, 1)


def test_noise_is_added_and_charged_once():
    noisy = [
        dpps.DPPS(dpps.Ring(4), dpps.Gaussian(1.0), dpps.Bounded(clip=0.5), noise=Seeded(3), mixes=m)
        for m in (1, 5)
    ]
    states = [p.start(torch.zeros(4, 2)) for p in noisy]
    records = [p.step(s) for p, s in zip(noisy, states, strict=True)]
    assert noisy[0].privacy(1e-5).epsilon == noisy[1].privacy(1e-5).epsilon
    assert records[1].bytes == 5 * records[0].bytes
    torch.testing.assert_close(states[0].s.sum(0), states[1].s.sum(0))
    assert float(states[1].s.std(0).max()) < float(states[0].s.std(0).max())


def test_push_sum_stays_right_with_one_way_weights():
    weights = torch.tensor([[0.5, 0.0, 0.3], [0.5, 0.4, 0.0], [0.0, 0.6, 0.7]], dtype=torch.float64).numpy()
    protocol = dpps.DPPS(dpps.Static(weights), dpps.NoNoise(), mixes=4)
    state = protocol.start(torch.tensor([[1.0], [2.0], [6.0]]))
    for _ in range(30):
        protocol.step(state)
    torch.testing.assert_close(state.y, torch.full((3, 1), 3.0))


@pytest.mark.parametrize("mixes", [0, -1])
def test_less_than_one_is_refused(mixes):
    with pytest.raises(UsageError, match=r"mixes.* 1 "):
        dpps.DPPS(dpps.Ring(3), mixes=mixes)


def test_node_swap_refuses_more_than_one():
    with pytest.raises(UsageError, match="node-swap"):
        dpps.DPPS(dpps.Complete(3), dpps.Laplace(5.0), dpps.Certified(), mixes=2)


def test_a_rounds_weights_are_those_of_all_its_steps():
    """A request to stop travels on the rows: who hears of it within a round follows from all of the round's steps."""
    topology = dpps.Exponential(8)
    protocol = dpps.DPPS(topology, dpps.NoNoise(), mixes=3, sync_every=4)
    assert protocol.weights(3) is None
    expected = topology.weights(5).dense() @ topology.weights(4).dense() @ topology.weights(3).dense()
    torch.testing.assert_close(torch.from_numpy(protocol.weights(1).dense()), torch.from_numpy(expected))
