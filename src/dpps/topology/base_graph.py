"""The Base-(k+1) graph: the exact average in finitely many rounds, for any number of nodes.

The idea is that of Takezawa, Sato, Bao, Niwa and Yamada, "Beyond Exponential Graph: Communication-Efficient
Topologies for Decentralized Learning via Finite-time Convergence" (NeurIPS 2023).
"""

from collections.abc import Iterable
from functools import cache
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpps.topology.base import TOPOLOGIES, Topology, Weights, node_count, whole


class Links(NamedTuple):
    """The entries of one round off the diagonal; symmetric."""

    receivers: NDArray[np.int64]
    senders: NDArray[np.int64]
    values: NDArray[np.float64]


@TOPOLOGIES.register("base-K")
class Base(Topology):
    """The Base-(k+1) graph: at most k peers per node and round, exact average after every period.

    If N is a product of numbers up to k+1, the nodes are the points of a grid with those sides, and each
    round averages along one side. Otherwise N is written in base k+1 and split by its digits into such grids;
    each finds its own average, then they exchange so that every grid's average is that of all, and average
    again. Where N has such a grid as a factor, the same among fewer nodes and the grid across them may be shorter.
    """

    def __init__(self, nodes: int, k: int) -> None:
        count = node_count(nodes)
        self.k = whole("k", k, low=1, high=count - 1, remedy="a node has k peers per round, of N - 1 others")
        self._rounds = min(simple_rounds(count, self.k), factored_rounds(count, self.k), key=len)
        super().__init__(count, period=len(self._rounds))

    def build(self, t: int) -> Weights:
        return Weights.symmetric(self.nodes, *self._rounds[t])

    def __repr__(self) -> str:
        return f"Base({self.nodes}, {self.k})"


def factored_rounds(n: int, k: int) -> list[Links]:
    """n = p q with p the largest grid: p copies of the construction for q, then the grid across them."""
    p = 1
    for factor in range(2, k + 2):  # p is the largest factor of n without a prime factor above k+1
        while n % (p * factor) == 0:
            p *= factor
    q = n // p
    copies = [_moved(simple_rounds(q, k), q * copy) for copy in range(p)]
    return _side_by_side(copies) + grid_rounds(n, k, p, q)


def simple_rounds(n: int, k: int) -> list[Links]:
    """A grid if n is one; otherwise the digits of n in base k+1, one group of nodes each."""
    if shortest_factors(n, k + 1) is not None:
        return grid_rounds(n, k, n)
    groups = _groups(n, k + 1)
    sizes = ((group.blocks * group.size, group.start) for group in groups)
    first = _side_by_side([_moved(grid_rounds(size, k, size), start) for size, start in sizes])
    return first + _side_by_side([_meeting(groups, index, k) for index in range(len(groups))])


def grid_rounds(n: int, k: int, points: int, stride: int = 1) -> list[Links]:
    """The k-peer hyper-hypercube on grids of so many points that lie ``stride`` nodes apart: one round per factor of their
    number, each averaging along one side, that is over the digit (i // stride) mod side of every node i < n."""
    rounds, nodes = [], np.arange(n)[:, None]
    for side in shortest_factors(points, k + 1) or ():
        digit = nodes // stride % side
        senders = (nodes + ((digit + np.arange(1, side)) % side - digit) * stride).ravel()
        receivers, values = np.repeat(np.arange(n), side - 1), np.full(senders.size, 1.0 / side)
        rounds.append(Links(receivers, senders, values))
        stride *= side
    return rounds


class Group(NamedTuple):
    """One digit: ``blocks`` times ``size`` = (k+1)^p nodes from ``start`` on; ``rest`` nodes follow."""

    start: int
    blocks: int
    size: int
    rest: int


def _groups(n: int, base: int) -> list[Group]:
    groups, start, size = [], 0, 1
    while size * base <= n:
        size *= base
    while size:
        blocks, rest = divmod(n - start, size)
        if blocks:
            groups.append(Group(start, blocks, size, rest))
        start, size = n - rest, size // base
    return groups


def _meeting(groups: list[Group], index: int, k: int) -> list[Links]:
    """What a group that agrees within itself does: wait its turn, meet the groups after it, average again."""
    group = groups[index]
    if not group.rest:
        return []
    waiting = [_join([])] * index
    starts = range(group.start, group.start + group.blocks * group.size, group.size)
    again = _side_by_side([_moved(grid_rounds(group.size, k, group.size), start) for start in starts])
    return [*waiting, _exchange(group), *again]


def _exchange(group: Group) -> Links:
    """Each node of the rest meets one node of every block, with weight size / all, all = blocks size + rest.

    Let the group hold m, the rest r on average, and T be the average of both. The rest then holds
    r + blocks size / all (m - r) = T on average, and so does each block, m + rest / all (r - m) = T.
    The rest fits into a block: its nodes are the lower digits of n.
    """
    in_group = group.blocks * group.size
    number = np.tile(np.arange(group.rest), group.blocks)
    later = group.start + in_group + number
    met = group.start + np.repeat(np.arange(group.blocks), group.rest) * group.size + number
    values = np.full(2 * later.size, group.size / (in_group + group.rest))
    return Links(np.concatenate([later, met]), np.concatenate([met, later]), values)


@cache
def shortest_factors(n: int, largest: int) -> tuple[int, ...] | None:
    """The fewest factors up to ``largest`` whose product is n, or None if a prime factor is larger."""
    if n == 1:
        return ()
    found = [
        (factor, *others)
        for factor in range(min(n, largest), 1, -1)
        if n % factor == 0 and (others := shortest_factors(n // factor, largest)) is not None
    ]
    return min(found, key=len, default=None)


def _moved(rounds: list[Links], offset: int) -> list[Links]:
    """The same links among the nodes ``offset`` further on."""
    return [Links(links.receivers + offset, links.senders + offset, links.values) for links in rounds]


def _side_by_side(parts: list[list[Links]]) -> list[Links]:
    """Several sequences of rounds at the same time; who has finished waits."""
    return [_join(links for links in now if links is not None) for now in zip_longest(*parts)]


def _join(parts: Iterable[Links]) -> Links:
    empty = Links(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
    return Links(*(np.concatenate(arrays) for arrays in zip(empty, *parts, strict=True)))
