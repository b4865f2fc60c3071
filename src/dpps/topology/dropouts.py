"""Nodes that are away in some rounds: the others route around them."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from dpps.errors import UsageError
from dpps.topology.base import Topology, random_bits, whole
from dpps.topology.weights import Weights


class Dropouts(Topology):
    """Another topology with nodes away in some rounds; an absent node keeps its row (W[j, j] = 1)."""

    def __init__(self, inner: Topology) -> None:
        if isinstance(inner, Dropouts):
            raise UsageError(f"{inner!r} has dropouts already: put all of them into one schedule")
        super().__init__(inner.nodes, period=None, doubly_stochastic=inner.doubly_stochastic)
        self.inner = inner

    @abstractmethod
    def away(self, t: int) -> NDArray[np.bool_]:
        """Which nodes are away in round t; never all of them."""

    def present(self, t: int) -> NDArray[np.bool_] | None:
        """The nodes that take part in round t. None: all."""
        away = self.away(self._phase(t))
        return ~away if away.any() else None

    def build(self, t: int) -> Weights:
        """The weights of the topology inside, routed around the absent nodes."""
        away = self.away(t)
        weights = self.inner.weights(t)
        return route_around(weights, away) if away.any() else weights


class RandomDropouts(Dropouts):
    """Each node is away in each round with the same probability, independently, keyed by (seed, round)."""

    def __init__(self, inner: Topology, probability: float, seed: int) -> None:
        super().__init__(inner)
        if (
            isinstance(probability, bool)
            or not isinstance(probability, (int, float))
            or not 0 <= probability < 1
        ):
            raise UsageError(
                f"dropout probability is {probability!r}, must be from 0 up to but not including 1: "
                "choose e.g. 0.1, or give a schedule {round: nodes away}"
            )
        self.probability = float(probability)
        self.seed = whole("seed", seed, low=0, remedy="choose any number")

    def away(self, t: int) -> NDArray[np.bool_]:
        """Draws who is away; should that be everybody, the node with the largest draw stays."""
        draws = (random_bits("dropouts", self.seed, t, self.nodes) >> np.uint64(11)) * 2.0**-53
        away: NDArray[np.bool_] = draws < self.probability
        if away.all():
            away[np.argmax(draws)] = False
        return away

    def __repr__(self) -> str:
        return f"{self.inner!r}.with_dropouts({self.probability}, seed={self.seed})"


class ScheduledDropouts(Dropouts):
    """The nodes away are given for each round; in a round not named everybody is there."""

    def __init__(self, inner: Topology, schedule: Mapping[int, Iterable[int]]) -> None:
        super().__init__(inner)
        self.schedule = {
            whole("round", t, low=0, remedy="rounds count from 0"): self._checked(t, nodes)
            for t, nodes in schedule.items()
        }

    @property
    def examined(self) -> int:
        """The scheduled rounds, and then as many as the topology inside needs."""
        return max(self.schedule, default=-1) + 1 + self.inner.examined

    def away(self, t: int) -> NDArray[np.bool_]:
        """Looks up who is away."""
        mask = np.zeros(self.nodes, dtype=np.bool_)
        mask[list(self.schedule.get(t, ()))] = True
        return mask

    def _checked(self, t: int, nodes: Iterable[int]) -> tuple[int, ...]:
        if not isinstance(nodes, Iterable):
            raise UsageError(
                f"round {t} of the schedule is {nodes!r}: give the nodes away as a list, [{nodes!r}]"
            )
        name, remedy = f"node away in round {t}", "name nodes of this topology"
        away = sorted({whole(name, node, low=0, high=self.nodes - 1, remedy=remedy) for node in nodes})
        if len(away) == self.nodes:
            raise UsageError(
                f"everybody is away in round {t} of the schedule: leave one of {self.nodes} nodes or more"
            )
        return tuple(away)

    def __repr__(self) -> str:
        if len(self.schedule) <= 4:
            return f"{self.inner!r}.with_dropouts({self.schedule})"
        return f"{self.inner!r}.with_dropouts(<schedule of {len(self.schedule)} rounds>)"


def route_around(weights: Weights, away: NDArray[np.bool_]) -> Weights:
    """W without the absent nodes B: whoever would have sent to B sends to where B would have sent it.

    With A the nodes present, W' = W_AA + W_AB (I - W_BB)^-1 W_BA: the chain W seen only while it is in A.
    Rows and columns of W' sum to 1 if those of W do, since 1' W_AB = 1' (I - W_BB), and likewise for rows. The
    diagonal only grows. Absent nodes from which nothing leads back to A would swallow what they get: there the
    sender keeps it. (With doubly stochastic W they get nothing.)
    """
    W = weights.matrix
    here, gone = np.flatnonzero(~away), np.flatnonzero(away)
    way_out = _way_out(W[here][:, gone], W[gone][:, gone])
    kept = (W[here][:, here] + way_out @ W[gone][:, here]).tocoo()
    swallowed = np.maximum(0.0, 1.0 - np.bincount(kept.col, weights=kept.data, minlength=here.size))
    return Weights.from_entries(
        weights.nodes,
        np.concatenate([here[kept.row], here, gone]),
        np.concatenate([here[kept.col], here, gone]),
        np.concatenate([kept.data, swallowed, np.ones(gone.size)]),
    )


def _way_out(W_AB: csr_array, W_BB: csr_array) -> csr_array:
    """W_AB (I - W_BB)^-1 = W_AB (I + W_BB) (I + W_BB^2) (I + W_BB^4)...: where what B gets ends up in A.

    Only sums of positive numbers, so nothing cancels, and as sparse as the groups of absent neighbours are
    small. 64 factors are 2^64 steps within B, more than float64 can tell apart.
    """
    total, power = W_AB, W_BB
    for _ in range(64):
        more = total @ power
        if more.nnz == 0 or more.max() < 1e-18:
            break
        total, power = total + more, power @ power
    return total
