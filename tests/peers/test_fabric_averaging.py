"""How many rounds the average at the end takes."""

import numpy as np

from dpps.peers import averaging_rounds
from dpps.peers.gossip import TOLERANCE
from dpps.topology import Complete, DOut, Exponential, Ring, Topology


def test_differences_have_shrunk_after_so_many_rounds() -> None:
    kinds: list[Topology] = [Complete(5), Exponential(8), Ring(9), DOut(6, 2)]
    for topology in kinds:
        n = topology.nodes
        linked = np.eye(n)
        for t in range(topology.examined):
            w = topology.weights(t)
            linked[w.receivers, w.senders] = linked[w.senders, w.receivers] = 1
        mix = np.linalg.matrix_power(linked / linked.sum(0), averaging_rounds(topology))
        rows = np.random.default_rng(0).normal(size=(n, 3))
        estimates = mix @ rows / (mix @ np.ones(n))[:, None]
        assert np.abs(estimates - estimates.mean(0)).max() < 10 * TOLERANCE
