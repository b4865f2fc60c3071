"""The distributed fabric gives the bits of one process, sends what it must and no more, and refuses bad rows by name."""

import numpy as np
import pytest
import torch

import dpps
import processes
from dpps.cluster import Cluster
from dpps.fabric import Stacked
from dpps.fabric.distributed import Distributed
from dpps.noise import Seeded
from dpps.topology import parse

NODES, WIDTH, ROUNDS = 10, 333, 7


def _fabric(cluster: Cluster, nodes: int = NODES) -> Distributed:
    return Distributed(nodes, cluster.join().meet({"version": "test"}))


def _perturbations(rounds: int = ROUNDS, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(rounds, NODES, width, generator=torch.Generator().manual_seed(1))


def _protocol(fabric: dpps.fabric.Fabric, topology: str, sensitivity: str, dropouts: float) -> dpps.DPPS:
    graph = parse(topology, NODES)
    graph = graph.with_dropouts(dropouts, seed=3) if dropouts else graph
    bound = dpps.Certified() if sensitivity == "certified" else dpps.Paper(0.78, 0.55)
    return dpps.DPPS(graph, dpps.Laplace(5, 1e-3), bound, sync_every=3, noise=Seeded(7), fabric=fabric)


def _states(fabric: dpps.fabric.Fabric, topology: str, sensitivity: str, dropouts: float) -> list[np.ndarray]:
    protocol = _protocol(fabric, topology, sensitivity, dropouts)
    state = protocol.start(torch.zeros(len(fabric.rows), WIDTH), common_start=True)
    seen = []
    for eps in _perturbations():
        record = protocol.step(state, eps[list(fabric.rows)])
        seen.append(np.concatenate([state.s.numpy().astype(np.float64), state.a.numpy()[:, None]], axis=1))
        seen.append(np.full((len(fabric.rows), 1), record.scale))
    return seen


CASES = [("exp", "certified", 0.0), ("4-out", "paper", 0.0), ("4-out", "certified", 0.3)]


def _all_cases(cluster: Cluster) -> list[list[np.ndarray]]:
    fabric = _fabric(cluster)
    return [_states(fabric, *case) for case in CASES]


@pytest.mark.parametrize("size", [1, 2, 5, 10])
def test_bits_of_one_process(size: int) -> None:
    """Laplace noise, EXP and 4-Out, synchronisation, absent nodes: s, a and the noise scale of every round."""
    parts = processes.run(size, _all_cases)
    for k, case in enumerate(CASES):
        alone = _states(Stacked(NODES), *case)
        for t, expected in enumerate(alone):
            together = np.concatenate([part[k][t] for part in parts])
            assert np.array_equal(together, expected), (case, t)
