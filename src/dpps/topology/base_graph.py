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

    def moved(self, offset: int) -> "Links":
        """The same links among the nodes ``offset`` further on."""
        return Links(self.receivers + offset, self.senders + offset, self.values)


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
        """Round t of the construction."""
        return Weights.symmetric(self.nodes, *self._rounds[t])

    def __repr__(self) -> str:
        return f"Base({self.nodes}, {self.k})"


def factored_rounds(n: int, k: int) -> list[Links]:
    """n = p q with p the largest grid: p copies of the construction for q, then the grid across them."""
    p = _grid_part(n, k)
    q = n // p
    inside = [_join(links.moved(q * copy) for copy in range(p)) for links in simple_rounds(q, k)]
    across = [_along(n, side, stride) for side, stride in _sides(p, k, stride=q)]
    return inside + across


def simple_rounds(n: int, k: int) -> list[Links]:
    """A grid if n is one; otherwise the digits of n in base k+1, one group of nodes each."""
    if shortest_factors(n, k + 1) is not None:
        return grid_rounds(n, k)
    groups = _groups(n, k + 1)
    first = _side_by_side([_moved(grid_rounds(g.blocks * g.size, k), g.start) for g in groups])
    return first + _side_by_side([_meeting(groups, index, k) for index in range(len(groups))])


def grid_rounds(n: int, k: int) -> list[Links]:
    """The k-peer hyper-hypercube: one round per factor of n, each averaging along one side of the grid."""
    return [_along(n, side, stride) for side, stride in _sides(n, k, stride=1)]


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
    again = _side_by_side([_moved(grid_rounds(group.size, k), start) for start in starts])
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


def _along(n: int, side: int, stride: int) -> Links:
    """Averages over the digit (i // stride) mod side of every node i."""
    nodes = np.arange(n)[:, None]
    digit = nodes // stride % side
    turned = (digit + np.arange(1, side)) % side
    senders = (nodes + (turned - digit) * stride).ravel()
    return Links(np.repeat(np.arange(n), side - 1), senders, np.full(senders.size, 1.0 / side))


def _sides(n: int, k: int, stride: int) -> list[tuple[int, int]]:
    sides = []
    for side in shortest_factors(n, k + 1) or ():
        sides.append((side, stride))
        stride *= side
    return sides


def _grid_part(n: int, k: int) -> int:
    """The largest factor of n without a prime factor above k+1."""
    part, rest = 1, n
    for factor in range(2, k + 2):
        while rest % factor == 0:
            part, rest = part * factor, rest // factor
    return part


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
    return [links.moved(offset) for links in rounds]


def _side_by_side(parts: list[list[Links]]) -> list[Links]:
    """Several sequences of rounds at the same time; who has finished waits."""
    return [_join(links for links in now if links is not None) for now in zip_longest(*parts)]


def _join(parts: Iterable[Links]) -> Links:
    empty = Links(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
    return Links(*(np.concatenate(arrays) for arrays in zip(empty, *parts, strict=True)))
