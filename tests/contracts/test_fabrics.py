"""What every fabric does, wherever its rows live. A new fabric is tested by being added to FABRICS."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dpps.errors import UsageError
from dpps.peers import Peers
from dpps.topology import Exponential
from dpps.transport import Cluster, Distributed, Exchange, Fabric, Link, Stacked
from tests.support import processes
from tests.support.bare import HARD, membership_of, terms_of
from tests.support.simulated import Network, SimulatedPost

NODES, WIDTH, ROUNDS = 4, 5, 6
TOPOLOGY = Exponential(NODES)
Part = Callable[[Fabric], Any]
"""What is done with the fabric of each process."""


def _stacked(part: Part) -> list[Any]:
    return [part(Stacked(NODES))]


def _distributed(part: Part) -> list[Any]:
    return processes.run(2, _in_process, part)


def _in_process(cluster: Cluster, part: Part) -> Any:
    return part(Distributed(NODES, cluster.join().meet({"version": "test"})))


class _Member(Peers):
    """Its first round waits for all members."""

    def start(self, s: Tensor, common: bool) -> Link:
        link = super().start(s, common)
        self.agree(terms_of(TOPOLOGY, ROUNDS))
        while not self.assembled(NODES, answers=True):
            self.wait(0.1)
        return link


def _peers(part: Part) -> list[Any]:
    names, found = tuple(f"m{k}" for k in range(NODES)), {}

    def member(k: int) -> Callable[[SimulatedPost], None]:
        def main(post: SimulatedPost) -> None:
            fabric = _Member(membership_of(names, k, TOPOLOGY), post, post.clock)
            found[k] = part(fabric)
            end = post.clock() + HARD  # nobody goes before the others have heard of its last row
            while post.clock() < end:
                fabric.wait(0.1)

        return main

    Network({name: member(k) for k, name in enumerate(names)}).run()
    return [found[k] for k in range(NODES)]


FABRICS = {"stacked": _stacked, "distributed": _distributed, "peers": _peers}


@pytest.fixture(params=FABRICS)
def everywhere(request: pytest.FixtureRequest) -> Callable[[Part], list[Any]]:
    """Does something in every process, and returns the results."""
    return FABRICS[request.param]


def _begun(fabric: Fabric) -> tuple[list[int], Tensor, Tensor, Link]:
    rows = list(fabric.rows)
    s = torch.randn(NODES, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))[rows]
    return rows, s, torch.ones(len(rows), dtype=torch.float64), fabric.start(s, common=False)


def _mixed(fabric: Fabric) -> list[tuple[list[int], np.ndarray, np.ndarray]]:
    rows, s, a, link = _begun(fabric)
    seen = [(rows, s.numpy(), a.numpy())]
    for t in range(ROUNDS):
        fabric.push(Exchange(t, TOPOLOGY.weights(t)), s, a, link)
        arrived = fabric.collect()
        s, a, link = arrived.s, arrived.a, arrived.link
        seen.append((rows, s.numpy(), a.numpy()))
    return seen


def test_a_round_is_a_product_with_the_weights(everywhere: Callable[[Part], list[Any]]) -> None:
    """For rows and scalars alike; so nothing is lost or made."""
    parts = everywhere(_mixed)
    assert [row for part in parts for row in part[0][0]] == list(range(NODES)), "every row lives in one place"
    s, a = (np.concatenate([part[0][k] for part in parts]) for k in (1, 2))
    for t in range(ROUNDS):
        dense = np.asarray(TOPOLOGY.weights(t).dense())
        s, a = dense @ s, dense @ a
        for rows, found, scalars in (part[t + 1] for part in parts):
            np.testing.assert_allclose(found, s[rows], rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(scalars, a[rows], rtol=1e-12)


def _averaged(fabric: Fabric) -> tuple[Any, ...] | None:
    rows, s, a, link = _begun(fabric)
    present = np.array([True, False, True, True])
    if not fabric.meets:
        for exchange in (Exchange(0, None), Exchange(0, TOPOLOGY.weights(0), present)):
            with pytest.raises(UsageError):
                fabric.push(exchange, s, a, link)
        with pytest.raises(UsageError):
            fabric.gather(a)
        return None
    fabric.push(Exchange(0, None, present), s, a, link)
    arrived = fabric.collect()
    numbers = torch.tensor(rows, dtype=torch.float64)
    gathered = fabric.gather(numbers).tolist(), fabric.max(numbers)
    mean = fabric.mean(s, present)
    return rows, s.numpy(), arrived.s.numpy(), mean.numpy(), gathered


def test_who_is_present_averages_or_the_fabric_says_that_nobody_meets(
    everywhere: Callable[[Part], list[Any]],
) -> None:
    parts = everywhere(_averaged)
    if parts[0] is None:
        return
    before, after = (np.concatenate([part[k] for part in parts]) for k in (1, 2))
    expected = before.copy()
    expected[[0, 2, 3]] = before[[0, 2, 3]].mean(0)
    np.testing.assert_allclose(after, expected)
    for _, _, _, mean, gathered in parts:
        assert np.array_equal(mean, parts[0][3]), "the same bits everywhere"
        np.testing.assert_allclose(mean, expected[0])
        assert gathered == ([0.0, 1.0, 2.0, 3.0], 3.0)


def _collected(fabric: Fabric) -> None:
    _begun(fabric)
    with pytest.raises(AssertionError):
        fabric.collect()


def test_nothing_is_collected_that_was_not_pushed(everywhere: Callable[[Part], list[Any]]) -> None:
    everywhere(_collected)
